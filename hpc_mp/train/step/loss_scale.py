"""The dynamic loss scale of fp16: it keeps small gradients from underflow, and a step whose gradients overflow is skipped.

The rule is that of DeepSpeed 0.19's ``DynamicLossScaler``, step by step; the job file's ``train.loss_scale`` describes it. It is
a pure function of three numbers on the device, so that the host need not know whether a step overflowed before it launches the
next one. The scale multiplies the gradient of the loss on the last stage. The global gradient norm is divided by it, and so are
the gradients in the optimizer's update.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FACTOR = 2.0


class ScaleRule(Protocol):
    """Settings of the dynamic scale, those of the job file's ``train.loss_scale``. ``window`` 0: the scale is constant."""

    initial: float
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    minimum: float


class ScaleState(NamedTuple):
    """State of the loss scale between two steps."""

    scale: float  # scale of the next step
    good: float  # number of steps since the last overflow
    patience: float  # number of overflows until the scale falls


def first(rule: ScaleRule | None) -> ScaleState:
    """Return the state before the first step. ``rule``: None for all other number formats, whose scale is always 1."""
    return ScaleState(1.0, 0.0, 1.0) if rule is None else ScaleState(rule.initial, 0.0, float(rule.hysteresis))


def on_device(state: Sequence[float], device: torch.device) -> Tensor:
    """Return a state as the tensor that ``advanced`` takes, (3,)."""
    return torch.tensor(state, dtype=torch.float64, device=device)


def advanced(state: Tensor, finite: Tensor, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    """Return the state after a step, and whether an overflow changed it. ``finite``: whether the gradient norm of the step was
    finite. If an overflow changed the state, the scale may have caused it. Nothing is read back from the device."""
    if rule is None or rule.window == 0:
        return state, torch.zeros_like(finite)
    scale, good, patience = state.unbind()
    falls = patience <= 1
    bad = torch.stack((torch.where(falls, (scale / FACTOR).clamp(min=rule.minimum), scale),
                       torch.zeros_like(good), torch.where(falls, patience, patience - 1)))
    grows = (good > 0) & (good % rule.window == 0)
    refilled = torch.full_like(patience, rule.hysteresis)
    fine = torch.stack((torch.where(grows, scale * FACTOR, scale), good + 1,
                        refilled if rule.consecutive_hysteresis else torch.where(grows, refilled, patience)))
    absorbed = ~finite & ((patience > 1) | (scale > rule.minimum))
    return torch.where(finite, fine, bad), absorbed
