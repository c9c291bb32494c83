"""Back ends, which start and follow a plan. A new back end is a file in this folder and a row of this table."""

from hpc_mp.launch.backends import local, mpi, slurm, step
from hpc_mp.launch.backends.backend import CallRequest, Launch, Launcher, SubmittedTasks
from hpc_mp.launch.depends import dependencies

__all__ = ["BACKENDS", "CallRequest", "Launch", "Launcher", "SubmittedTasks"]

BACKENDS = {
    "slurm": Launcher(slurm.TARGET, slurm.start, arrays=True, depends=dependencies, rehearse=slurm.rehearse, submit=slurm.submit),
    "step": Launcher(step.TARGET, step.start, named=False),
    "local": Launcher(local.TARGET, local.start, submit=local.submit),
    "mpi": Launcher(mpi.TARGET, mpi.start),
}
