"""The loss scale of fp16: gradients too small for 16 bits are made larger, and a step in which they became too large is skipped.

The rule is that of DeepSpeed 0.19's ``DynamicLossScaler``, step by step, as a pure function over three numbers on the device: no
host has to know whether a step overflowed before it launches the next one. The scale multiplies the gradient of the loss on the
last stage; the gradient norm that all ranks agree on is divided by it, and so are gradients when they are used.

====================================== ==============================================================================
a step                                 what follows
====================================== ==============================================================================
overflows, patience is more than 1     patience falls by one
overflows, patience is 1               the scale is halved, down to ``minimum``
does not, as the (n × window + 1)-th   the scale is doubled, patience is again ``hysteresis``
in a row (n = 1, 2 …)
does not                               nothing; with ``consecutive_hysteresis`` patience is again ``hysteresis``
====================================== ==============================================================================
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FACTOR = 2.0


class ScaleRule(Protocol):
    """How the scale moves; the job file's ``train.loss_scale`` has these fields. ``window`` 0: it does not."""

    @property
    def initial(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def consecutive_hysteresis(self) -> bool: ...
    @property
    def minimum(self) -> float: ...


class ScaleState(NamedTuple):
    """Between two steps.

    Attributes:
        scale: of the next step.
        good: steps without an overflow since the last one.
        patience: overflows until the scale falls.
    """

    scale: float
    good: float
    patience: float


class Unscaled(NamedTuple):
    """The rule of every other number format: the scale is 1 for ever."""

    initial: float = 1.0
    window: int = 0
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


def first(rule: ScaleRule) -> ScaleState:
    """Before the first step."""
    return ScaleState(rule.initial, 0.0, float(rule.hysteresis))


def on_device(state: Sequence[float], device: torch.device) -> Tensor:
    """As ``advanced`` takes it, (3,)."""
    return torch.tensor(state, dtype=torch.float64, device=device)


def advanced(state: Tensor, finite: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """The state after a step whose gradient norm was finite or not, and whether it changed because it was not: then the scale can
    be what was wrong with that step. Nothing is read back from the device."""
    if rule.window == 0:
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
