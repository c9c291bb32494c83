"""``hpc-mp train --profile``: the cost of the units of a job's model on this device, for ``parallel.partition``."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_train
from hpc_mp.base.text import counted, memory_size
from hpc_mp.cli.output import number_table, terminal
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.launch.plan import stages_of
from hpc_mp.layout.model_profile import ModelProfile, write_profile
from hpc_mp.layout.models import ModelShape

REPETITIONS = 10


def profile_and_print(job: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Profile a job's model and print it. Raises HpcMpError for an invalid job, a missing device or unwritable file."""
    need_train("hpc-mp train --profile")
    spec = load_job(job, overrides)
    shape = read_shape(spec)
    check_job(spec, shape)
    from hpc_mp.train.rank.unit_profile import measure  # imports torch

    profile = measure(spec, shape, REPETITIONS)
    try:
        write_profile(spec.profile, profile)
    except OSError as error:
        raise HpcMpError(f"the profile {spec.profile}", f"cannot be written ({error.strerror})",
                         "set another file in parallel.profile, or another job.directory") from None
    if as_json:
        click.echo(json.dumps({**asdict(profile), "file": str(spec.profile)}))
    else:
        _print(profile, spec, shape)


def _print(profile: ModelProfile, spec: JobSpec, shape: ModelShape) -> None:
    console = terminal()
    console.print(f"{shape.model_type} on {profile.device}: one microbatch of {counted(spec.microbatch_size, 'sequence')} of "
                  f"{spec.data.sequence_length:,} tokens in {spec.train.precision}, recompute {spec.parallel.recompute}; "
                  f"median of {profile.repetitions}", markup=False)
    table = number_table("unit", "number", "forward + backward", "activations", "parameters")
    blocks = [("block" if len(profile.blocks) == 1 else f"block {shape.kinds.index(kind)}", shape.kinds.count(kind), unit)
              for kind, unit in enumerate(profile.blocks)]
    for name, number, unit in (("embedding", 1, profile.embedding), *blocks, ("norm and head", 1, profile.head)):
        table.add_row(name, f"{number}", f"{unit.seconds * 1e3:.3f} ms", memory_size(unit.activations),
                      memory_size(unit.parameters))
    console.print()
    console.print(table)
    measured = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"partition": "profile"})})
    cut = stages_of(measured, shape)
    console.print(f"\nwritten to {spec.profile}\npartition = \"profile\" results in {list(cut.layers)}: {cut.why}", markup=False)
