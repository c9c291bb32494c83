"""What to expect of a run before it starts: the machine behind a GPU's name, the bytes of its ranks, and the time of a step."""

from dataclasses import asdict

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import several
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.paces import ledger, pace
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.fabrics import fabric_of
from hpc_mp.planner.footprint import footprint
from hpc_mp.planner.machine import Machine, machine_named
from hpc_mp.planner.step import step_time
from hpc_mp.rundir.plan import Expectation

VENDORS = ("nvidia ", "amd ", "tesla ", "instinct ")


def machine_of(gpu: str | None, per_node: int) -> Machine:
    """Return the machine with these GPUs.

    Args:
        gpu: name from the driver ("NVIDIA H100 80GB HBM3"), or Slurm's type of the nodes' GRES ("h100", "nvidia_h100_80gb_hbm3");
            else a machine or fabric of the catalogue. None if nothing names them.
        per_node: GPUs of a node.

    Raises:
        HpcMpError: the catalogue has no machine with this GPU, or the name fits GPUs of several sizes.
    """
    if gpu is None:
        raise HpcMpError("the GPUs", "nothing names their model", "set slurm.gpu_type, if the partition has types")
    types, text = catalogue(), _plain(gpu)
    if any(gpu.casefold() in (row.name.casefold(), row.fabric.casefold()) for row in types.machines.values()):
        return machine_named(gpu)
    named = next(([model] for name, model in types.gpus.items() if _plain(name) in text), None)
    models = named or [model for model in types.gpus.values() if _plain(model.name).startswith(text) or
                       _plain(model.title).startswith(text)]
    models = [model for model in models if per_node in model.per_node] or models
    fits = [(model, row) for model in models for row in types.machines.values() if row.gpu == model and model.memory]
    value, remedy = f"GPU {gpu!r}", "add a machine with this name as its fabric to machines.toml: see env/README.md"
    if len({(model.memory, model.memory_gbs) for model, _ in fits}) > 1:
        raise HpcMpError(value, f"it may be {several(sorted({model.title for model, _ in fits}))}", remedy)
    fabrics = [(row.gpus != per_node, not row.nics, model, fabric) for model, row in fits if (fabric := fabric_of(row))]
    if not fabrics:
        raise HpcMpError(value, "the catalogue has no machine with it whose memory, peak and links are known", remedy)
    return Machine(*min(fabrics, key=lambda fit: fit[:2])[2:])


def _plain(name: str) -> str:
    """Return a name of a GPU without vendors, in small letters with blanks."""
    text = name.casefold().replace("_", " ").replace("-", " ")
    for vendor in VENDORS:
        text = text.removeprefix(vendor)
    return text


def expect(layout: Layout, shape: ModelShape, machine: Machine) -> Expectation:
    """Return what to expect of such a layout. Raises HpcMpError if its ranks span nodes without a known network."""
    step, factor = step_time(layout, shape, machine), pace(ledger(), machine.gpu.name)
    return Expectation(machine.gpu.name, machine.fabric.title, machine.memory,
                       tuple(asdict(rank) for rank in footprint(layout, shape)), step.seconds * factor,
                       {name: seconds * factor for name, seconds in step.parts.items()}, step.tokens_per_s / factor,
                       step.mfu / factor, factor)
