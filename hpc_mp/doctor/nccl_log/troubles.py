"""What warnings of NCCL and its plug-ins mean: the table ``env/nccl-troubles.toml``, which readers and the judge share."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from hpc_mp.base.assets import asset

TABLE = "env/nccl-troubles.toml"
UNKNOWN = "warning"  # the kind of warnings of which no other row speaks


@cache
def trouble_rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows by their kinds, in their order, as the table's head explains them; ``signs`` and ``place`` are patterns."""
    rows = tomllib.loads(asset(TABLE).read_text(encoding="utf-8"))["trouble"]
    return {row["kind"]: {"means": "", "info": False, "fabrics": [], **row, "place": re.compile(row.get("place", "(?!)")),
                          "signs": re.compile("|".join(f"(?:{sign})" for sign in row["signs"]))} for row in rows}


def trouble_of(place: str, level: str, text: str) -> str | None:
    """The kind of a message; None for one that only informs."""
    return next((kind for kind, row in trouble_rows().items() if (level == "WARN" or row["info"])
                 and (row["signs"].search(text) or row["place"].search(place))), None)
