"""Clusters made from a subscription: Azure CycleCloud, AWS ParallelCluster, Google Cluster Toolkit. Frozen.

The machines are rows of CycleCloud's catalogue with a ``cloud`` of their own; templates and scripts are files under
``cyclecloud/other-clouds``. Nobody is asked and nothing is created but files.
"""

from hpc_mp.clouds.machine import CLOUDS, find_machine
from hpc_mp.clouds.render import render
from hpc_mp.clouds.request import FIELDS, Wish, check, usual_scratch
from hpc_mp.clouds.summary import Promise, promise
from hpc_mp.clouds.write import write

__all__ = ["CLOUDS", "FIELDS", "Promise", "Wish", "check", "find_machine", "promise", "render", "usual_scratch", "write"]
