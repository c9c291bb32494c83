"""Process groups of a run: an axis for each kind of parallelism, and a channel for each pair of stages that talk.

A rank's coordinates are those of ``arange(world)`` with its axes permuted as the order's letters say, so that every group ascends
(other permutations are silently wrong on torch up to 2.13).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from math import isqrt, prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from hpc_mp.layout.flat import ParameterSlot
from hpc_mp.layout.placement import Placement, normalize_order
from hpc_mp.layout.schedule import Schedule
from hpc_mp.train.parallel import gloo

ONE_BLOCK = 16  # ranks that rank 0 hears one by one
AXES = ("pipeline", "replicate", "shard", "tensor")
Payload = Literal["F", "B"]  # an activation, or the gradient of one
Channel = tuple[int, int, Payload]  # from which place of the pipeline, to which, with what
NewGroup = Callable[..., dist.ProcessGroup | None]  # called as ``dist.new_group`` is


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks that one kind of parallelism binds together, as one of them sees them.

    Attributes:
        group: None where there is one rank alone, and nothing to send.
        through_host: the back end is gloo, which moves tensors of the CPU only.
        name: for a profiler's picture.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    through_host: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """Ranks that tell each other a few numbers: by way of the first of each block of neighbours, and the first of these.

    Attributes:
        block: this rank's. A tree of one block is all that an axis needs that is no larger.
        heads: the first ranks of all blocks, as they see themselves; the others never use it.
        width: how many ranks the blocks have; the last one may have fewer.
    """

    size: int
    rank: int
    block: Axis
    heads: Axis
    width: int

    @property
    def through_host(self) -> bool:
        return self.block.through_host


def tree_of(axis: Axis) -> Tree:
    return Tree(axis.size, axis.rank, axis, Axis(), axis.size)


@dataclass(frozen=True, slots=True)
class Channels:
    """A communicator of its own for every (from, to, payload) along this rank's pipeline, so that the order of messages on each
    is the order of one direction alone, and none waits for another that it has nothing to do with.

    Attributes:
        ranks: global rank of every place of the pipeline.
    """

    ranks: tuple[int, ...]
    groups: Mapping[Channel, dist.ProcessGroup | None]
    through_host: bool


@dataclass(frozen=True, slots=True)
class StateAxes:
    """The ranks that train the same parameters. ``shard``: with other parts of their state; ``replicate``: with the same part."""

    shard: Axis
    replicate: Axis


@dataclass(frozen=True, slots=True)
class Groups:
    """All that a rank needs to talk to others.

    Attributes:
        world: all ranks, for what their devices tell each other.
        host: the same over gloo, for facts, which lie in host memory.
        pipeline: this rank's place in the pipeline.
        shard, replicate: the two halves of data × context: ranks with other parts of the same state, and with the same part.
        context: the ranks that share the tokens of each sample.
        data_rank: which replica of the model this rank computes in.
        expert: the ranks that share out the experts of a block.
        experts: those that have the same experts, where ranks share them out.
        ties: stages that have copies of the same weights -> the ranks that hold them.
        kv: the ranks of the tensor axis that hold the same key-value heads, where these are fewer than its ranks.
    """

    world: Tree
    host: Tree
    tensor: Axis
    shard: Axis
    replicate: Axis
    pipeline: int
    channels: Channels
    data_rank: int
    context: Axis = field(default_factory=Axis)
    ties: Mapping[tuple[int, ...], Axis] = field(default_factory=dict)
    kv: Axis = field(default_factory=Axis)
    expert: Axis = field(default_factory=Axis)
    experts: StateAxes = field(default_factory=lambda: StateAxes(Axis(), Axis()))

    def holders(self, of_experts: bool) -> StateAxes:
        """The ranks that hold state with this one: that of experts which ranks share out, or any other."""
        return self.experts if of_experts else StateAxes(self.shard, self.replicate)

    def sharing(self, slot: ParameterSlot) -> Axis:
        """The ranks whose gradients of a slot are shares of a sum; this one alone where its gradient is whole."""
        return {"tensor": self.tensor, "kv": self.kv, None: Axis()}[slot.shares]


def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """As ``dist.new_group``, which names groups by the number of calls, so that all ranks must call it for all groups of the
    world. Those that this rank is not in are only counted here: 256 ranks with 645 groups start in 2 s less."""
    if dist.get_rank() in ranks:
        return dist.new_group(ranks, **options)
    dist.distributed_c10d._world.group_count += 1
    return None


def build(placement: Placement, shard_degree: int, device: torch.device, backend: str, schedule: Schedule,
          timeout: timedelta | None, host: Tree, kv_copies: int = 1, new: NewGroup = new_group, expert_shards: int = 1,
          ties: Sequence[tuple[int, ...]] | None = None) -> Groups:
    """Make every group that this rank is in; all ranks call this at the same time.

    Args:
        host: what ``everyone`` gives.
        timeout: how long a message of a step may take; None for torch's default.
        kv_copies: how many neighbours along the tensor axis hold the same key-value heads.
        expert_shards: over how many ranks with the same experts ZeRO shares out their state.
        ties: stages that have copies of the same weights; None: the first and the last one may.
        new: makes one of them, of the ranks given; it is called for all groups of the world, in the same order on all ranks.
    """
    gloo.register()
    grid = _grid(placement, shard_degree)
    maker = _Maker(backend, timeout, new)
    here = int((grid == dist.get_rank()).nonzero()[0, 0])
    replicate, shard, tensor = (
        maker.axis(grid.movedim(axis, -1).flatten(0, -2).tolist(), AXES[axis]) for axis in (1, 2, 3))
    pipelines = grid.flatten(1).t().tolist()
    mine = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
    channels = Channels(tuple(mine), maker.channels(pipelines, schedule), maker.through_host)
    _say_hello(channels, here, device)
    tied = {}
    for stages in [(0, len(schedule.placement) - 1)] if ties is None else ties:
        places = sorted({schedule.placement[stage] for stage in stages})
        holders = [sorted(ranks[at] for at in places) for ranks in pipelines]
        tied[stages] = maker.axis(holders, "tie") if len(places) > 1 else Axis()
    whole = _whole_grid(placement)
    context = maker.axis(whole.movedim(2, -1).flatten(0, -2).tolist(), "context") if placement.degrees.context > 1 else Axis()
    data_rank = int((whole == dist.get_rank()).nonzero()[0, 1])
    kv = maker.axis(grid.reshape(-1, kv_copies).tolist(), "kv") if kv_copies > 1 else Axis()
    more: dict[str, Any] = {}
    if (size := placement.degrees.expert) > 1:
        blocks = grid.flatten(1, 2).unflatten(1, (-1, expert_shards, size))  # pipeline, replicate, shard, expert, tensor
        expert, *experts = (maker.axis(blocks.movedim(axis, -1).flatten(0, -2).tolist(), name)
                            for axis, name in ((3, "expert"), (2, "shard of experts"), (1, "replicate of experts")))
        more = {"expert": expert, "experts": StateAxes(*experts)}
    world = host if maker.through_host else tree_of(Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD))
    return Groups(world, host, tensor, shard, replicate, here, channels, data_rank, context, tied, kv, **more)


def everyone(timeout: timedelta | None = None, new: NewGroup = new_group) -> Tree:
    """All ranks, over gloo; all of them call this at the same time.

    Args:
        timeout: how long one may wait for the others; None for torch's default.
        new: as for ``build``.
    """
    gloo.register()
    size, maker = dist.get_world_size(), _Maker("gloo", timeout, new)
    width = size if size <= ONE_BLOCK else isqrt(size - 1) + 1
    blocks = [list(range(begin, min(begin + width, size))) for begin in range(0, size, width)]
    return Tree(size, dist.get_rank(), maker.axis(blocks), maker.axis([[first for first, *_ in blocks]]), width)


def axis_of(groups: Sequence[Sequence[int]], backend: str) -> Axis:
    """Make a group of each of these, which do not overlap, and return this rank's. All ranks call this."""
    return _Maker(backend, None, new_group).axis(groups)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes groups. All ranks make all groups of a kind in one order, and each keeps the one that it is in."""

    backend: str
    timeout: timedelta | None
    new: NewGroup

    @property
    def through_host(self) -> bool:
        return self.backend == "gloo"

    def axis(self, groups: Sequence[Sequence[int]], name: str = "") -> Axis:
        """Return this rank's axis among groups that do not overlap."""
        axis = Axis(through_host=self.through_host)
        for ranks in groups:
            group = self._group(ranks)
            if dist.get_rank() in ranks:
                axis = Axis(len(ranks), ranks.index(dist.get_rank()), group, self.through_host, name)
                if group is not None and dist.get_rank(group) != axis.rank:
                    raise RuntimeError(f"rank {dist.get_rank()}: its rank in the group {ranks} is not its coordinate {axis.rank}")
        return axis

    def channels(self, pipelines: Sequence[Sequence[int]], schedule: Schedule) -> dict[Channel, dist.ProcessGroup | None]:
        """Those of this rank, by the places of the pipeline that they connect."""
        wanted: set[Channel] = set()
        for before, after in pairwise(schedule.placement):
            if before != after:
                wanted |= {(before, after, "F"), (after, before, "B")}
        groups: dict[Channel, dist.ProcessGroup | None] = {}
        for channel in sorted(wanted):
            for ranks in pipelines:
                group = self._group(sorted((ranks[channel[0]], ranks[channel[1]])))
                if dist.get_rank() in (ranks[channel[0]], ranks[channel[1]]):
                    groups[channel] = group
        return groups

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        only = gloo.GLOO if self.through_host else "nccl"  # beside NCCL torch would connect the ranks of a group over gloo too
        return self.new(list(ranks), timeout=self.timeout, backend=only)


def _say_hello(channels: Channels, here: int, device: torch.device) -> None:
    """Send a first word through every channel of this rank, in one order on all ranks: NCCL connects two ranks at their first
    message, and both wait there. Inside a step, where receives are posted ahead of what they answer, two ranks could so wait
    for each other for ever."""
    word = torch.zeros(1, device="cpu" if channels.through_host else device)
    for (sender, receiver, _), group in sorted(channels.groups.items(), key=lambda item: item[0]):
        if here == sender:
            dist.send(word, channels.ranks[receiver], group=group)
        else:
            dist.recv(word, channels.ranks[sender], group=group)


def _whole_grid(placement: Placement) -> torch.Tensor:
    """The rank at every coordinate: (pipeline, data, context, tensor)."""
    degrees = placement.degrees
    sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
    letters = normalize_order(placement.order, 2)  # with C, whatever its size
    grid = torch.arange(prod(sizes.values())).view([sizes[letter] for letter in letters])
    return grid.permute([letters.index(letter) for letter in "PDCT"])


def _grid(placement: Placement, shard_degree: int) -> torch.Tensor:
    """The rank at every coordinate of ``AXES``. Data and context are one axis here, on which ranks ascend: neighbours hold the
    parts of a state, whichever of the two letters stands further to the right."""
    degrees = placement.degrees
    grid = _whole_grid(placement).flatten(1, 2).sort(1).values
    return grid.reshape(degrees.pipeline, -1, shard_degree, degrees.tensor)


def check_coordinates(placement: Placement, rank: int) -> None:
    """The groups to be made have the rank at the coordinates that the launcher wrote down. Raises RuntimeError."""
    place = placement.ranks[rank]
    pp, dp, cp, tp = (_whole_grid(placement) == rank).nonzero()[0].tolist()
    if (place.pp, place.dp, place.cp, place.tp) != (pp, dp, cp, tp):
        raise RuntimeError(f"rank {rank}: placement.json says pp {place.pp} dp {place.dp} cp {place.cp} tp {place.tp}, "
                           f"its order {placement.order} pp {pp} dp {dp} cp {cp} tp {tp}")
