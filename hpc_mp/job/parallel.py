"""``[parallel]``: the division of a training between ranks."""

from typing import Annotated, Literal

from pydantic import Field

from hpc_mp.job import values

MOST_MICROBATCHES = 2**16  # a rank's schedule has that many actions of each kind


class Parallel(values.Section):
    """The division of the work between ranks. The data degree is the remainder: ranks / (tensor x pipeline x context). If tensor,
    pipeline or microbatches are left out, and the GPUs are in the catalogue, the planner chooses the keys that are left out."""

    tensor: values.Count = 1
    """The number of ranks over which every layer is cut. These ranks communicate most: keep them inside a node."""
    sequence: bool = False
    """If true, tensor ranks also divide every sample's tokens between them outside the cut layers (norms, dropouts, residuals,
    messages between stages): less memory for the same traffic."""
    tensor_modules: tuple[values.Line, ...] = ("*",)
    """The modules that `tensor` cuts: patterns (`*`, `?`) of Hugging Face's names of the embedding, of attentions and MLPs, and
    of the head. Modules that no pattern matches are whole on every tensor rank. Example: `["*.mlp", "lm_head"]`."""
    pipeline: values.Count = 1
    """The number of ranks that form a pipeline, each with some of the layers. Sends little; stages wait for each other unless
    there are many microbatches."""
    context: values.Count = 1
    """The number of ranks over which every sample's tokens are cut: for sequences whose activations are too large for one rank.
    ZeRO then shards over data × context ranks. Example: `2`."""
    context_method: Literal["ring", "ulysses"] = "ring"
    """The attention between context ranks. `"ring"` passes keys and values around and computes attention with plain products, on
    GPUs too; 2 × context must divide `sequence_length`. `"ulysses"` exchanges tokens for heads and uses torch's fused kernels;
    each tensor rank needs a head for each of them. Example: `"ulysses"`."""
    expert: values.Count = 1
    """The number of neighbouring data × context ranks over which the experts of every block are divided; tokens travel to their
    experts and back. ZeRO shards the state of experts over the ranks with the same experts. See
    [models](../user/models.md#experts). Example: `2`."""
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    """The state that data ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. A higher stage needs
    less memory and more messages."""
    reduce: Literal["auto", "microbatch", "step"] = "auto"
    """The time at which data ranks sum gradients. `"step"`: once, after the last microbatch; ranks keep whole gradients until
    then. `"microbatch"`, for ZeRO-2 and 3: after each microbatch; ranks keep only their shards, and send as many times more.
    `auto`: `"microbatch"` with ZeRO-2 and 3, else `"step"`. `hpc-mp launch --explain` prints the traffic and memory of both.
    Example: `"step"`."""
    shard_degree: values.Count | None = None
    """The number of data × context ranks over which ZeRO shards; it must divide their number. Default: all of them."""
    order: values.Order = "auto"
    """Letters D, P, T, with context also C (the right-most varies fastest over ranks; without C: directly before T), `"cluster"`
    = DPT, `"spread"` = TPD. `auto` takes the order in which a step waits least for links between nodes, and prints the seconds if
    `hpc-mp doctor` has measured the links. `hpc-mp placement` shows all orders."""
    rank_map: values.RankMap = "auto"
    """`"block"`, `"cyclic"`, or the node of every rank, see [placement](../how-it-works/placement.md). Example: `[1, 1, 0,
    0]`."""
    schedule: values.ScheduleName = "1f1b"
    """`"gpipe"` (or `"simple"`), `"1f1b"`, `"interleaved_1f1b"`, `"breadth_first"`, `"zero_bubble"`, `"zero_bubble_v"`, or the
    path of a table that ends in `.csv`: see [schedules](../user/schedules.md). `hpc-mp schedule --draw` draws them. Example:
    `"zero_bubble"`."""
    virtual_stages: values.Count = 1
    """Stages on each rank with `interleaved_1f1b`, `breadth_first` or a table: a smaller bubble for more messages.
    `zero_bubble_v` always has two and needs no number; the other schedules have one. Example: `2`."""
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES, strict=True)] | None = None
    """Pieces of a replica's batch per step. Default: without a pipeline, the fewest with at most 8,192 tokens each, else up to 4
    per pipeline rank. `interleaved_1f1b` needs a multiple of `pipeline`; a table needs its own number."""
    partition: values.Partition = "auto"
    """A list with the layers of every stage, such as `[5, 7]`: one number for each stage; the first and the last may be 0, for a
    stage with only the embedding or the head. Or a method: `"cost"` (and `auto`) balances computing, `"uniform"` layers,
    `"parameters"` parameters, `"profile"` measured costs, all with the embedding and the head; `"at:REGEX"` begins stages at the
    modules whose whole name matches. See [partition](../user/partition.md). Example: `"at:model.layers.(4|9)"`."""
    profile: values.PathName | None = None
    """With `partition = "profile"`: the file that `hpc-mp train JOB.toml --profile` wrote. Default: its default output, in
    `DIRECTORY/.cache`. Example: `"../h100.json"`."""
    memory_weight: values.Weighting | None = None
    """With `partition = "profile"`: the weight of balanced memory, from 0 to 1; the rest is the weight of balanced time. Default:
    0, or the smallest tenth with which the fullest rank fits into the measured device. Example: `0.2`."""
    recompute: values.Recompute = "none"
    """The activations that a backward computes again instead of keeping them, see [memory](../user/memory.md): `"selective"` the
    attention core, `"full"` every block from its input, `"every-2"` groups of two blocks (or another number) from the group's
    input. Less memory, for up to a third more computing. Example: `"full"`."""
    offload: values.Offload = "none"
    """A list of the data that is moved off a rank's device while no computation uses it. `"optimizer"`: the optimizer's state is
    in the host's memory or in `offload_directory`; the update streams over it at the speed of the bus or the disk, with bitwise
    equal results. `"parameters"`, with ZeRO-3: each rank's shard is in the host's memory, and a unit is on the device only while
    it runs. `"activations"`: the data for a backward waits in the host's memory. See [memory](../user/memory.md). Example:
    `["optimizer"]`."""
    offload_directory: values.PathName | None = None
    """A directory on a disk of every node (NVMe) for offloaded optimizer state, instead of the host's memory. It needs room for
    the state of all ranks of the node. The files there have no names and disappear when the ranks end. Example:
    `"/local/nvme"`."""
    offload_horizon: values.NonNegative | None = None
    """The number of computations of its rank before its backward at which a microbatch's activations are fetched from host
    memory. Activations that would be fetched at once stay on the device. Default: 2, a forward and a backward. A larger number
    gives the copy more time, a smaller one leaves more memory free. Example: `4`."""
