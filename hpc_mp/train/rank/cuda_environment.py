"""Variables of CUDA and torch that ranks need. ``env/profiles/engine-cuda.toml`` has their values and the reasons."""

import tomllib
from collections.abc import MutableMapping

from hpc_mp.base.assets import asset

PROFILE = "env/profiles/engine-cuda.toml"
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}  # under which torch reads them too


def prepare(environ: MutableMapping[str, str]) -> list[str]:
    """Set the variables that nobody has set, and return their names. CUDA and torch read them when a GPU is first used."""
    values = {row["name"]: row["value"] for row in tomllib.loads(asset(PROFILE).read_text(encoding="utf-8"))["variable"]}
    missing = {name: value for name, value in values.items() if environ.keys().isdisjoint((name, OLDER_NAMES.get(name, name)))}
    environ.update(missing)
    return list(missing)
