"""An array: one script for several runs."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec

# Keys that the script holds: they are the same for all elements.
SHARED = ("job.name", "job.nodes", "job.ranks_per_node", "job.time_limit", "job.device", "job.directory",
          "model.stage", "data.stage",
          *(f"slurm.{key}" for key in type(JobSpec.model_fields["slurm"].default).model_fields if key != "array"),
          *(f"environment.{key}" for key in type(JobSpec.model_fields["environment"].default).model_fields))


def check_array(elements: Sequence[JobSpec]) -> None:
    """Refuse elements that one script cannot serve.

    Args:
        elements: the job of each element, its table of ``slurm.array`` applied.

    Raises:
        HpcMpError: an element changes a key that the script holds.
    """
    first = elements[0]
    for number, element in enumerate(elements):
        for key in SHARED:
            section, name = key.split(".")
            given = getattr(getattr(element, section), name)
            if given != getattr(getattr(first, section), name):
                raise HpcMpError(f"slurm.array[{number}]: {key} = {given!r}",
                                 "is held by the job script, which all elements of an array share",
                                 "give it the same value in every element, or launch a job of its own")
