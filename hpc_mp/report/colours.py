"""Colours of figures: a fill on a ramp, and the ink that reads on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Rgb = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shade:
    """A fill and the ink that reads on it, as ``#rrggbb``."""

    fill: str
    ink: str


def shade(rgb: Rgb) -> Shade:
    """Return the colour with its ink."""
    return Shade(f"#{bytes(rgb).hex()}", "#ffffff" if luminance(rgb) < 0.19 else "#111111")


def mixed(stops: Sequence[tuple[float, Rgb]], place: float) -> Rgb:
    """Return the colour at a place between the first and the last of the stops, which are in order."""
    inside = min(max(place, stops[0][0]), stops[-1][0])
    (low, before), (high, after) = next((a, b) for a, b in pairwise(stops) if inside <= b[0])
    part = (inside - low) / (high - low)
    return tuple(round(start + part * (end - start)) for start, end in zip(before, after, strict=True))


def luminance(rgb: Rgb) -> float:
    """Return the relative luminance, 0 … 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (channel / 255 for channel in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
