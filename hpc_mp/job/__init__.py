"""The job file: one validated description of a run."""

from hpc_mp.job.cluster import Environment, Slurm
from hpc_mp.job.load import AnySpec, Spec, dump_job, is_image, load_any, load_job, load_resolved, load_sweep, resolve, resolve_any
from hpc_mp.job.program import ProgramSpec
from hpc_mp.job.spec import JobSpec

__all__ = [
    "AnySpec", "Environment", "JobSpec", "ProgramSpec", "Slurm", "Spec", "dump_job", "is_image", "load_any", "load_job",
    "load_resolved", "load_sweep", "resolve", "resolve_any",
]
