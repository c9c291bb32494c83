"""Numbers and lists formatted for people. JSON documents keep the numbers themselves, with all their digits.

Memory uses powers of two (GiB), like its makers, nvidia-smi, free and Slurm. Files, messages and link traffic use powers of ten
(GB), like the rates of links, disks and NCCL's busbw, so that a reader can divide one by the other. Three digits are kept: no
figure here is known more precisely.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from difflib import get_close_matches
from itertools import groupby, pairwise
from typing import Any

PERPLEXING = math.log(1e15)  # a larger perplexity is not informative; NaN is not below it either
LONGEST = 77  # characters of a value that a message shows
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
SHORT = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
LONG = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def memory_size(count: float) -> str:
    """Format bytes of memory: ``1.5 GiB``, ``1023 MiB``, ``512 B``."""
    return _scaled(count, 1024, BINARY)


def data_size(count: float) -> str:
    """Format bytes of a file, a message or a step's traffic: ``192 GB``, ``8.1 MB``."""
    return _scaled(count, 1000, DECIMAL)


def data_rate(gigabytes: float) -> str:
    """Format the rate of a link, a disk or a collective, given in GB/s as all rates are: ``41.5 GB/s``, ``1.5 MB/s``."""
    return f"{data_size(gigabytes * 1e9)}/s"


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    """Format three digits in the largest unit that leaves at least 1 after rounding."""
    power = 0
    while power < len(units) - 1 and abs(_three(count / base**power)) >= base:
        power += 1
    return f"{_three(count / base**power):g} {units[power]}"


def _three(value: float) -> float:
    return float(f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}")


def number(value: float) -> str:
    """Format four significant digits with thousands separators: ``0.4725``, ``2,041``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def loss_number(loss: float, sign: str = "") -> str:
    """Format a loss of any scale: ``4.3175``, ``0.0312``, ``3.12e-07``, ``1.235e+06``. ``sign``: as in a format specification."""
    return f"{loss:{sign}.4f}" if loss == 0 or 1e-2 <= abs(loss) < 1e6 else f"{loss:{sign}.4g}"


def loss_words(loss: float) -> str:
    """Format a loss in nats per token with its perplexity: ``loss 4.3175 (perplexity 75)``."""
    perplexity = f" (perplexity {math.exp(loss):,.{0 if loss > 3 else 2}f})" if loss < PERPLEXING else ""
    return f"loss {loss_number(loss)}{perplexity}"


def percent(share: float) -> str:
    """Format a fraction of one: ``12.5 %``."""
    return f"{share:.1%}".replace("%", " %")


def speed(tokens_per_s: float, mfu: float | None) -> str:
    """Format a throughput, with its share of the devices' peak if that is known: ``2,041 tokens/s, MFU 41.3 %``."""
    return f"{tokens_per_s:,.0f} tokens/s" + (f", MFU {percent(mfu)}" if mfu is not None and mfu > 0 else "")


def short_unit(seconds: float) -> tuple[float, str]:
    """Return the best unit for a time of this length: its seconds and its name."""
    return next((unit for unit in reversed(SHORT) if seconds >= unit[0]), SHORT[0])


def duration(seconds: float) -> str:
    """Format a time in at most two units: ``13.3 ms``, ``1.23 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``. A negative time is
    ``0 s``: it is the age of something written by a machine whose clock is ahead."""
    if seconds <= 0:
        return "0 s"
    if seconds < 59.95:
        unit, name = short_unit(seconds)
        return f"{seconds / unit:.3g} {name}"
    parts: list[tuple[int, str]] = []
    remainder = round(seconds)
    for length, name in LONG:
        count, remainder = divmod(remainder, length)
        if count or parts:
            parts.append((count, name))
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)


def ago(seconds: float) -> str:
    """Format an age in one unit and rounded: ``53 s ago``, ``3 min ago``, ``2 d ago``. An age of less than a second, or a
    negative one from a machine whose clock is ahead, is ``just now``."""
    if seconds < 1:
        return "just now"
    for (length, name), (longer, _) in pairwise(reversed(LONG)):
        if (count := round(seconds / length)) * length < longer:
            return f"{count} {name} ago"
    return f"{round(seconds / LONG[0][0])} {LONG[0][1]} ago"


def moment(time: float) -> str:
    """Format unix seconds in this machine's time zone: ``2026-11-20 08:24:38``."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 node``, ``2 nodes``, ``1,024 ranks``. ``plural``: if not with s (``microbatches``)."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def escaped(text: str) -> str:
    """Return the text with control characters escaped (``\\x1b``), except line ends and tabs: it must not control a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # and direction marks


def several(names: Sequence[str], limit: int = 4) -> str:
    """Return the first names and the number of the remaining ones: ``n1, n2, n3, n4 and 12 more``."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each run of numbers that follow one another."""
    several = ([number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    return [(run[0], run[-1]) for run in several]


def nearest(word: str, candidates: Iterable[str], likeness: float = 0.6, limit: int = 1) -> list[str]:
    """Return the candidates that this word may be a typo of, the most similar first. Case does not count. ``likeness``: minimum
    of difflib's ratio, between 0 and 1. A mere hint uses 0.6; a linter that reports similar words asks for more. ``limit``:
    maximum number of words."""
    by_case = {name.casefold(): name for name in candidates}
    return [by_case[near] for near in get_close_matches(word.casefold(), by_case, limit, likeness)]


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str = "", likeness: float = 0.6, limit: int = 1) -> str:
    """Return ``did you mean 'tensor'?``, or ``otherwise`` if no candidate is similar."""
    near = nearest(word, candidates, likeness, limit)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def shown(value: Any) -> str:
    """Return a value approximately in TOML notation, on one short line."""
    if isinstance(value, int) and value.bit_length() > 10_000:
        return f"(a whole number of {value.bit_length()} bits)"  # Python refuses to write out very long ones
    text = repr(value) if isinstance(value, str | float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
