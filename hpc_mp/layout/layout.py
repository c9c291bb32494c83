"""The layout of a training: its division between ranks and in time. Frozen and torch-free.

``hpc_mp.job.layout`` makes one from a job file. Checks, planner and engine take a layout and the shape of a model, and no job.
"""

from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from hpc_mp.layout.models.experts import ExpertCut
from hpc_mp.layout.models.tensor import ALL, TensorCut
from hpc_mp.layout.placement import Degrees, RankMap
from hpc_mp.layout.schedule.names import stages_per_rank

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
Reduce = Literal["microbatch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of a training. Fields without a comment have the values of the job file's keys of their names."""

    degrees: Degrees = field(default_factory=Degrees)  # size of every axis
    # samples, sequence: sequences of a microbatch, and tokens of each
    samples: int = 1
    sequence: int = 1
    microbatches: int = 1
    layers: tuple[int, ...] = ()  # of every stage; empty until the model is cut into stages
    order: str = "auto"  # "auto": the planner chooses
    rank_map: RankMap = "auto"
    ranks_per_node: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 1
    shard_degree: int = 1  # number of ranks over which ZeRO shards (1 for ZeRO-0)
    reduce: Reduce = "step"
    sequence_parallel: bool = False  # True if tensor ranks have tokens of their own between cut layers
    tensor_modules: tuple[str, ...] = ALL
    context_method: Literal["ring", "ulysses"] = "ring"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    # offload_directory None: the host's memory; offload_horizon None: activations stay on the device
    offload_directory: str | None = None
    offload_horizon: int | None = None
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    optimizer_slots: int = 2  # numbers of optimizer state per parameter that has no owner, see ``owners``
    narrow_slots: tuple[str, ...] = ()  # those of them that are kept in bf16
    expert_capacity: float | None = None

    @property
    def ranks(self) -> int:
        return self.degrees.world

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks of the pipeline."""
        return self.degrees.pipeline * stages_per_rank(self.schedule, self.virtual_stages)

    @property
    def state_degree(self) -> int:
        """D × C: the number of ranks that train the same parameters, on different samples or different tokens of a sample."""
        return self.degrees.data * self.degrees.context

    def tensor_cut(self, rank: int = 0) -> TensorCut:
        """Return the cut of a rank of the tensor axis."""
        return TensorCut(self.degrees.tensor, rank, self.tensor_modules)

    def expert_cut(self, rank: int = 0) -> ExpertCut:
        """Return the cut of an expert rank; the first one has the most experts."""
        return ExpertCut(self.degrees.expert, rank, gcd(self.shard_degree, self.state_degree // self.degrees.expert))
