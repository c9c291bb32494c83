"""From a job file to a plan: everything that is decided before anything is started or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_mp.cluster.ask import NoAnswer
from hpc_mp.cluster.slurm_query import partitions
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.launch.device import Device, check_memory, local_device
from hpc_mp.launch.order import degrees, settle_order
from hpc_mp.launch.slurm import settle
from hpc_mp.launch.where import Where
from hpc_mp.models import ModelShape, check_layout, layer_costs, read_shape
from hpc_mp.placement import Placement, place
from hpc_mp.planner import state_bytes
from hpc_mp.rundir import find_run
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.schedule.stages import stage_layers


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with every choice made.

    Attributes:
        given: the job as its author wrote it.
        spec: the same with ``auto`` settled: what the run directory gets.
        order_why: why the ranks are laid out in this order.
        state: bytes of parameters, gradients and optimizer state, by rank.
    """

    given: JobSpec
    spec: JobSpec
    where: Where
    shape: ModelShape
    placement: Placement
    order_why: str
    device: Device
    state: tuple[int, ...]


def compose(given: JobSpec, where: Where) -> Plan:
    """Make all choices and all checks that need neither transformers nor the data.

    Raises:
        HpcMpError: for a model that is missing or cannot be cut, state beyond the memory, a GPU that is not there, a
            run in ``checkpoint.resume`` that has nothing to give.
    """
    shape = read_shape(given)
    check_layout(shape, given)
    if given.checkpoint.resume is not None:
        _check_origin(Path(given.checkpoint.resume))
    costs, p = layer_costs(shape, given.data.sequence_length), given.parallel
    layers = stage_layers(p.partition, costs.blocks, p.pipeline, costs.embedding, costs.head)
    order, order_why = settle_order(given, shape, layers)
    settled = given.model_copy(update={"parallel": p.model_copy(update={"order": order})})
    spec, device = _local(settled) if where.place == "local" else _slurm(settled)
    placement = place(degrees(spec), order, spec.job.ranks_per_node)
    held = state_bytes(shape, spec, layers)
    state = tuple(held[rank.pp, rank.tp].total for rank in placement.ranks)
    check_memory(state, device)
    return Plan(given, spec, where, shape, placement, order_why, device, state)


def _local(spec: JobSpec) -> tuple[JobSpec, Device]:
    device = local_device(spec.job.device, spec.ranks)
    return spec.model_copy(update={"job": spec.job.model_copy(update={"device": device.kind})}), device


def _slurm(spec: JobSpec) -> tuple[JobSpec, Device]:
    try:
        spec = settle(spec, partitions())
    except NoAnswer as error:
        return spec, Device(spec.job.device, f"partitions unknown: {error}")
    return spec, Device(spec.job.device, "as the partition has it")


def _check_origin(path: Path) -> None:
    value = f"checkpoint.resume = {path}"
    try:
        run = find_run(path)
    except HpcMpError as error:
        raise HpcMpError(value, error.rule, error.remedy) from None
    if not complete_steps(run.checkpoints):
        raise HpcMpError(value, "is a run without a checkpoint", "name a run that has saved")
