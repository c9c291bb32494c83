"""Axes of a figure: mapping of values to pixels, and round numbers as labels."""

import math
from dataclasses import dataclass

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map of ``low`` to pixel ``start`` and ``high`` to pixel ``end``. Equal ends map to the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its pixel and its label."""

    at: float
    label: str


def rounds(low: float, high: float, limit: int, whole: bool = False) -> tuple[float, ...]:
    """Return multiples of 1, 2 or 5 × 10ⁿ from ``low`` to ``high``, at most ``limit`` + 1; with ``whole`` only integers. For a
    range too narrow to divide, return only ``low``."""
    if high - low <= max(1e-12 * max(abs(low), abs(high)), TINY):
        return (low,)
    raw = (high - low) / limit
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(n * step for n in range(first, last + 1))


def ticks(scale: Scale, limit: int, whole: bool = False) -> tuple[Tick, ...]:
    """Return round numbers on a scale, all in the same unit and with the same number of decimals."""
    values = rounds(scale.low, scale.high, limit, whole)
    largest = max((abs(value) for value in values), default=0.0)
    unit, prefix = next(((unit, prefix) for unit, prefix in PREFIXES if largest >= 10 * unit), (1.0, ""))
    if len(values) > 1:
        decimals = max(0, -math.floor(math.log10((values[1] - values[0]) / unit) + 1e-9))
    else:
        decimals = 0 if whole else 4

    def label(value: float) -> str:
        if 0 < largest < 1e-4:
            return f"{value:.2g}"
        return f"{value / unit:.{decimals}f}{prefix}" if value else "0"

    return tuple(Tick(scale(value), label(value)) for value in values)
