"""In which letter order the ranks of a job are laid out, on which hosts, and why."""

from __future__ import annotations

from math import prod

from hpc_mp.cluster.bandwidth import COUNTS_DAYS, LinkRates, rates
from hpc_mp.cluster.topology import SwitchTree
from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape, family_of, layer_costs, read_shape
from hpc_mp.layout.placement import (
    GLOO,
    NCCL,
    Backend,
    Degrees,
    Placement,
    Traffic,
    choose_order,
    normalize_order,
    traffic,
)
from hpc_mp.layout.placement.cost import DEFAULT_BANDWIDTH
from hpc_mp.layout.schedule.partition import stage_layers
from hpc_mp.planner.hosts import best_hosts, foreseen, host_words, rate_words

ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2}  # bytes of one activation or gradient element on the wire


def degrees(spec: JobSpec) -> Degrees:
    p = spec.parallel
    return Degrees(tensor=p.tensor, pipeline=p.pipeline, data=spec.data_degree, context=p.context, expert=p.expert)


def moved(spec: JobSpec, shape: ModelShape, layers: tuple[int, ...]) -> Traffic:
    """Bytes per optimizer step and axis. ``layers``: of every stage."""
    p = spec.parallel
    return traffic(
        degrees(spec), hidden=shape.hidden, sequence=spec.data.sequence_length, zero=p.zero,
        microbatch_size=spec.microbatch_size, microbatches=spec.microbatches, layers_per_stage=max(layers),
        stage_parameters=_largest_stage(shape, layers, p.tensor), bytes_per_element=ELEMENT[spec.train.precision],
        backend=_backend(spec))


def settle_order(spec: JobSpec, shape: ModelShape, layers: tuple[int, ...], measured: LinkRates | None = None) -> tuple[str, str]:
    """The letters and the reason; ``auto`` takes the order in which a step waits least for the links between nodes.

    Args:
        spec: with ``job.device`` settled: ranks on CPUs talk through gloo, those on GPUs through NCCL.
        layers: of every stage.
        measured: what the doctor has measured on this cluster; the median rate counts, for nobody knows the nodes yet.
    """
    asked, p = spec.parallel.order, spec.parallel
    if asked != "auto":
        return normalize_order(asked, p.context), f"parallel.order = {asked}"
    usual = measured.usual if measured is not None and measured.recent() else None
    order, costs = choose_order(degrees(spec), moved(spec, shape, layers), spec.job.ranks_per_node,
                                DEFAULT_BANDWIDTH if usual is None else usual * 1e9, rank_map=p.rank_map,
                                stages_in_turn=_backend(spec).in_turn and p.zero > 0)
    if spec.job.nodes == 1:
        return order, "one node: no traffic leaves it"
    waited = [cost.waited / 1e6 for cost in costs]
    words = f"a step waits for {min(waited):,.1f} MB on links between nodes, in the worst order {max(waited):,.1f} MB"
    if measured is not None and usual is not None:
        words += f"; {min(cost.seconds for cost in costs):.2g} s at the {usual:.3g} GB/s measured {measured.when()}"
    return order, words


def foresee_hosts(spec: JobSpec, measured: LinkRates | None) -> str | None:
    """What ``settle_hosts`` will have to do with the rates of the cluster, before anybody knows the job's nodes."""
    if measured is None or spec.parallel.rank_map != "auto" or spec.job.nodes == 1:
        return None
    if not measured.recent():
        return f"rates were measured {measured.when()} and count for {COUNTS_DAYS} days: `hpc-mp doctor` measures them again"
    known = rates(measured)
    slow = foreseen(known, measured.nodes) if known is not None else ""
    return f"slow ways will get the least to carry: measured {measured.when()}, {slow}" if slow else None


def settle_hosts(
    spec: JobSpec, placement: Placement, hosts: tuple[str, ...], tree: SwitchTree, measured: LinkRates | None = None,
) -> tuple[tuple[str, ...], str]:
    """The host of every node of the placement, and the reason.

    With ``rank_map = "auto"`` as ``best_hosts`` puts them, by the rates measured between them and by the switches; else as
    given, ``hosts[i]`` for node i.
    """
    if spec.parallel.rank_map != "auto":
        return hosts, f"parallel.rank_map = {spec.parallel.rank_map}"
    known = rates(measured) if measured is not None and measured.recent() else None
    uneven = known is not None and known.uneven(hosts)
    if not uneven and not tree.above:
        return hosts, "rank map: in Slurm's order of hosts"
    shape, p = read_shape(spec), spec.parallel
    costs = layer_costs(shape, spec.data.sequence_length)
    each_step = moved(spec, shape, stage_layers(p.partition, costs.blocks, p.pipeline, costs.embedding, costs.head))
    ordered = best_hosts(placement, each_step, hosts, tree, known)
    if measured is None or known is None or not uneven:
        return ordered, host_words(placement, each_step, hosts, ordered, tree)
    return ordered, rate_words(placement, each_step, hosts, ordered, known, measured.when())


def _backend(spec: JobSpec) -> Backend:
    return GLOO if spec.job.device == "cpu" else NCCL


def _largest_stage(shape: ModelShape, layers: tuple[int, ...], tensor: int) -> int:
    """Parameters that a rank of the largest stage holds after the tensor cut."""
    family, begin, largest = family_of(shape.model_type), 0, 0
    for stage, count in enumerate(layers):
        last = stage == len(layers) - 1
        weights = family.stage_weights(shape, range(begin, begin + count), stage == 0, last)
        largest = max(largest, sum(prod(w.shape) // (1 if w.cut is None else tensor) for w in weights))
        begin += count
    return largest
