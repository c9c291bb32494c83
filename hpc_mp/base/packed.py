"""Tables in the archive of the health check. They are JSON: the Python of a node may have neither tomllib nor pydantic."""

import json
from importlib import resources
from typing import Any


def packed_table(name: str) -> Any:
    """Return a table of the archive that this program runs from; None if it runs from no archive."""
    file = resources.files("hpc_mp").joinpath(f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def node_table(name: str) -> dict[str, Any]:
    """Return the content of ``env/NAME.toml``, from the archive if this program runs from it."""
    if (table := packed_table(name)) is None:
        from hpc_mp.base.assets import asset_table

        table = asset_table(f"env/{name}.toml")
    return table  # type: ignore[no-any-return]
