"""fp64 that stays fp64.

Modules of transformers compute norms, rotary tables and the softmax of attention in fp32 whatever they are given, which is right
for bf16 and takes away half of the digits of fp64: a difference of one rounding then shows as one of 1e-9. While this mode is on,
whoever asks for fp32 gets fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StaysDouble(TorchFunctionMode):
    """``with`` it, ``tensor.float()``, ``tensor.to(torch.float32)`` and ``dtype=torch.float32`` mean fp64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function == torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
