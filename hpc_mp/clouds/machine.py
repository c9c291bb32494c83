"""The machine that a name means, in the clouds that have a template here."""

from __future__ import annotations

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.clouds.azure.catalogue import Size, load_machines

CLOUDS = {"aws": "AWS", "gcp": "Google Cloud"}
TOOLS = {"aws": "AWS ParallelCluster", "gcp": "Google's Cluster Toolkit"}
_ELSEWHERE = {  # adapters whose software is part of an image that only Google's own blueprint builds
    "TCPX": "examples/machine-learning/a3-highgpu-8g",
    "TCPXO": "examples/machine-learning/a3-megagpu-8g",
}


def find_machine(sku: str) -> Size:
    """By name, whatever its case.

    Raises:
        HpcMpError: there is none, it is Azure's, or no template is made for it.
    """
    machines = load_machines()
    size = machines.size(sku)
    if size is None:
        here = [each.name for each in machines.sizes.values() if each.cloud in CLOUDS]
        names = [each.name for each in machines.sizes.values()]
        raise HpcMpError(f"--sku {sku}", "is not in the catalogue",
                         f"{did_you_mean(sku, names)} Here are {', '.join(here)}".lstrip())
    if size.cloud not in CLOUDS:
        raise HpcMpError(f"--sku {size.name}", "is a size of Azure, whose clusters CycleCloud makes",
                         "name a machine of AWS or Google Cloud")
    if size.rdma in _ELSEWHERE:
        raise HpcMpError(f"--sku {size.name}", f"needs an image with {size.rdma}, which Google's own blueprint builds",
                         f"use {_ELSEWHERE[size.rdma]} of cluster-toolkit, and there `hpc-mp env --profile {size.profile}`; "
                         "a3-ultragpu-8g and a4-highgpu-8g are rendered here")
    return size
