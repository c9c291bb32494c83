"""Which type of machine this node is, of those in the catalogue."""

from __future__ import annotations

import re

from hpc_mp.catalogue import MachineType, catalogue
from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.parse import maybe
from hpc_mp.cluster.node.source import NodeSource

_DMI = "/sys/class/dmi/id"


def read_machine_type(source: NodeSource) -> MachineType | None:
    """From the firmware's words and the GPUs, never from a host name; None for a node that the catalogue cannot judge.

    Where the firmware names no type of machine, as Azure's, one of its GPUs and at least its processors tell: the smaller sizes
    have the same GPUs, fewer of them.
    """
    vendor = maybe(source.text, f"{_DMI}/sys_vendor") or ""
    product = maybe(source.text, f"{_DMI}/product_name") or ""
    known = [each for each in catalogue().machines.values()
             if each.judged and each.marks is not None and re.match(each.marks.vendor, vendor)]
    if not known:
        return None
    devices = {gpu.device for gpu in read_gpus(source)}
    processors = len(source.names("/sys/devices/system/cpu/cpu[0-9]*"))
    return next((each for each in sorted(known, key=_rank) if _is_one(each, product, devices, processors)), None)


def _is_one(kind: MachineType, product: str, devices: set[str], processors: int) -> bool:
    if kind.marks is not None and kind.marks.product:
        return re.fullmatch(kind.marks.product, product) is not None
    return kind.gpu is not None and not devices.isdisjoint(kind.gpu.pci) and processors >= kind.vcpus


def _rank(kind: MachineType) -> int:
    return kind.marks.rank if kind.marks is not None else 0
