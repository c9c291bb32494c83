"""Back ends: how a plan is started and followed. A new one is a file in this folder and a row of this table."""

from hpc_mp.launch.backends import local, mpi, slurm, step
from hpc_mp.launch.backends.backend import Launch, Launcher

__all__ = ["BACKENDS", "Launch", "Launcher"]

BACKENDS = {
    "local": Launcher("emulated on this machine", local.start),
    "slurm": Launcher("in a new Slurm job", slurm.start, arrays=True),
    "step": Launcher("in this allocation", step.start),
    "mpi": Launcher("under mpirun", mpi.start),
}
