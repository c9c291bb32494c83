"""A model's shape: the numbers that decide how it can be cut, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer (counts, not bytes)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    gated_mlp: bool
    initializer_range: float


def read_config(spec: JobSpec) -> dict[str, Any]:
    """The model's configuration dictionary, from the job file or from the checkpoint's config.json.

    Raises:
        HpcMpError: when the checkpoint or its config.json is missing or unreadable.
    """
    if spec.model.config is not None:
        return dict(spec.model.config)
    assert spec.model.pretrained is not None  # JobSpec has exactly one of the two
    directory = Path(spec.model.pretrained)
    if not directory.is_dir():
        raise HpcMpError(f"model.pretrained = {directory}", "is not a directory (models are never downloaded)",
                         "give the directory of a Hugging Face checkpoint on this file system")
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"model.pretrained = {directory}", f"config.json cannot be read ({error})",
                         "give a directory written by save_pretrained") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise HpcMpError(f"{path}", "names no model_type", "give a directory written by save_pretrained")
    if not any(directory.glob("*.safetensors")):
        raise HpcMpError(f"model.pretrained = {directory}", "holds no *.safetensors file",
                         "save it again with save_pretrained (pickle files are not read)")
    return config


class ConfigReader:
    """Reads typed values from a config dictionary under any of their names, with Hugging Face's default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def count(self, *names: str, default: int) -> int:
        """A whole number of at least 1. Raises HpcMpError."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HpcMpError(f"model.config.{name} = {value!r}", "must be a whole number of at least 1", "mend it")
            return value
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise HpcMpError(f"model.config.{name} = {value!r}", "must be true or false", "mend it")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise HpcMpError(f"model.config.{name} = {value!r}", "must be a number of at least 0", "mend it")
        return float(value)

    def refuse(self, name: str, built: Any, remedy: str) -> None:
        """Refuse a setting whose feature is not built. Raises HpcMpError."""
        value = self.config.get(name, built)
        if value != built:
            raise HpcMpError(f"model.config.{name} = {value!r}", "not built yet", remedy)
