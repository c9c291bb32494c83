"""Conversion of the user's job script to a job file with ``[program]``; every line of the script is accounted for."""

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.adopt.adopt import AdoptedJob, adopt

__all__ = ["AdoptedJob", "Fate", "LineFate", "adopt"]
