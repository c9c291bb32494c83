"""How NCCL reads the value of a variable: a whole number, and a list of names.

Numbers as ``strtoll`` with base 0 does (``ncclLoadParam`` in its src/misc/param.cc); lists by its own rules (``parseStringList``,
``matchIfList`` in its src/misc/utils.cc).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")
_PLAIN = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
LEAST, MOST = -(2**63), 2**63 - 1


def is_plain(text: str) -> bool:
    """Whether text is a whole number of 64 bits as a person reads it too: no leading zero, nothing around it."""
    return bool(_PLAIN.fullmatch(text)) and read_number(text) is not None


def read_number(text: str) -> int | None:
    """What NCCL makes of text that is not empty; None where it takes the default because the number has more than 64 bits.

    ``"fast"`` is 0, ``"4 # more"`` is 4, ``"022"`` is 18: what cannot be read ends the number and is passed over.
    """
    found = _NUMBER.match(text)
    if not found:
        return 0
    digits = found[2]
    if digits[:2].lower() == "0x":
        value = int(digits, 16)
    elif digits[0] == "0":
        value = int(re.match("[0-7]+", digits)[0], 8)  # type: ignore[index]
    else:
        value = int(digits)
    value = -value if found[1] == "-" else value
    return value if LEAST <= value <= MOST else None


def taken(pattern: str, names: Iterable[str]) -> list[str]:
    """Of ``names`` those that ``[^][=]name[:port…],name…`` takes: ``^`` all others, ``=`` whole names instead of beginnings.

    An empty list takes everything, behind ``^`` nothing.
    """
    others = pattern.startswith("^")
    entries = pattern.removeprefix("^")
    exact = entries.startswith("=")
    wanted = [name for entry in entries.removeprefix("=").split(",") if (name := entry.partition(":")[0])]

    def listed(name: str) -> bool:
        return not wanted or any(name == each if exact else name.startswith(each) for each in wanted)

    return [name for name in names if listed(name) != others]
