"""Communicators of a run: every process group of a rank, made and connected before the first step.

The placement says which ranks stand along an axis. They ascend in every group: other permutations are silently wrong on torch up
to 2.13.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.layout.placement import Placement, place
from hpc_mp.layout.schedule.actions import Channel, Schedule
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from hpc_mp.train.parallel.groups import Axis, Channels, Groups, StateAxes, Tree, tree_of

ONE_BLOCK = 16  # largest number of ranks that all send to rank 0 directly
CHANNEL_CTAS = 4  # thread blocks of a message between stages: a posted receive spins on them beside the computation
NewGroup = Callable[..., dist.ProcessGroup | None]  # has the arguments of ``dist.new_group``


def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Make a group as ``dist.new_group`` does, and return None if this rank is not in it. torch names groups by the number of
    calls, so that all ranks must call this for all groups of the world. A group without this rank is only counted, by which 256
    ranks with 645 groups start 2 s earlier."""
    if dist.get_rank() in ranks:
        return dist.new_group(ranks, **options)
    dist.distributed_c10d._world.group_count += 1
    return None


def build(placement: Placement, shard_degree: int, device: torch.device, backend: str, schedule: Schedule,
          timeout: timedelta | None, host: Tree, kv_copies: Sequence[int] = (), new: NewGroup = new_group, expert_shards: int = 1,
          ties: Sequence[tuple[int, ...]] | None = None) -> Groups:
    """Make and connect every group that this rank is in; all ranks call this at the same time.

    Args:
        host: the result of ``everyone``.
        timeout: longest duration of a message of a step; None: torch's default.
        kv_copies: numbers of neighbours along the tensor axis that hold the same key-value heads.
        expert_shards: number of ranks with the same experts among which ZeRO divides the experts' state.
        ties: stages that have copies of the same weights; None: the first and the last one may.
        new: makes a group of the given ranks; called for all groups of the world, in the same order on all ranks.
    """
    maker, along, own = _Maker(backend, timeout, new), placement.groups, placement.ranks[dist.get_rank()]
    channels = maker.channels(along["pp"], schedule)
    tied = {}
    for stages in [(0, len(schedule.placement) - 1)] if ties is None else ties:
        places = sorted({schedule.placement[stage] for stage in stages})
        tied[stages] = maker.axis([[ranks[at] for at in places] for ranks in along["pp"]], "tie")
    state, experts = placement.state_groups, along.get("edp", ())
    groups = Groups(
        world=host if maker.through_host else tree_of(Axis(dist.get_world_size(), own.rank, dist.group.WORLD)),
        host=host,
        tensor=maker.axis(along["tp"], "tensor"),
        shard=maker.axis(_neighbours(state, shard_degree), "shard"),
        replicate=maker.axis(_apart(state, shard_degree), "replicate"),
        pipeline=own.pp,
        channels=channels,
        data_rank=own.dp,
        context=maker.axis(along.get("cp", ()), "context"),
        ties=tied,
        kv=maker.axis([ranks[end - copies:end] for ranks in along["tp"]
                       for copies, end in zip(kv_copies, accumulate(kv_copies), strict=True)], "kv"),
        expert=maker.axis(along.get("ep", ()), "expert"),
        experts=StateAxes(maker.axis(_neighbours(experts, expert_shards), "shard of experts"),
                          maker.axis(_apart(experts, expert_shards), "replicate of experts")))
    connect(groups, device)
    return groups


def _neighbours(groups: Iterable[Sequence[int]], width: int) -> list[Sequence[int]]:
    """Cut groups into groups of ``width`` adjacent ranks; the last one of a group may have fewer."""
    return [ranks[begin:begin + width] for ranks in groups for begin in range(0, len(ranks), width)]


def _apart(groups: Iterable[Sequence[int]], width: int) -> list[Sequence[int]]:
    """Return the ranks at the same place of all ``_neighbours`` of a group."""
    return [ranks[first::width] for ranks in groups for first in range(width)]


def everyone(timeout: timedelta | None = None, new: NewGroup = new_group) -> Tree:
    """Return the tree of all ranks over gloo; all ranks call this at the same time. ``timeout``: longest wait for other ranks;
    None: torch's default. ``new``: as for ``build``."""
    size, maker = dist.get_world_size(), _Maker("gloo", timeout, new)
    width = size if size <= ONE_BLOCK else isqrt(size - 1) + 1
    blocks = _neighbours([range(size)], width)
    return Tree(size, dist.get_rank(), maker.axis(blocks), maker.axis([range(0, size, width)]), width)


def axis_of(groups: Sequence[Sequence[int]], backend: str) -> Axis:
    """Make groups of ranks that do not overlap, and return this rank's axis. All ranks call this."""
    return _Maker(backend, None, new_group).axis(groups)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Maker of groups. All ranks make all groups of a kind in the same order, and each rank keeps its own one."""

    backend: str
    timeout: timedelta | None
    new: NewGroup

    @property
    def through_host(self) -> bool:
        return self.backend == "gloo"

    def axis(self, groups: Iterable[Sequence[int]], name: str = "") -> Axis:
        """Return this rank's axis among groups that do not overlap."""
        axis = Axis(through_host=self.through_host)
        for ranks in groups:
            group = self._group(ranks, name)
            if dist.get_rank() in ranks:
                axis = Axis(len(ranks), ranks.index(dist.get_rank()), group, self.through_host, name)
                if group is not None and dist.get_rank(group) != axis.rank:
                    raise RuntimeError(f"rank {dist.get_rank()}: its rank in the group {ranks} is not its coordinate {axis.rank}")
        return axis

    def channels(self, pipelines: Sequence[Sequence[int]], schedule: Schedule) -> Channels:
        """Return the channels of this rank's pipeline."""
        ends: set[Channel] = set()
        for before, after in pairwise(schedule.placement):
            if before != after:
                ends |= {(before, after, "F"), (after, before, "B")}
        groups: dict[Channel, dist.ProcessGroup | None] = {}
        for channel in sorted(ends):
            for ranks in pipelines:
                pair = sorted((ranks[channel[0]], ranks[channel[1]]))
                group = self._group(pair, "channel")
                if dist.get_rank() in pair:
                    groups[channel] = group
        mine = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
        return Channels(tuple(mine), groups, self.through_host)

    def _group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        gloo.register()
        only = gloo.GLOO if self.through_host else "nccl"  # by default torch would connect the ranks over gloo too
        return self.new(list(ranks), timeout=self.timeout, backend=only, pg_options=None if self.through_host else _options(name))


def _options(name: str) -> Any:
    """Return NCCL's options for a communicator; None if torch has no NCCL. Messages between stages get few thread blocks, because
    their kernels spin beside the computation. Sums of the tensor axis go before everything else, because the next computation
    waits for them."""
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=name == "tensor")
    if name == "channel":
        options.config.max_ctas = CHANNEL_CTAS
    return options


def connect(groups: Groups, device: torch.device) -> None:
    """Send a first message through every communicator of this rank, in the same order on all ranks. NCCL connects ranks at their
    first message and allocates its buffers then, while all of them wait. Inside a step, where receives are posted ahead of sends,
    ranks could thus deadlock. It connects for each kind of collective anew."""
    channels = groups.channels
    word = torch.zeros(1, device="cpu" if channels.through_host else device)
    for (sender, receiver, _), group in channels.groups.items():
        if groups.pipeline == sender:
            dist.send(word, channels.ranks[receiver], group=group)
        else:
            dist.recv(word, channels.ranks[sender], group=group)
    for axis in axes(groups):
        if axis.size > 1:
            words = torch.zeros(axis.size, device="cpu" if axis.through_host else device)
            all_reduce(words, axis).wait()
            if not axis.through_host:
                all_gather(words, words[:1].clone(), axis).wait()
                reduce_scatter(words[:1].clone(), words, axis).wait()
                all_to_all(words, axis)


def axes(groups: Groups) -> Iterator[Axis]:
    """Yield the axes of a rank besides its channels, in an order that is the same on all ranks."""
    yield from (groups.world.block, groups.world.heads) if not groups.world.through_host else ()
    yield from (groups.tensor, groups.shard, groups.replicate, groups.context, groups.kv, groups.expert, groups.experts.shard,
                groups.experts.replicate)
    yield from (groups.ties[stages] for stages in sorted(groups.ties))


def check_coordinates(placement: Placement, rank: int) -> None:
    """Raise RuntimeError if the coordinates that the launcher wrote down for a rank are not those of the order."""
    written, ordered = (f"pp {at.pp} dp {at.dp} cp {at.cp} tp {at.tp}"
                        for at in (placement.ranks[rank], place(placement.degrees, placement.order).ranks[rank]))
    if written != ordered:
        raise RuntimeError(f"rank {rank}: placement.json says {written}, its order {placement.order} {ordered}")
