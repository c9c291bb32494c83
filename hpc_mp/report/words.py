"""Numbers as people read them."""

from __future__ import annotations

import math
from datetime import datetime

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SHORT = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))


def size(count: float) -> str:
    """Bytes: ``1.5 GiB``."""
    power = min(int(math.log2(count)) // 10, len(BINARY) - 1) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {BINARY[power]}"


def number(value: float) -> str:
    """Four digits that count, thousands set apart: ``0.4725``, ``2,041``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def short_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this length reads best: its seconds and its name."""
    return next((unit for unit in reversed(SHORT) if seconds >= unit[0]), SHORT[0])


def duration(seconds: float) -> str:
    """``13.3 ms``, ``1.23 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        unit, name = short_unit(seconds)
        return f"{seconds / unit:.3g} {name}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def moment(time: float) -> str:
    """Unix seconds in this machine's time zone: ``2026-11-20 08:24:38``."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
