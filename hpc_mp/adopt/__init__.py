"""Somebody's job script becomes a job file with ``[program]``, and every line of it is accounted for."""

from __future__ import annotations

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.adopt.adopt import AdoptedJob, adopt

__all__ = ["AdoptedJob", "Fate", "LineFate", "adopt"]
