"""A model's shape: the numbers that determine how it can be cut, read without transformers."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.fields import is_number

Config = dict[str, Any]  # the fields of a Hugging Face configuration
MOST, MOST_LAYERS = 2**31 - 1, 2**16
WRITE = "write for example {name} = {value}, in model.config or in the checkpoint's config.json"
NAMES = {  # fields of a configuration, and the attributes of ``ModelShape`` that they set
    "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim", "intermediate_size": "intermediate", "vocab_size": "vocabulary",
    "max_position_embeddings": "positions", "type_vocab_size": "token_types",
    "tie_word_embeddings": "tied", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
    "initializer_range": "initializer_range", "num_local_experts": "experts", "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "expert_intermediate"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a transformer that is a stack of blocks (counts, not bytes).

    Attributes:
        experts, experts_per_token: MLPs of a block, and number of them that each token uses; 0: one MLP for all tokens.
        expert_intermediate: inner size of an expert; ``intermediate`` is that of a dense MLP.
        dense: layers with one MLP for all tokens in a model with experts.
        windows: number of tokens that a token attends to, including itself, None: all earlier tokens; of the first layers, and of
            all others in turn. Empty: None for all. In a bidirectional model, of tokens on either side.
        chunked: True if windows do not end with the token, but are the chunks of this length of a sample, up to the token.
        bidirectional: True if tokens attend to later ones too; such a model learns masked tokens, not the next one.
        token_types: kinds of tokens, each with an embedding beside that of the word; 0: none.
        first_position: the row of the embedding of positions for a document's first token. The row before it is that of padding,
            whose number it is too: such tokens are not counted. 0: positions are rows, and count all tokens.
        classes: of samples, which the model tells apart in place of words; 0: it is a language model.
        adapters: what is trained in place of the model's own weights; None: these are.
        encoder: the number of its first layers that are an encoder; 0: it has none.
        prompt: the first tokens of a sample, which the encoder has; the layers behind it have the others.
        start: the token that the layers behind the encoder start with.
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
    chunked: bool = False
    bidirectional: bool = False
    token_types: int = 0
    first_position: int = 0
    classes: int = 0
    adapters: Adapters | None = None
    encoder: int = 0
    prompt: int = 0
    start: int = 0

    def tokens_of(self, layer: int, sequence: int) -> int:
        """Return the number of tokens of a sample that a layer computes."""
        if not self.encoder:
            return sequence
        return self.prompt if layer < self.encoder else sequence - self.prompt

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of a layer; 0: one MLP for all tokens."""
        return 0 if layer in self.dense else self.experts

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer; None: its tokens attend to all earlier ones."""
        return self.windows[layer % len(self.windows)] if self.windows else None

    def of_classes(self, classes: int) -> "ModelShape":
        """Return the shape of the model with a head for so many classes of samples; 0: with its own head."""
        return replace(self, classes=classes, tied=False) if classes else self

    @property
    def kinds(self) -> tuple[int, ...]:
        """Kind of every layer, counted from 0: layers of a kind have the same window, number of experts, and stack."""
        kinds: dict[tuple[int | None, int, bool], int] = {}
        facts = ((self.window_of(layer), self.experts_of(layer), layer < self.encoder) for layer in range(self.layers))
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


TEXT_PART = "the language model of {whole}, whose other parts are left out"


def text_part(config: Config) -> Config:
    """Return the configuration of the language model inside of one that also sees or hears; any other as it is."""
    text = config.get("text_config")
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        return config
    return {key: config[key] for key in ("tie_word_embeddings",) if key in config} | text


def checked(name: str, value: Any, default: bool | float, limit: int = MOST) -> Any:
    """Return a field's value if it is of its default's kind: true or false, a whole number from 1 to ``limit``, or a finite
    number of at least 0. Raises HpcMpError for another one."""
    if isinstance(default, bool):
        rule, holds = "must be true or false", isinstance(value, bool)
    elif isinstance(default, int):
        rule, holds = f"must be a whole number from 1 to {limit}", type(value) is int and 1 <= value <= limit
    else:
        rule, holds = "must be a finite number of at least 0", is_number(value) and 0 <= value <= sys.float_info.max
    if not holds:
        raise HpcMpError(f"the model's {name} = {shown(value)}", rule, WRITE.format(name=name, value=shown(default)))
    return float(value) if isinstance(default, float) else value


def count(config: Mapping[str, Any], name: str, default: int) -> int:
    """Return a whole number of at least 1; null is the default. Raises HpcMpError."""
    return default if config.get(name) is None else int(checked(name, config[name], default))


def check_multiple(whole: str, size: int, part: str, parts: int) -> None:
    """Raise HpcMpError if ``parts`` does not divide ``size``; ``whole`` and ``part`` are their names."""
    if size % parts:
        raise HpcMpError(f"the model's {whole}({size}) / {part}({parts})", "must be a whole number",
                         f"choose {whole} as a multiple of {part}")


def check_padding(config: Mapping[str, Any], rows: int) -> None:
    """Check that the padding is a row of the embedding; a negative one counts from the end, as in torch. Raises HpcMpError."""
    row = config.get("pad_token_id")
    if row is not None and not (type(row) is int and -rows <= row < rows):
        raise HpcMpError(f"the model's pad_token_id = {shown(row)}", f"must be a whole number from {-rows} to {rows - 1}",
                         WRITE.format(name="pad_token_id", value="null"))


def read_sizes(config: Mapping[str, Any], default: ModelShape, own: Mapping[str, str] | None = None) -> ModelShape:
    """Read the sizes of a model from a configuration whose fields the family knows.

    Args:
        default: of the family's configuration class; kv_heads 0: all heads, head_dim 0: hidden / heads, intermediate 0:
            4 × hidden.
        own: the family's own names, beside ``NAMES``, which transformers reads too.

    Raises:
        HpcMpError: a value of the wrong kind or out of range, two names with different values, or heads that do not divide.
    """
    names = {**(own or {}), **NAMES}
    outer = {name: size for name, size in names.items() if size in ("hidden", "heads")}
    shape = replace(default, **_stated(config, default, outer))
    hidden, heads = (next(name for name in outer if outer[name] == size) for size in ("hidden", "heads"))
    if not default.head_dim and config.get("head_dim") is None:
        check_multiple(hidden, shape.hidden, heads, shape.heads)
    if default.kv_heads and "num_key_value_heads" in config:  # only families without a default read null, as all heads
        checked("num_key_value_heads", config["num_key_value_heads"], default.kv_heads)
    shape = replace(
        shape, kv_heads=default.kv_heads or shape.heads,
        head_dim=default.head_dim or shape.hidden // shape.heads, intermediate=default.intermediate or 4 * shape.hidden)
    shape = replace(shape, **_stated(config, shape, names))
    check_multiple(heads, shape.heads, "num_key_value_heads", shape.kv_heads)
    return shape


def _stated(config: Mapping[str, Any], default: ModelShape, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes that a configuration sets."""
    values: dict[str, dict[str, Any]] = {}
    for name, size in names.items():
        if config.get(name) is not None:
            value = checked(name, config[name], getattr(default, size), MOST_LAYERS if size == "layers" else MOST)
            values.setdefault(size, {})[name] = value
    for same in values.values():
        if len(set(same.values())) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in same.items())
            raise HpcMpError(f"the model's {both}", "are two names for one size, with different values", "leave one of them out")
    return {size: next(iter(same.values())) for size, same in values.items()}


def chunk(size: int, parts: int, part: int) -> slice:
    """Return the elements of a part as ``torch.chunk`` cuts: ceil(size / parts) each while some are left; the last parts may be
    smaller or empty."""
    step = -(-size // parts)
    return slice(min(size, part * step), min(size, (part + 1) * step))


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of all parts of ``chunk``."""
    chunks = (chunk(size, parts, part) for part in range(parts))
    return tuple(elements.stop - elements.start for elements in chunks)
