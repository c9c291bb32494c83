"""Process groups of a rank: an axis for each kind of parallelism, and a channel for each pair of adjacent stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from hpc_mp.layout.flat import ParameterSlot
from hpc_mp.layout.schedule.actions import Channel


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks of one kind of parallelism, as one of them sees them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None  # None for a single rank, which has nothing to send
    through_host: bool = False  # True if the back end is gloo, which moves only tensors in host memory
    name: str = ""  # name in a profiler's trace


@dataclass(frozen=True, slots=True)
class Tree:
    """Ranks that exchange a few numbers, through the first rank of each block of neighbours and through rank 0. ``block``: block
    of this rank. A small axis is a tree of one block. ``heads``: the first ranks of all blocks; only these ranks use it.
    ``width``: number of ranks of a block; the last block may have fewer."""

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
    """Communicators of this rank's pipeline, sorted, a separate one for every (sender, receiver, payload). Messages on a
    communicator thus have the order of one direction alone, and no message waits for an unrelated one. ``ranks``: place in the
    pipeline -> global rank."""

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
    """All axes and channels of a rank."""

    world: Tree  # all ranks, for tensors on their devices
    host: Tree  # all ranks over gloo, for facts in host memory
    tensor: Axis
    # shard, replicate: the two factors of data × context: ranks with other parts of the same state, and with the same part
    shard: Axis
    replicate: Axis
    pipeline: int  # this rank's place in the pipeline
    channels: Channels
    data_rank: int  # number of the model replica that this rank belongs to
    context: Axis  # the ranks that share the tokens of each sample
    ties: Mapping[tuple[int, ...], Axis]  # stages that have copies of the same weights -> the ranks that hold them
    kv: Axis  # the ranks of the tensor axis that hold the same key-value heads as this one
    expert: Axis  # the ranks that share the experts of a block
    experts: StateAxes  # the ranks with the same experts, if experts are shared

    def holders(self, of_experts: bool) -> StateAxes:
        """Return the ranks that hold state with this one: state of shared experts, or any other state."""
        return self.experts if of_experts else StateAxes(self.shard, self.replicate)

    def sharing(self, slot: ParameterSlot) -> Axis:
        """Return the ranks whose gradients of a slot are shares of a sum; this rank alone if its gradient is whole."""
        return {"tensor": self.tensor, "kv": self.kv, None: Axis()}[slot.shares]
