"""Clusters made from a subscription: Azure CycleCloud, AWS ParallelCluster, Google Cluster Toolkit. Frozen.

The machines are rows of ``env/machines``; templates and scripts are files under ``cyclecloud``. Nobody is asked and nothing is
created but files.
"""

from hpc_mp.clouds.render import render, write
from hpc_mp.clouds.request import CLOUDS, FIELDS, ClusterRequest, check, find_machine, usual_scratch
from hpc_mp.clouds.summary import ClusterSummary, summarise

__all__ = [
           "CLOUDS",
           "FIELDS",
           "ClusterRequest",
           "ClusterSummary",
           "check",
           "find_machine",
           "render",
           "summarise",
           "usual_scratch",
           "write",
]
