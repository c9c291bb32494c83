"""NCCL's parsing of variables: integers and lists of names.

Numbers are parsed as by ``strtoll`` with base 0 (``ncclLoadParam`` in its src/misc/param.cc), lists by NCCL's own rules
(``parseStringList``, ``matchIfList`` in its src/misc/utils.cc).
"""

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")
_PLAIN = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
LEAST, MOST = -(2**63), 2**63 - 1


def is_plain(text: str) -> bool:
    """Return True if text is a 64-bit integer that a person reads the same way: no leading zero, no other text."""
    return bool(_PLAIN.fullmatch(text)) and read_number(text) is not None


def read_number(text: str) -> int | None:
    """Return NCCL's reading of non-empty text; None if NCCL uses the default because the number has more than 64 bits. ``"fast"``
    is 0, ``"4 # more"`` is 4, ``"022"`` is 18: unreadable text ends the number and is ignored."""
    match = _NUMBER.match(text)
    if not match:
        return 0
    digits = match[2]
    if digits[:2].lower() == "0x":
        value = int(digits, 16)
    elif digits[0] == "0":
        value = int(re.match("[0-7]+", digits)[0], 8)  # type: ignore[index]
    else:
        value = int(digits)
    value = -value if match[1] == "-" else value
    return value if LEAST <= value <= MOST else None


def taken(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that ``[^][=]name[:port…],name…`` selects: ``^`` inverts, ``=`` matches whole names, not prefixes. An
    empty list selects everything; after ``^``, nothing."""
    others = pattern.startswith("^")
    entries = pattern.removeprefix("^")
    exact = entries.startswith("=")
    selectors = [name for entry in entries.removeprefix("=").split(",") if (name := entry.partition(":")[0])]

    def listed(name: str) -> bool:
        return not selectors or any(name == selector if exact else name.startswith(selector) for selector in selectors)

    return [name for name in names if listed(name) != others]
