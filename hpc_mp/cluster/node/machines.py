"""The catalogue's machine type of this node."""

import re

from hpc_mp.catalogue import MachineType, catalogue
from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.source import NodeSource, firmware


def read_machine_type(source: NodeSource) -> MachineType | None:
    """Return the machine type by firmware and GPUs, never by host name; None if the catalogue cannot identify it.

    If the firmware names no machine type, as on Azure, it is identified by the model of its GPUs and a minimum of processors:
    smaller sizes have fewer GPUs of the same model.
    """
    vendor, product = firmware(source)
    candidates = [kind for kind in catalogue().machines.values()
                  if kind.judged and kind.marks is not None and re.match(kind.marks.vendor, vendor)]
    if not candidates:
        return None
    devices = {gpu.device for gpu in read_gpus(source)}
    processors = len(source.names("/sys/devices/system/cpu/cpu[0-9]*"))
    ranked = sorted(candidates, key=lambda kind: kind.marks.rank if kind.marks is not None else 0)
    return next((kind for kind in ranked if _is_one(kind, product, devices, processors)), None)


def _is_one(kind: MachineType, product: str, devices: set[str], processors: int) -> bool:
    if kind.marks is not None and kind.marks.product:
        return re.fullmatch(kind.marks.product, product) is not None
    return kind.gpu is not None and not devices.isdisjoint(kind.gpu.pci) and processors >= kind.vcpus
