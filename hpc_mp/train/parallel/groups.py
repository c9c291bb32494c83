"""Process groups of a rank: an axis for each kind of parallelism, and a channel for each pair of adjacent stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from hpc_mp.layout.flat import ParameterSlot
from hpc_mp.layout.schedule.actions import Channel


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
    """Communicators of this rank's pipeline, sorted, a separate one for every (sender, receiver, payload).

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
        kv: the ranks of the tensor axis that hold the same key-value heads as this one.
    """

    world: Tree
    host: Tree
    tensor: Axis
    shard: Axis
    replicate: Axis
    pipeline: int
    channels: Channels
    data_rank: int
    context: Axis
    ties: Mapping[tuple[int, ...], Axis]
    kv: Axis
    expert: Axis
    experts: StateAxes

    def holders(self, of_experts: bool) -> StateAxes:
        """Return the ranks that hold state with this one: state of shared experts, or any other state."""
        return self.experts if of_experts else StateAxes(self.shard, self.replicate)

    def sharing(self, slot: ParameterSlot) -> Axis:
        """Return the ranks whose gradients of a slot are shares of a sum; this rank alone if its gradient is whole."""
        return {"tensor": self.tensor, "kv": self.kv, None: Axis()}[slot.shares]
