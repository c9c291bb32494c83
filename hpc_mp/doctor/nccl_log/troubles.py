"""What warnings of NCCL and its plug-ins mean: the table ``env/nccl-troubles.toml``, which readers and the judge share."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hpc_mp.base.assets import asset
from hpc_mp.base.findings import Severity

TABLE = "env/nccl-troubles.toml"
UNKNOWN = "warning"  # the kind of warnings of which no other row speaks


@dataclass(frozen=True, slots=True)
class TroubleRow:
    """A row of the table, as its head explains them."""

    kind: str
    severity: Severity
    cure: str
    signs: re.Pattern[str]
    place: re.Pattern[str] | None = None
    means: str = ""
    info: bool = False
    fabrics: tuple[str, ...] = ()


@cache
def trouble_rows() -> Mapping[str, TroubleRow]:
    """The rows by their kinds, in their order."""
    rows = tomllib.loads(asset(TABLE).read_text(encoding="utf-8"))["trouble"]
    return {row["kind"]: TroubleRow(**{
        **row, "signs": re.compile("|".join(f"(?:{sign})" for sign in row["signs"])), "fabrics": tuple(row.get("fabrics", ())),
        "place": re.compile(row["place"]) if "place" in row else None}) for row in rows}


def trouble_of(place: str, level: str, text: str) -> str | None:
    """The kind of a message; None for one that only informs."""
    for kind, row in trouble_rows().items():
        if (level == "WARN" or row.info) and (row.signs.search(text) or (row.place and row.place.search(place))):
            return kind
    return None
