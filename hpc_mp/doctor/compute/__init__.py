"""Speed and exactness of every GPU and of the processors of a node under load.

A slow GPU is the most common straggler and silent corruption the worst fault. Both show only under load, compared with peers.
"""

from hpc_mp.doctor.compute.judge import Result, judge
from hpc_mp.doctor.compute.workers import devices_here, measure

__all__ = ["Result", "devices_here", "judge", "measure"]
