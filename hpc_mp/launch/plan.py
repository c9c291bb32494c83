"""From a job file to a plan: everything that is decided before anything is started or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import bad_nodes, ledger
from hpc_mp.cluster.bandwidth import Measured, noted
from hpc_mp.cluster.slurm.inside import Where
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import JobSpec
from hpc_mp.launch.avoid import avoid
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.gpu_request import settle
from hpc_mp.launch.profile import settle_profile
from hpc_mp.launch.render import Template
from hpc_mp.layout.models import ModelShape, check_layout, layer_costs, read_shape
from hpc_mp.layout.placement import Placement, place
from hpc_mp.layout.schedule.partition import stage_layers
from hpc_mp.planner import state_bytes
from hpc_mp.planner.device import Device, check_memory, local_device
from hpc_mp.planner.order import degrees, foresee_hosts, settle_order
from hpc_mp.rundir import find_run
from hpc_mp.rundir.checkpoints import complete_steps


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with every choice made.

    Attributes:
        given: the job as its author wrote it.
        spec: the same with ``auto`` settled: what the run directory gets.
        order_why: why the ranks are laid out in this order.
        state: bytes of parameters, gradients and optimizer state, by rank.
        facts: what Slurm says of itself; nothing on emulated nodes.
        template: of the job script, where it is not the shipped one.
        avoided: which nodes are left out because they failed lately.
        profile: which environment profile, and what is to be said of it.
        measured: rates between nodes of the cluster; the order of the hosts follows them.
    """

    given: JobSpec
    spec: JobSpec
    where: Where
    shape: ModelShape
    placement: Placement
    order_why: str
    device: Device
    state: tuple[int, ...]
    facts: ClusterFacts
    template: Template | None = None
    avoided: str | None = None
    profile: str | None = None
    measured: Measured | None = None


def compose(given: JobSpec, where: Where, slurm_version: Version | None = None) -> Plan:
    """Make all choices and all checks that need neither transformers nor the data.

    Args:
        slurm_version: to write the job script for, in place of the one found.

    Raises:
        HpcMpError: for a model that is missing or cannot be cut, state beyond the memory, a GPU that is not there, a
            run in ``checkpoint.resume`` that has nothing to give, an environment profile that there is not.
    """
    shape = read_shape(given)
    check_layout(shape, given)
    if given.checkpoint.resume is not None:
        _check_origin(Path(given.checkpoint.resume))
    costs, p = layer_costs(shape, given.data.sequence_length), given.parallel
    layers = stage_layers(p.partition, costs.blocks, p.pipeline, costs.embedding, costs.head)
    facts = ClusterFacts(slurm_version) if where.place in OUTSIDE else ask_cluster(given, slurm_version)
    if where.place == "step":
        facts = replace(facts, cpus=None)  # an allocation may have fewer than its nodes
    settled, device = OUTSIDE[where.place](given) if where.place in OUTSIDE else _slurm(given, facts)
    avoided = None
    if facts.cluster is not None:
        settled, avoided = avoid(settled, facts.partition, bad_nodes(ledger(facts.cluster)))
    measured = noted(facts.cluster)
    settled, profile = settle_profile(settled, measured.platform if measured else None)
    order, why = settle_order(settled, shape, layers, measured)
    order_why = "; ".join(filter(None, (why, foresee_hosts(settled, measured))))
    spec = settled.model_copy(update={"parallel": p.model_copy(update={"order": order})})
    placement = place(degrees(spec), order, spec.job.ranks_per_node, spec.parallel.rank_map)
    held = state_bytes(shape, spec, layers)
    state = tuple(held[rank.pp, rank.tp].total for rank in placement.ranks)
    check_memory(state, device)
    return Plan(given, spec, where, shape, placement, order_why, device, state, facts, avoided=avoided,
                profile=None if where.place in OUTSIDE else profile, measured=measured)


def _local(spec: JobSpec) -> tuple[JobSpec, Device]:
    device = local_device(spec.job.device, spec.ranks)
    return spec.model_copy(update={"job": spec.job.model_copy(update={"device": device.kind})}), device


def _mpi(spec: JobSpec) -> tuple[JobSpec, Device]:
    return spec, Device(spec.job.device, "mpirun's hosts are not known here")


OUTSIDE = {"local": _local, "mpi": _mpi}  # of Slurm


def _slurm(spec: JobSpec, facts: ClusterFacts) -> tuple[JobSpec, Device]:
    if facts.silence is not None:
        return spec, Device(spec.job.device, f"partitions unknown: {facts.silence}")
    spec = settle(spec, facts)
    return spec, Device(spec.job.device, "as the partition has it")


def _check_origin(path: Path) -> None:
    value = f"checkpoint.resume = {path}"
    try:
        run = find_run(path)
    except HpcMpError as error:
        raise HpcMpError(value, error.rule, error.remedy) from None
    if not complete_steps(run.checkpoints):
        raise HpcMpError(value, "is a run without a checkpoint", "name a run that has saved")
