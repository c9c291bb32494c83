"""How findings say numbers."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(number: float) -> str:
    """Bytes in the largest unit that leaves at least 1: ``1.5 GiB``."""
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            break
        number /= 1024
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def several(names: list[str], most: int = 4) -> str:
    """The first of them, and that there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
