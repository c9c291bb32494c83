"""The job file: one validated description of a run."""

from hpc_mp.job.cluster import Environment, Slurm
from hpc_mp.job.load import dump_job, is_image, load_job, load_sweep, resolve, under
from hpc_mp.job.spec import JobSpec, Train

__all__ = ["Environment", "JobSpec", "Slurm", "Train", "dump_job", "is_image", "load_job", "load_sweep", "resolve", "under"]
