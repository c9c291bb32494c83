"""Back ends: how a plan is started and followed. A new one is a file in this folder and a row of this table."""

from hpc_mp.launch.backends import local, mpi, slurm, step
from hpc_mp.launch.backends.backend import Launch, Launcher

__all__ = ["BACKENDS", "Launch", "Launcher"]

BACKENDS = {
    "slurm": Launcher(slurm.TARGET, slurm.start, arrays=True),
    "step": Launcher(step.TARGET, step.start, named=False),
    "local": Launcher(local.TARGET, local.start),
    "mpi": Launcher(mpi.TARGET, mpi.start),
}
