"""A model's shape: the numbers that decide how it can be cut, read without transformers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.errors import shown
from hpc_mp.layout.schedule.partition import partition

T = TypeVar("T")
MOST_LAYERS = 2**16


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
    except OSError as error:
        raise HpcMpError(f"model.pretrained = {directory}", f"its config.json cannot be read ({error.strerror})",
                         "give a directory written by save_pretrained") from None
    except (ValueError, RecursionError) as error:
        raise HpcMpError(f"model.pretrained = {directory}", f"its config.json is not JSON ({error})",
                         "give a directory written by save_pretrained") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise HpcMpError(f"model.pretrained = {directory}", "its config.json names no model_type",
                         "give a directory written by save_pretrained")
    if not any(directory.glob("*.safetensors")):
        raise HpcMpError(f"model.pretrained = {directory}", "holds no *.safetensors file",
                         "save it again with save_pretrained (pickle files are not read)")
    return config


class ConfigReader:
    """Reads typed values from a config dictionary under any of their names, with Hugging Face's default.

    Raises:
        HpcMpError: for a value that is not of its type or out of its range, or that two names give differently.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def count(self, *names: str, default: int, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to ``most``."""
        return self._read(names, default, f"must be a whole number from 1 to {most}",
                          lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most)

    def flag(self, name: str, default: bool) -> bool:
        return self._read((name,), default, "must be true or false", lambda value: isinstance(value, bool))

    def number(self, name: str, default: float) -> float:
        """A finite number of at least 0."""
        return float(self._read((name,), default, "must be a finite number of at least 0", lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max)))

    def refuse(self, name: str, built: Any, remedy: str) -> None:
        """Refuse a setting whose feature is not built."""
        value = self.config.get(name, built)
        if value != built:
            raise HpcMpError(f"the model's {name} = {shown(value)}", "is not built yet", remedy)

    def _read(self, names: tuple[str, ...], default: T, rule: str, holds: Callable[[Any], bool]) -> T:
        given = {name: self.config[name] for name in names if self.config.get(name) is not None}
        for name, value in given.items():
            if not holds(value):
                raise HpcMpError(f"the model's {name} = {shown(value)}", rule, "write for example "
                                 f"{name} = {shown(default)}, in model.config or in the checkpoint's config.json")
        if len(set(given.values())) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in given.items())
            raise HpcMpError(f"the model's {both}", "are two names of one size and differ", "leave one of them out")
        return next(iter(given.values()), default)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Forward floating-point operations per token of the embedding, of each block, and of norm + head + loss."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def layer_costs(shape: ModelShape, sequence_length: int) -> LayerCosts:
    """Two operations per weight of every matrix product and token, plus the attention products with half the sequence
    (causal), as in the appendix of "Training Compute-Optimal Large Language Models" (arXiv:2203.15556). The embedding
    is a look-up and costs nothing by that count.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = (3 if shape.gated_mlp else 2) * shape.hidden * shape.intermediate
    weights = shape.hidden * (q + 2 * kv) + q * shape.hidden + mlp
    attention = 2 * 2 * q * sequence_length / 2
    return LayerCosts(0.0, (2.0 * weights + attention,) * shape.layers, 2.0 * shape.hidden * shape.vocabulary)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """How ``torch.chunk`` cuts: ceil(size / parts) each while some is left; the last parts may be smaller or empty."""
    step = -(-size // parts)
    return tuple(max(0, min(step, size - part * step)) for part in range(parts))


def check_layout(shape: ModelShape, spec: JobSpec) -> None:
    """Raises HpcMpError, with the arithmetic, when the model cannot be cut as ``spec.parallel`` asks."""
    tensor, pipeline, partition = spec.parallel.tensor, spec.parallel.pipeline, spec.parallel.partition
    if spec.data.sequence_length > shape.positions:
        raise HpcMpError(f"data.sequence_length = {spec.data.sequence_length}",
                         f"is longer than the model's {shape.positions} positions",
                         f"use at most {shape.positions}, or a model with more positions")
    if pipeline > shape.layers:
        raise HpcMpError(f"parallel.pipeline = {pipeline}", f"is more stages than the model's {shape.layers} layers",
                         f"use at most {shape.layers} stages")
    if partition != "auto" and sum(partition) != shape.layers:
        raise HpcMpError(f"parallel.partition = {shown(partition)}",
                         f"has {sum(partition)} layers, the model has {shape.layers}",
                         "change the layers of a stage so that the sum is right")
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if count % tensor:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"does not divide the model's {count} {what}",
                             f"use a divisor of {math.gcd(shape.heads, shape.kv_heads)}: heads are never split")
    for what, size in (("vocabulary", shape.vocabulary), ("intermediate size", shape.intermediate)):
        empty = chunk_sizes(size, tensor).count(0)
        if empty:
            raise HpcMpError(f"parallel.tensor = {tensor}", f"cuts the {what} of {size} into pieces of "
                             f"{-(-size // tensor)}, so that {empty} of {tensor} ranks get nothing",
                             "use fewer tensor ranks")


def stage_layers(spec: JobSpec, shape: ModelShape) -> tuple[int, ...]:
    """The layers of every stage: as ``parallel.partition`` says, or for ``auto`` the cut whose most expensive stage is cheapest.

    A resolved job says them. They are computed for a job that has just been written, and for ranks started by hand.
    """
    if spec.parallel.partition != "auto":
        return spec.parallel.partition
    costs = layer_costs(shape, spec.data.sequence_length)
    return partition(costs.blocks, spec.parallel.pipeline, costs.embedding, costs.head)
