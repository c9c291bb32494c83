"""A model's shape: the numbers that determine how it can be cut, read without transformers."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown

T = TypeVar("T")
Config = dict[str, Any]  # the fields of a Hugging Face configuration
MOST, MOST_LAYERS = 2**31 - 1, 2**16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a transformer that is a stack of blocks (counts, not bytes).

    Attributes:
        experts, experts_per_token: MLPs of a block, and number of them that each token uses; 0: one MLP for all tokens.
        expert_intermediate: inner size of an expert; ``intermediate`` is that of a dense MLP.
        dense: layers with one MLP for all tokens in a model with experts.
        windows: number of tokens that a token attends to, including itself, None: all earlier tokens; of the first layers, and of
            all others in turn. Empty: None for all.
        bidirectional: True if tokens attend to later ones too; such a model learns masked tokens, not the next one.
        token_types: kinds of tokens, each with an embedding beside that of the word; 0: none.
    """

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
    initializer_range: float = 0.02
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    bidirectional: bool = False
    token_types: int = 0

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of a layer; 0: one MLP for all tokens."""
        return 0 if layer in self.dense else self.experts

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer; None: its tokens attend to all earlier ones."""
        return self.windows[layer % len(self.windows)] if self.windows else None

    @property
    def kinds(self) -> tuple[int, ...]:
        """Kind of every layer, counted from 0: layers of a kind have the same window and number of experts."""
        kinds: dict[tuple[int | None, int], int] = {}
        facts = ((self.window_of(layer), self.experts_of(layer)) for layer in range(self.layers))
        return tuple(kinds.setdefault(fact, len(kinds)) for fact in facts)

    def narrowest(self, sequence: int) -> int | None:
        """Return the narrowest window that hides tokens of a sample of this length; None if there is none."""
        return min((window for window in self.windows if window is not None and window < sequence), default=None)


def config_of(directory: Path) -> Config:
    """Return the configuration of a checkpoint. Raises HpcMpError if it or its config.json is missing or unreadable."""
    value, remedy = f"model.pretrained = {directory}", "use a directory written by save_pretrained"
    if not directory.is_dir():
        raise HpcMpError(value, "is not a directory (models are never downloaded)",
                         "use the directory of a Hugging Face checkpoint on this file system")
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HpcMpError(value, f"its config.json cannot be read ({error.strerror})", remedy) from None
    except (ValueError, RecursionError) as error:
        raise HpcMpError(value, f"its config.json is not JSON ({error})", remedy) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise HpcMpError(value, "its config.json names no model_type", remedy)
    if not any(directory.glob("*.safetensors")):
        raise HpcMpError(value, "holds no *.safetensors file", "save it again with save_pretrained (pickle files are not read)")
    return config


class ConfigReader:
    """A reader of typed values from a config dictionary, under any of their names, with Hugging Face's defaults.

    Raises:
        HpcMpError: for a value of the wrong type or out of range, or two names with different values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def count(self, *names: str, default: int, limit: int = MOST) -> int:
        """Return a whole number from 1 to ``limit``."""
        return self._read(names, default, f"must be a whole number from 1 to {limit}",
                          lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit)

    def flag(self, name: str, default: bool) -> bool:
        return self._read((name,), default, "must be true or false", lambda value: isinstance(value, bool))

    def number(self, name: str, default: float) -> float:
        """Return a finite number of at least 0."""
        return float(self._read((name,), default, "must be a finite number of at least 0", lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max)))

    def row(self, name: str, rows: int) -> int | None:
        """Return a row of a table; a negative one counts from the end, as in torch."""
        value: int | None = self._read((name,), None, f"must be a whole number from {-rows} to {rows - 1}", lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and -rows <= value < rows))
        return None if value is None else value % rows

    def _read(self, names: tuple[str, ...], default: T, rule: str, holds: Callable[[Any], bool]) -> T:
        values = {name: self.config[name] for name in names if self.config.get(name) is not None}
        for name, value in values.items():
            if not holds(value):
                raise HpcMpError(f"the model's {name} = {shown(value)}", rule, "write for example "
                                 f"{name} = {shown(default)}, in model.config or in the checkpoint's config.json")
        if len(set(values.values())) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in values.items())
            raise HpcMpError(f"the model's {both}", "are two names for one size, with different values", "leave one of them out")
        return next(iter(values.values()), default)


def quotient(whole: str, size: int, part: str, parts: int) -> int:
    """Return ``size / parts``, which must be whole; ``whole`` and ``part`` are the names of the sizes. Raises HpcMpError."""
    if size % parts:
        raise HpcMpError(f"the model's {whole}({size}) / {part}({parts})", "must be a whole number",
                         f"choose {whole} as a multiple of {part}")
    return size // parts


def read_sizes(config: Mapping[str, Any], default: ModelShape, names: Mapping[str, str] = MappingProxyType({})) -> ModelShape:
    """Read the sizes that every family has.

    Args:
        default: of the family's configuration class; kv_heads 0: all heads, head_dim 0: hidden / heads, intermediate 0:
            4 × hidden.
        names: the usual name of a field -> the family's own, as in transformers' ``attribute_map``; both are read.

    Raises:
        HpcMpError: as ``ConfigReader``, or heads do not divide the hidden size.
    """
    def count(name: str, default: int, limit: int = MOST) -> int:
        return c.count(*dict.fromkeys((names.get(name, name), name)), default=default, limit=limit)

    c, heads_name = ConfigReader(config), names.get("num_attention_heads", "num_attention_heads")
    hidden, heads = count("hidden_size", default.hidden), count("num_attention_heads", default.heads)
    if not default.head_dim and config.get("head_dim") is None:
        quotient(names.get("hidden_size", "hidden_size"), hidden, heads_name, heads)
    kv_heads = count("num_key_value_heads", heads if "num_key_value_heads" in config else default.kv_heads or heads)
    quotient(heads_name, heads, "num_key_value_heads", kv_heads)
    return replace(
        default, layers=count("num_hidden_layers", default.layers, MOST_LAYERS), hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=count("head_dim", default.head_dim or hidden // heads),
        intermediate=count("intermediate_size", default.intermediate or 4 * hidden),
        vocabulary=count("vocab_size", default.vocabulary), positions=count("max_position_embeddings", default.positions),
        tied=c.flag("tie_word_embeddings", default.tied), attention_bias=c.flag("attention_bias", default.attention_bias),
        mlp_bias=c.flag("mlp_bias", default.mlp_bias),
        initializer_range=c.number("initializer_range", default.initializer_range),
    )


def chunk(size: int, parts: int, part: int) -> slice:
    """Return the elements of a part as ``torch.chunk`` cuts: ceil(size / parts) each while some are left; the last parts may be
    smaller or empty."""
    step = -(-size // parts)
    return slice(min(size, part * step), min(size, (part + 1) * step))


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of all parts of ``chunk``."""
    chunks = (chunk(size, parts, part) for part in range(parts))
    return tuple(elements.stop - elements.start for elements in chunks)
