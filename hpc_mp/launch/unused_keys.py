"""Keys that have an effect in some places only, and what is said of those given in vain: nothing is left undone in silence."""

from __future__ import annotations

from typing import Literal

from hpc_mp.cluster.slurm.options import options_of
from hpc_mp.job import JobSpec

Place = Literal["step", "slurm", "mpi", "local"]

# What an allocation is asked for, or follows from its end: no step of an allocation can change that.
JOB: tuple[Place, ...] = ("slurm",)
# What the script does (slurm/job.sbatch.j2) or the cluster's nodes do before the ranks.
SCRIPT: tuple[Place, ...] = ("slurm", "step")

PLACES: dict[str, tuple[Place, ...]] = {
    **dict.fromkeys(("slurm.account", "slurm.qos", "slurm.constraint", "slurm.reservation", "slurm.switches", "slurm.gpu_type",
                     "slurm.gpu_request", "slurm.array", "slurm.retries", "slurm.chain"), JOB),
    **dict.fromkeys(("slurm.partition", "slurm.mpi", "slurm.components", "slurm.grace", "slurm.container",
                     "slurm.container_runtime", "slurm.container_mounts", "slurm.modules", "slurm.conda", "slurm.venv",
                     "slurm.python", "slurm.setup", "slurm.extra", "environment.local", "environment.stage",
                     "environment.profile", "environment.health", "model.stage", "data.stage"), SCRIPT),
}


def without_effect(spec: JobSpec, place: Place) -> str | None:
    """One sentence on the keys that the job gives other values than the defaults, and that do nothing there; None without any.

    Args:
        spec: as its author wrote it; of an array the first element, which is the one that runs where arrays have no effect.
    """
    vain = [key for key, places in PLACES.items() if place not in places and _given(spec, key)]
    if place == "step":
        told = {"cpus-per-task", *options_of(spec, "step")}  # these are said to srun too
        vain += [f"slurm.extra.{name}" for name in spec.slurm.extra if name not in told]
    words = f"{', '.join(vain)} {'has' if len(vain) == 1 else 'have'} no effect here" if vain else None
    return f"{words}; of the array only the first element runs" if words and "slurm.array" in vain else words


def _given(spec: JobSpec, key: str) -> bool:
    section, name = key.split(".")
    table = getattr(spec, section)
    return bool(getattr(table, name) != type(table).model_fields[name].get_default())
