"""The data axis: who holds which part of parameters, gradients and optimizer state, and when gradients are summed.

==== =========================================== ======================================== =======================================
zero held between steps by each rank of the axis and, while a step computes               gradients are summed
==== =========================================== ======================================== =======================================
0    everything                                  all gradients                            all-reduced once per step
1    its part of parameters and optimizer state  all parameters and gradients             reduce-scattered on the last microbatch
2    the same                                    all parameters, its part of gradients    reduce-scattered on every microbatch
3    the same                                    the running block, its part of gradients reduce-scattered on every microbatch
==== =========================================== ======================================== =======================================

With a shard degree, replicas of a part all-reduce it once per step, after the last microbatch. Under stage 3 embedding, norm
and head, one unit beside the blocks, are whole while any block of a pass runs.

Stages 1 to 3 are torch's FSDP2 over the mesh axes (replicate, shard). The loss is divided by the number of tokens of
the global batch before backward, so every reduction here is a plain sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpc_mp.train.engine.stage import Stage
from hpc_mp.train.engine.tensor import local

BUCKET_BYTES = 25 * 2**20  # torch DDP's bucket: large enough for bandwidth, small enough to stay in cache


class DataAxis(Protocol):
    """What the pipeline driver sees of the data axis."""

    def settle(self) -> None:
        """Called once when parameters have got their memory: from here on their local tensors stay where they are."""

    def before_backward(self, reduce: bool, last: bool) -> None:
        """Called before each backward. ``reduce``: sum gradients in it; ``last``: no backward follows in this step."""

    def reduce(self) -> None:
        """Called at a REDUCE action, after a backward announced with ``reduce``: gradients are summed when it returns."""


def shard(stage: Stage, mesh: DeviceMesh, zero: int, precision: Precision) -> DataAxis:
    """Distribute a stage (on the meta device) over the data axis.

    Args:
        mesh: with the axes ``replicate`` and ``shard``.
        zero: 0 to 3.
        precision: fp32 masters under bf16 are held by FSDP2 whatever ``zero`` is.
    """
    data = mesh["replicate", "shard"]
    if precision.compute == precision.master and (zero == 0 or data.size() == 1):
        return Replicated(stage, mesh)
    return Sharded(stage, data, zero, precision)


class Replicated:
    """Every rank holds everything; gradients are summed in flat buckets after the last microbatch."""

    def __init__(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        self.stage = stage
        self.group = mesh["replicate"].get_group() if mesh["replicate"].size() > 1 else None

    def settle(self) -> None:
        pass

    def before_backward(self, reduce: bool, last: bool) -> None:
        pass  # gradients simply add up in place

    def reduce(self) -> None:
        if self.group is None:
            return
        bucket: list[Tensor] = []
        size = 0
        for parameter in self.stage.parameters():
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            bucket.append(gradient)
            size += gradient.nbytes
            if size >= BUCKET_BYTES:
                self._sum(bucket)
                bucket, size = [], 0
        if bucket:
            self._sum(bucket)

    @torch.no_grad()
    def _sum(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class Sharded:
    """FSDP2, one unit per block and one for the rest (embedding, norm and head share it because they may be tied)."""

    def __init__(self, stage: Stage, mesh: DeviceMesh, zero: int, precision: Precision) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute if precision.compute != precision.master else None,
            reduce_dtype=precision.master if precision.compute != precision.master else None,
        )
        self.gathers_anew = zero == 3
        for module in [*stage.blocks(), stage]:
            fully_shard(module, mesh=mesh, reshard_after_forward=self.gathers_anew, mp_policy=policy)
        self.units = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        self.root: FSDPModule = self.units[0]

    def settle(self) -> None:
        """FSDP2 moves unevenly cut parameters into padded memory at their first use, which would part them from an
        optimizer made before: use them once."""
        for unit in self.units:
            unit.unshard()
            unit.reshard()

    def before_backward(self, reduce: bool, last: bool) -> None:
        self.root.set_is_last_backward(last)
        self.root.set_requires_gradient_sync(reduce)
        self.root.set_requires_all_reduce(last)  # replicas of a part add theirs up once per step
        self.root.set_reshard_after_backward(last or self.gathers_anew)

    def reduce(self) -> None:
        pass  # FSDP2 has summed them inside the backward


@dataclass(frozen=True, slots=True)
class Precision:
    """``master``: parameters, gradient sums and optimizer state; ``compute``: activations and matrix products."""

    master: torch.dtype
    compute: torch.dtype


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision(torch.float64, torch.float64),  # for proofs
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
}
