"""How fast, and how exactly, every GPU and the processors of a node compute under load.

The slow GPU is the commonest straggler, and silent corruption the worst fault: both show only under work, against peers.
"""

from __future__ import annotations

from hpc_mp.doctor.compute.judge import judge
from hpc_mp.doctor.compute.result import Result, read_results, write_results
from hpc_mp.doctor.compute.workers import devices_here, measure

__all__ = ["Result", "devices_here", "judge", "measure", "read_results", "write_results"]
