"""Clusters made from a subscription: Azure CycleCloud, AWS ParallelCluster, Google Cluster Toolkit. Frozen.

The machines are rows of ``env/machines``; templates and scripts are files under
``cyclecloud/other-clouds``. Nobody is asked and nothing is created but files.
"""

from hpc_mp.clouds.render import render, write
from hpc_mp.clouds.request import CLOUDS, FIELDS, Wish, check, find_machine, usual_scratch
from hpc_mp.clouds.summary import Promise, promise

__all__ = ["CLOUDS", "FIELDS", "Promise", "Wish", "check", "find_machine", "promise", "render", "usual_scratch", "write"]
