"""The expectation of a run before it starts: the machine behind a GPU's name, the bytes of its ranks, and the time of a step."""

import re
from dataclasses import asdict, replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import several
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.paces import ledger, pace
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.fabrics import fabric_of
from hpc_mp.planner.footprint import footprint
from hpc_mp.planner.machine import NodeType, machine_named
from hpc_mp.planner.step import step_time
from hpc_mp.rundir.plan import ExpectedStep

CPU = "cpu"  # the vendor of rows whose figures are those of one rank on processors
PROCESS = 600 << 20  # resident bytes of Python with PyTorch and transformers, before there is a model


def machine_of(gpu: str | None, per_node: int) -> NodeType:
    """Return the machine with these GPUs. ``gpu``: the driver's name ("NVIDIA H100 80GB HBM3"), the type in Slurm's GRES ("h100",
    "nvidia_h100_80gb_hbm3"), or a machine or fabric of the catalogue. ``per_node``: GPUs of a node. Raises HpcMpError if the
    catalogue has no machine with this GPU, or the name fits GPUs of several sizes."""
    if gpu is None:
        raise HpcMpError("the GPUs", "nothing names their model", "set slurm.gpu_type, if the partition has types")
    types, text = catalogue(), _plain(gpu)
    if any(gpu.casefold() in (row.name.casefold(), row.fabric.casefold()) for row in types.machines.values()):
        return machine_named(gpu)
    named = next(([model] for name, model in types.gpus.items() if _plain(name) in text), None)
    models = named or [model for model in types.gpus.values()
                       if any(_plain(title).startswith(text) for title in (model.name, model.title))]
    models = [model for model in models if per_node in model.per_node] or models
    fits = [(model, row) for model in models for row in types.machines.values() if row.gpu == model and model.memory]
    value, remedy = f"GPU {gpu!r}", "add a machine with this name as its fabric to machines.toml: see env/README.md"
    if len({(model.memory, model.memory_gbs) for model, _ in fits}) > 1:
        raise HpcMpError(value, f"it may be {several(sorted({model.title for model, _ in fits}))}", remedy)
    fabrics = [(row.gpus != per_node, not row.nics, model, fabric) for model, row in fits if (fabric := fabric_of(row))]
    if not fabrics:
        raise HpcMpError(value, "the catalogue has no machine with it whose memory, peak and links are known", remedy)
    return NodeType(*min(fabrics, key=lambda fit: fit[:2])[2:])


def _plain(name: str) -> str:
    """Return a name of a GPU without its vendor, in small letters with blanks."""
    return re.sub(r"^((nvidia|amd|tesla|instinct) )+", "", name.casefold().replace("_", " ").replace("-", " "))


def shared(machine: NodeType, ranks: int) -> NodeType:
    """Return a machine whose processors so many ranks of a node share, instead of those with whom it was measured."""
    gpu, fabric = machine.gpu, machine.fabric
    share = fabric.gpus / ranks
    return NodeType(replace(gpu, memory_mib=int((gpu.memory_mib or 0) * share), memory_gbs=(gpu.memory_gbs or 0) * share,
                           peak_tflops={name: peak * share for name, peak in gpu.peak_tflops.items()}),
                   replace(fabric, gpus=ranks, link=fabric.link * share))


def expect(layout: Layout, shape: ModelShape, machine: NodeType) -> ExpectedStep:
    """Return what to expect of such a layout. Raises HpcMpError if its ranks span nodes without a known network."""
    step, factor = step_time(layout, shape, machine), pace(ledger(), machine.gpu.name)
    needs: list[dict[str, int]] = []
    for rank in map(asdict, footprint(layout, shape)):
        changes = {"libraries": 0, "process": PROCESS} if machine.gpu.vendor == CPU else {}
        lines = sorted((rank | changes | {"host": 0}).items(), key=lambda line: -line[1])
        needs.append({name: size for name, size in lines if size})
    return ExpectedStep(machine.gpu.name, machine.fabric.title, machine.memory, tuple(needs), step.seconds * factor,
                       {name: seconds * factor for name, seconds in step.parts.items() if seconds},
                       step.tokens_per_s / factor, step.mfu / factor, tuple(seconds * factor for seconds in step.passes), factor)
