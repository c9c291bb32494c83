"""Checks of the path between adapters and GPUs: PCI links, bridges, the IOMMU, drivers for direct transfers."""

import itertools
import re
from collections.abc import Iterator

from hpc_mp.base.text import several
from hpc_mp.cluster.node.pci import Bridges, Direct, Link, Rails, read_bridges, read_direct, read_links, read_rails
from hpc_mp.cluster.node.rdma import RdmaAdapter
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_BRIDGE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d")
_DMABUF_KERNEL = (5, 12)  # the first kernel whose verbs support DMA-BUF


def links(pci_links: tuple[Link, ...]) -> Iterator[Judgement]:
    for link in pci_links:
        if not link.answers:
            yield Judgement("error", "its registers read as all ones: it has fallen off the bus",
                            f"{link.device} ({link.address})",
                            "power the machine off and on; if it happens again, reseat the adapter or have it replaced")
        if link.width is None or link.max_width is None:
            continue
        narrow = link.width < link.max_width
        slow = link.speed is not None and link.max_speed is not None and link.speed < link.max_speed
        speed = "" if link.speed is None or link.max_speed is None else f", {link.speed:g} of {link.max_speed:g} GT/s"
        yield Judgement("warning" if narrow or slow else "ok", f"{link.width} of {link.max_width} lanes{speed}",
                        f"{link.device} ({link.address})")


def redirecting(bridges: Bridges) -> Iterator[Judgement]:
    if not bridges.gpus or bridges.virtual:
        return
    if isinstance(bridges.redirecting, Unavailable):
        raise bridges.redirecting
    if bridges.redirecting:
        yield Judgement("warning", f"access control redirects in {len(bridges.redirecting)} PCI bridges of a "
                        "machine that is not virtual: transfers between GPUs and adapters go through the root, slowly, or hang",
                        several(bridges.redirecting))
    else:
        yield Judgement("ok", "no PCI bridge above a GPU or adapter redirects")


def translated(bridges: Bridges) -> Iterator[Judgement]:
    if not bridges.gpus or bridges.virtual:
        return
    bad = [address for address, domain in bridges.domains.items() if domain != "identity"]
    if bad:
        yield Judgement("warning",
                        f"the IOMMU translates the addresses of {len(bad)} GPUs and adapters (type {bridges.domains[bad[0]]})",
                        several(bad))
    else:
        state = f"lets all {len(bridges.domains)} pass" if bridges.domains else "is off"
        yield Judgement("ok", f"the IOMMU {state}")


def numa(rails: Rails) -> Iterator[Judgement]:
    if rails.nodes < 2:
        return
    for adapter in rails.fabric.adapters:
        if adapter.address and any(port in rails.fabric.ports for port in adapter.ports):
            valid = adapter.numa is not None
            where = f"memory node {adapter.numa}" if valid else f"which of {rails.nodes} memory nodes is near is not known"
            yield Judgement("ok" if valid else "warning", where, adapter.name)


def nearest(rails: Rails) -> Iterator[Judgement]:
    adapters = [adapter for adapter in rails.fabric.adapters if adapter.address
                and any(port in rails.fabric.ports for port in adapter.ports)]
    if not adapters or not rails.gpus or any(gpu.numa is None for gpu in rails.gpus):
        return
    for gpu in rails.gpus:
        near = [adapter.name for adapter in adapters if _is_near(rails, gpu.bus, gpu.numa, adapter)]
        yield Judgement("ok" if near else "warning",
                        f"near it: {', '.join(near)}" if near else f"no adapter at its PCI switch or memory node {gpu.numa}",
                        f"GPU {gpu.bus}")


def _is_near(rails: Rails, bus: str, numa: int | None, adapter: RdmaAdapter) -> bool:
    """Return True if both are below one PCI bridge or at one memory node."""
    gpu_path, adapter_path = rails.above[bus].split("/"), rails.above[adapter.address].split("/")
    shared = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(gpu_path, adapter_path, strict=False))]
    return _BRIDGE.fullmatch(shared[-1]) is not None or numa == adapter.numa


def direct(facts: Direct) -> Iterator[Judgement]:
    if not facts.gpus or not facts.fabric.ports:
        return
    if isinstance(facts.modules, Unavailable):
        raise facts.modules
    peer = [name for name in _PEER_MODULES if name in facts.modules]
    if peer:
        yield Judgement("ok", f"{peer[0]} is loaded")
    elif facts.open_driver and facts.kernel >= _DMABUF_KERNEL:
        yield Judgement("ok", f"DMA-BUF: the open driver on kernel {facts.kernel[0]}.{facts.kernel[1]}")
    else:
        why = "the driver is not the open one" if facts.open_driver is False else "no driver is loaded" \
            if facts.open_driver is None else f"kernel {facts.kernel[0]}.{facts.kernel[1]} is older than 5.12"
        yield Judgement("error",
                        f"no nvidia_peermem, and no DMA-BUF ({why}): data between GPUs of two nodes would go through main memory")


def copies(facts: Direct) -> Iterator[Judgement]:
    if facts.gpus and facts.copy_library:
        if isinstance(facts.modules, Unavailable):
            raise facts.modules
        loaded = "gdrdrv" in facts.modules
        yield Judgement("ok" if loaded else "warning",
                        "gdrdrv is loaded" if loaded else "GDRCopy's library is installed, its module gdrdrv is not loaded")


CHECKS = (
    *checks_of(read_links, {"nic-pcie": links}),
    *checks_of(read_rails, {"nic-numa": numa, "nic-gpu": nearest}),
    *checks_of(read_bridges, {"pci-acs": redirecting, "pci-iommu": translated}),
    *checks_of(read_direct, {"gdr-module": direct, "gdrcopy": copies}),
)
