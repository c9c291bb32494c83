"""Process groups of a run: an axis for each kind of parallelism, and a channel for each pair of adjacent stages.

A rank's coordinates are those of ``arange(world)`` with its axes permuted by the letters of the order, so that the ranks of every
group ascend (other permutations are silently wrong on torch up to 2.13).
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

ONE_BLOCK = 16  # largest number of ranks that all send to rank 0 directly
AXES = ("pipeline", "replicate", "shard", "tensor")
Payload = Literal["F", "B"]  # an activation, or the gradient of one
Channel = tuple[int, int, Payload]  # (sender's place in the pipeline, receiver's place, payload)
NewGroup = Callable[..., dist.ProcessGroup | None]  # has the arguments of ``dist.new_group``


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks of one kind of parallelism, as one of them sees them.

    Attributes:
        group: None for a single rank, which has nothing to send.
        through_host: True if the back end is gloo, which moves only tensors in host memory.
        name: name in a profiler's trace.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    through_host: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """Ranks that exchange a few numbers, through the first rank of each block of neighbours and through rank 0.

    Attributes:
        block: block of this rank. A small axis is a tree of one block.
        heads: the first ranks of all blocks; only these ranks use it.
        width: number of ranks of a block; the last block may have fewer.
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
    """Communicators of this rank's pipeline, a separate one for every (sender, receiver, payload).

    Messages on a communicator thus have the order of one direction alone, and no message waits for an unrelated one.

    Attributes:
        ranks: place in the pipeline -> global rank.
    """

    ranks: tuple[int, ...]
    groups: Mapping[Channel, dist.ProcessGroup | None]
    through_host: bool


@dataclass(frozen=True, slots=True)
class StateAxes:
    """The ranks that train the same parameters. ``shard``: with other parts of the state; ``replicate``: with the same part."""

    shard: Axis
    replicate: Axis


@dataclass(frozen=True, slots=True)
class Groups:
    """All axes and channels of a rank.

    Attributes:
        world: all ranks, for tensors on their devices.
        host: all ranks over gloo, for facts in host memory.
        pipeline: this rank's place in the pipeline.
        shard, replicate: the two factors of data × context: ranks with other parts of the same state, and with the same part.
        context: the ranks that share the tokens of each sample.
        data_rank: number of the model replica that this rank belongs to.
        expert: the ranks that share the experts of a block.
        experts: the ranks with the same experts, if experts are shared.
        ties: stages that have copies of the same weights -> the ranks that hold them.
        kv: the ranks of the tensor axis that hold the same key-value heads, if there are fewer heads than ranks.
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
        """Return the ranks that hold state with this one: state of shared experts, or any other state."""
        return self.experts if of_experts else StateAxes(self.shard, self.replicate)

    def sharing(self, slot: ParameterSlot) -> Axis:
        """Return the ranks whose gradients of a slot are shares of a sum; this rank alone if its gradient is whole."""
        return {"tensor": self.tensor, "kv": self.kv, None: Axis()}[slot.shares]


def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Make a group as ``dist.new_group`` does, and return None if this rank is not in it.

    torch names groups by the number of calls, so that all ranks must call this for all groups of the world. A group without this
    rank is only counted, by which 256 ranks with 645 groups start 2 s earlier.
    """
    if dist.get_rank() in ranks:
        return dist.new_group(ranks, **options)
    dist.distributed_c10d._world.group_count += 1
    return None


def build(placement: Placement, shard_degree: int, device: torch.device, backend: str, schedule: Schedule,
          timeout: timedelta | None, host: Tree, kv_copies: int = 1, new: NewGroup = new_group, expert_shards: int = 1,
          ties: Sequence[tuple[int, ...]] | None = None) -> Groups:
    """Make every group that this rank is in; all ranks call this at the same time.

    Args:
        host: the result of ``everyone``.
        timeout: longest duration of a message of a step; None: torch's default.
        kv_copies: number of neighbours along the tensor axis that hold the same key-value heads.
        expert_shards: number of ranks with the same experts among which ZeRO divides the experts' state.
        ties: stages that have copies of the same weights; None: the first and the last one may.
        new: makes a group of the given ranks; called for all groups of the world, in the same order on all ranks.
    """
    gloo.register()
    grid = _grid(placement, shard_degree)
    maker = _Maker(backend, timeout, new)
    place = int((grid == dist.get_rank()).nonzero()[0, 0])
    replicate, shard, tensor = (
        maker.axis(grid.movedim(axis, -1).flatten(0, -2).tolist(), AXES[axis]) for axis in (1, 2, 3))
    pipelines = grid.flatten(1).t().tolist()
    mine = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
    channels = Channels(tuple(mine), maker.channels(pipelines, schedule), maker.through_host)
    _say_hello(channels, place, device)
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
    return Groups(world, host, tensor, shard, replicate, place, channels, data_rank, context, tied, kv, **more)


def everyone(timeout: timedelta | None = None, new: NewGroup = new_group) -> Tree:
    """Return the tree of all ranks over gloo; all ranks call this at the same time.

    Args:
        timeout: longest wait for other ranks; None: torch's default.
        new: as for ``build``.
    """
    gloo.register()
    size, maker = dist.get_world_size(), _Maker("gloo", timeout, new)
    width = size if size <= ONE_BLOCK else isqrt(size - 1) + 1
    blocks = [list(range(begin, min(begin + width, size))) for begin in range(0, size, width)]
    return Tree(size, dist.get_rank(), maker.axis(blocks), maker.axis([[first for first, *_ in blocks]]), width)


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
        """Return this rank's communicators, by the channels that they serve."""
        ends: set[Channel] = set()
        for before, after in pairwise(schedule.placement):
            if before != after:
                ends |= {(before, after, "F"), (after, before, "B")}
        groups: dict[Channel, dist.ProcessGroup | None] = {}
        for channel in sorted(ends):
            for ranks in pipelines:
                group = self._group(sorted((ranks[channel[0]], ranks[channel[1]])))
                if dist.get_rank() in (ranks[channel[0]], ranks[channel[1]]):
                    groups[channel] = group
        return groups

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        only = gloo.GLOO if self.through_host else "nccl"  # by default torch would connect the ranks over gloo too
        return self.new(list(ranks), timeout=self.timeout, backend=only)


def _say_hello(channels: Channels, place: int, device: torch.device) -> None:
    """Send a first message through every channel of this rank, in the same order on all ranks.

    NCCL connects two ranks at their first message, and both wait there. Inside a step, where receives are posted ahead of sends,
    two ranks could thus deadlock.
    """
    word = torch.zeros(1, device="cpu" if channels.through_host else device)
    for (sender, receiver, _), group in sorted(channels.groups.items(), key=lambda item: item[0]):
        if place == sender:
            dist.send(word, channels.ranks[receiver], group=group)
        else:
            dist.recv(word, channels.ranks[sender], group=group)


def _whole_grid(placement: Placement) -> torch.Tensor:
    """Return the rank at every coordinate, (pipeline, data, context, tensor)."""
    degrees = placement.degrees
    sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
    letters = normalize_order(placement.order, 2)  # with C, even if it has size 1
    grid = torch.arange(prod(sizes.values())).view([sizes[letter] for letter in letters])
    return grid.permute([letters.index(letter) for letter in "PDCT"])


def _grid(placement: Placement, shard_degree: int) -> torch.Tensor:
    """Return the rank at every coordinate of ``AXES``.

    Data and context are one axis here, on which ranks ascend: neighbours hold the parts of a state, whichever of the two letters
    stands further to the right.
    """
    degrees = placement.degrees
    grid = _whole_grid(placement).flatten(1, 2).sort(1).values
    return grid.reshape(degrees.pipeline, -1, shard_degree, degrees.tensor)


def check_coordinates(placement: Placement, rank: int) -> None:
    """Raise RuntimeError if the rank's coordinates in its groups are not those that the launcher wrote down."""
    place = placement.ranks[rank]
    pp, dp, cp, tp = (_whole_grid(placement) == rank).nonzero()[0].tolist()
    if (place.pp, place.dp, place.cp, place.tp) != (pp, dp, cp, tp):
        raise RuntimeError(f"rank {rank}: placement.json says pp {place.pp} dp {place.dp} cp {place.cp} tp {place.tp}, "
                           f"its order {placement.order} pp {pp} dp {dp} cp {cp} tp {tp}")
