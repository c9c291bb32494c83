"""What Amazon's adapter needs beside its driver."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.cluster.node.parse import maybe
from hpc_mp.cluster.node.rdma import Fabric, read_fabric
from hpc_mp.cluster.node.source import Source

LIBRARIES = ("/opt/amazon/efa/lib*/libfabric.so*", "/usr/lib*/libfabric.so*", "/usr/lib/*/libfabric.so*")
_PLACES = ("/opt/amazon/ofi-nccl/lib*", "/opt/amazon/ofi-nccl/lib/*", "/opt/aws-ofi-nccl/lib*", "/opt/aws-ofi-nccl/install/lib",
           "/opt/amazon/efa/lib*")
PLUGINS = tuple(f"{place}/{name}" for place in _PLACES for name in ("libnccl-net*.so*", "libnccl-ofi*.so*"))


@dataclass(frozen=True)
class Efa:
    """``driver``: version of the kernel module; ``library``: libfabric; ``plugin``: what joins NCCL to it. None: not there."""

    fabric: Fabric
    driver: str | None
    library: str | None
    plugin: str | None


def read_efa(source: Source) -> Efa:
    """Never raises."""
    def first(patterns: tuple[str, ...]) -> str | None:
        return next((name for pattern in patterns for name in source.names(pattern)), None)

    return Efa(read_fabric(source), maybe(source.text, "/sys/module/efa/version"), first(LIBRARIES), first(PLUGINS))
