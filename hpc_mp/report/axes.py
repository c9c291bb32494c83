"""Axes of a drawing: values to pixels, and round numbers to write beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Scale:
    """The linear map that takes ``low`` to pixel ``start`` and ``high`` to pixel ``end``; both to the middle if equal."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its pixel and what stands beside it."""

    at: float
    label: str


def rounds(low: float, high: float, most: int, whole: bool = False) -> tuple[float, ...]:
    """At most ``most`` + 1 multiples of 1, 2 or 5 × 10ⁿ between ``low`` and ``high``; ``whole`` numbers only, if asked."""
    if not high > low:
        return (low,)
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(n * step for n in range(first, last + 1))


def ticks(scale: Scale, most: int, whole: bool = False) -> tuple[Tick, ...]:
    """Round numbers on a scale, all with the same number of decimals."""
    values = rounds(scale.low, scale.high, most, whole)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    return tuple(Tick(scale(value), label(value, step)) for value in values)


def label(value: float, step: float) -> str:
    """A round number whose neighbours lie ``step`` away: ``0.25``, ``1500``, ``20k``, ``1e-07``."""
    if 0 < abs(step) < 1e-5:
        return f"{value:.2g}"
    unit, prefix = next(((u, p) for u, p in PREFIXES if abs(value) >= 10 * u or (abs(value) >= u > 1e3)), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:.{decimals}f}{prefix}"
