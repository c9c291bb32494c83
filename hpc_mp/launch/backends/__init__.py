"""Back ends, which start and follow a plan. A new back end is a file in this folder and a row of this table."""

from hpc_mp.launch.backends import local, mpi, slurm, step
from hpc_mp.launch.backends.backend import BackEnd, CallRequest, Launch, SubmittedTasks
from hpc_mp.launch.depends import dependencies

__all__ = ["BACKENDS", "BackEnd", "CallRequest", "Launch", "SubmittedTasks"]

BACKENDS = {
    "slurm": BackEnd(slurm.TARGET, slurm.start, arrays=True, depends=dependencies, rehearse=slurm.rehearse, submit=slurm.submit),
    "step": BackEnd(step.TARGET, step.start, named=False),
    "local": BackEnd(local.TARGET, local.start, submit=local.submit),
    "mpi": BackEnd(mpi.TARGET, mpi.start),
}
