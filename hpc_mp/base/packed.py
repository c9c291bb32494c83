"""Tables in the archive of the health check. They are JSON: the Python of a node may have neither tomllib nor pydantic."""

import json
from importlib import resources
from typing import Any


def packed_table(name: str) -> Any:
    """Return a table of the archive that this program runs from; None if it runs from no archive."""
    file = resources.files("hpc_mp").joinpath(name)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
