"""The machine of a plan: one type of node, by its name in the catalogue, by its fabric's, or by a GPU model that it has."""

from dataclasses import dataclass
from functools import cache

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.catalogue import GpuModel, MachineType, catalogue
from hpc_mp.planner.fabrics import Fabric, fabric_of


@dataclass(frozen=True, slots=True)
class NodeType:
    """A type of node: its GPU model, and the links and NICs. ``fabric.gpus`` is the number of GPUs of a node."""

    gpu: GpuModel
    fabric: Fabric

    @property
    def memory(self) -> int:
        """Bytes of device memory of one GPU."""
        assert self.gpu.memory is not None  # ``machine_named`` refuses others
        return self.gpu.memory


@cache
def machine_named(name: str) -> NodeType:
    """Return the machine of this name, else the first whose fabric or GPU has it: "p5", "H100", "A100 80GB". Raises HpcMpError if
    the catalogue has none, or if its memory, peak or links are unknown."""
    types = catalogue()
    word = name.casefold()

    def called(machine: MachineType) -> bool:
        return machine.fabric.casefold() == word

    def has_gpu(machine: MachineType) -> bool:
        return any(text.casefold().startswith(word) for text in (machine.gpu.name, machine.gpu.title)) if machine.gpu else False

    rows = [row for row in types.machines.values() if row.gpu and row.gpu.memory and row.gpu.memory_gbs and fabric_of(row)]
    exact = [row for row in (types.machine(name),) if row in rows]
    for row in (*exact, *filter(called, rows), *filter(lambda row: has_gpu(row) and row.nics, rows), *filter(has_gpu, rows)):
        fabric = fabric_of(row)
        assert row.gpu is not None and fabric is not None
        return NodeType(row.gpu, fabric)
    names = sorted({row.fabric for row in rows if row.fabric} | {row.gpu.name for row in rows if row.gpu})
    raise HpcMpError(f"machine {name!r}", "is not a machine or a GPU of the catalogue whose memory, peak and links are known",
                     did_you_mean(name, names, f"use one of {', '.join(names)}, or add a row: see env/README.md"))
