"""Number formats of masters and of computation, and an fp64 mode in which nothing falls back to fp32."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a run."""

    master: torch.dtype  # format of the parameters that the optimizer updates, of gradient sums and of optimizer state
    compute: torch.dtype  # format of activations, of matrix products and of the parameters in them
    # True if products of fp32 matrices round their factors to 10 bits behind the point, as matrix units like it
    tf32: bool = False

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context in which every forward and backward runs."""
        if self.compute == torch.float64:
            return StaysDouble()
        return _rounded_factors() if self.tf32 else nullcontext()


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision(torch.float64, torch.float64),  # for proofs
    "fp32": Precision(torch.float32, torch.float32),
    "tf32": Precision(torch.float32, torch.float32, tf32=True),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
}


def since_a100(device: torch.device) -> bool:
    """Return True for an A100 or a later GPU, whose matrix units know tf32 and bf16, and which has FlashAttention 2."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def _rounded_factors() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class StaysDouble(TorchFunctionMode):
    """Mode in which ``tensor.float()``, ``tensor.to(torch.float32)`` and ``dtype=torch.float32`` mean fp64. Modules of
    transformers compute norms, rotary tables and the softmax of attention in fp32, whatever the format of their inputs. This is
    right for bf16, but it costs half of the digits of fp64: a rounding difference then appears as 1e-9."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
