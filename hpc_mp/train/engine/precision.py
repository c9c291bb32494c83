"""Which number formats parameters, compute and gradients have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
