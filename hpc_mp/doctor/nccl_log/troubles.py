"""Meanings of warnings of NCCL and its plug-ins: the table ``env/nccl-troubles.toml``, shared by readers and the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from hpc_mp.base.assets import asset_table

TABLE = "env/nccl-troubles.toml"
UNKNOWN = "warning"  # kind of the warnings that match no other row
ENDED = "ended"  # kind of those after which NCCL's call returned an error


@cache
def trouble_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows by kind, in order, as the table's head explains them; ``signs`` and ``place`` are compiled patterns."""
    rows = asset_table(TABLE)["trouble"]
    return {row["kind"]: {"means": "", "info": False, "fabrics": [], **row, "place": re.compile(row.get("place", "(?!)")),
                          "signs": re.compile("|".join(f"(?:{sign})" for sign in row["signs"]))} for row in rows}


def trouble_of(place: str, level: str, text: str) -> str | None:
    """Return the kind of a message; None if it is only informative."""
    return next((kind for kind, row in trouble_rows().items() if (level == "WARN" or row["info"])
                 and (row["signs"].search(text) or row["place"].search(place))), None)
