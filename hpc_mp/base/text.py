"""How numbers and lists are written for people. JSON documents keep the numbers themselves, with all their digits.

Memory is written in powers of two (GiB): it is built and sold so, and nvidia-smi, free and Slurm count it so. Files, messages
and what links carry are written in powers of ten (GB): the rates of links, disks and NCCL's busbw count so, and a person divides
one by the other. Three digits are kept, since no figure here is known better than that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from difflib import get_close_matches
from itertools import pairwise

PERPLEXING = math.log(1e15)  # no longer a number that says anything; NaN is not below it either
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
SHORT = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
LONG = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def memory_size(count: float) -> str:
    """Bytes of memory: ``1.5 GiB``, ``1023 MiB``, ``512 B``."""
    return _scaled(count, 1024, BINARY)


def data_size(count: float) -> str:
    """Bytes of a file, a message or a step's traffic: ``192 GB``, ``8.1 MB``."""
    return _scaled(count, 1000, DECIMAL)


def data_rate(gigabytes: float) -> str:
    """The rate of a link, a disk or a collective, given in GB/s as all rates are kept: ``41.5 GB/s``, ``1.5 MB/s``."""
    return f"{data_size(gigabytes * 1e9)}/s"


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    """Three digits in the largest unit that leaves at least 1 once they are rounded."""
    power = 0
    while power < len(units) - 1 and abs(_three(count / base**power)) >= base:
        power += 1
    return f"{_three(count / base**power):g} {units[power]}"


def _three(value: float) -> float:
    return float(f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}")


def number(value: float) -> str:
    """Four digits that count, thousands set apart: ``0.4725``, ``2,041``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def loss_number(loss: float, sign: str = "") -> str:
    """A loss of whatever scale its program has: ``4.3175``, ``0.0312``, ``3.12e-07``, ``1.235e+06``; ``sign`` as in a format."""
    return f"{loss:{sign}.4f}" if loss == 0 or 1e-2 <= abs(loss) < 1e6 else f"{loss:{sign}.4g}"


def loss_words(loss: float) -> str:
    """A loss in nats per token with its perplexity: ``loss 4.3175 (perplexity 75)``."""
    perplexity = f" (perplexity {math.exp(loss):,.{0 if loss > 3 else 2}f})" if loss < PERPLEXING else ""
    return f"loss {loss_number(loss)}{perplexity}"


def percent(share: float) -> str:
    """A share of one: ``12.5 %``."""
    return f"{share:.1%}".replace("%", " %")


def short_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this length reads best: its seconds and its name."""
    return next((unit for unit in reversed(SHORT) if seconds >= unit[0]), SHORT[0])


def duration(seconds: float) -> str:
    """A time in two units at most: ``13.3 ms``, ``1.23 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``.

    A negative one is ``0 s``: it is the age of something that a machine whose clock is ahead has written.
    """
    if seconds <= 0:
        return "0 s"
    if seconds < 59.95:
        unit, name = short_unit(seconds)
        return f"{seconds / unit:.3g} {name}"
    parts: list[tuple[int, str]] = []
    left = round(seconds)
    for length, name in LONG:
        count, left = divmod(left, length)
        if count or parts:
            parts.append((count, name))
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)


def ago(seconds: float) -> str:
    """How long ago something was, in one unit and rounded: ``53 s ago``, ``3 min ago``, ``2 d ago``.

    Less than a second, and what a machine whose clock is ahead has written, is ``just now``.
    """
    if seconds < 1:
        return "just now"
    for (length, name), (longer, _) in pairwise(reversed(LONG)):
        if (count := round(seconds / length)) * length < longer:
            return f"{count} {name} ago"
    return f"{round(seconds / LONG[0][0])} {LONG[0][1]} ago"


def moment(time: float) -> str:
    """Unix seconds in this machine's time zone: ``2026-11-20 08:24:38``."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``2 nodes``, ``1,024 ranks``; ``plural`` where an s does not make it (``microbatches``)."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def escaped(text: str) -> str:
    """The text with control characters written out (``\\x1b``), but for line ends and tabs: it must not steer a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # and what turns the writing round


def several(names: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many more there are: ``n1, n2, n3, n4 and 12 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(word: str, known: Iterable[str], likeness: float = 0.6, most: int = 1) -> list[str]:
    """The known words that this one may be a slip of the pen for, the likest first; case does not count.

    Args:
        likeness: between 0 and 1, difflib's ratio that a known word has at least. What is only a hint keeps 0.6; a linter that
            reports a word because it is like another asks for more.
        most: how many words at most.
    """
    by_case = {each.casefold(): each for each in known}
    return [by_case[near] for near in get_close_matches(word.casefold(), by_case, most, likeness)]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", likeness: float = 0.6, most: int = 1) -> str:
    """``did you mean 'tensor'?``, or ``otherwise`` where no known word is like it."""
    near = nearest(word, known, likeness, most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise
