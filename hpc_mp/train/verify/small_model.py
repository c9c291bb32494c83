"""The shrunk model of a job: a configuration with small numbers, in which whatever else the model has stays as it is.

Activations, norms, biases, factors, caps, ties and kinds of layers are the model's own. Small numbers keep relations: whether
key-value heads are fewer than heads, whether heads times their size is the hidden size, whether a window hides tokens.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_config, stage_cut
from hpc_mp.job.shrunk import TOKENS
from hpc_mp.layout.flat import GROUPED
from hpc_mp.layout.models import FAMILIES, ModelShape, family_of
from hpc_mp.layout.models.shape import Config
from hpc_mp.layout.models.sheet import shape_of
from hpc_mp.train.model.reader import read_model

HEADS, EXPERTS, CHOICES = 4, 4, 2
WINDOW, UNSEEN = 7, 2 * TOKENS  # of tokens: one that hides some of a sample, and one that hides none
HIDDEN, INTERMEDIATE, EXPERT_INTERMEDIATE, VOCABULARY, POSITIONS, LATENT = 64, 48, 16, 96, 64, 8
MOST = 4_000_000  # parameters of a shrunk model: more of them are a sign of a number that no name here shrinks
NAMES: Mapping[str, tuple[str, ...]] = {  # a number of the shrunk model -> its names in configurations
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "expert_intermediate": ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "choices": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "latent": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    "rotary": ("qk_rope_head_dim", "rotary_dim"),
}
COUNTS = (*NAMES["experts"], *NAMES["choices"])  # which do not grow
WINDOWS = ("sliding_window", "window_size", "sliding_window_size", "attention_window", "local_attention")
LATENT_HEADS = "qk_rope_head_dim"  # a configuration with this field has latent attention, whose heads have parts
LATENT_SIZES = ("head_dim", "qk_head_dim")  # follow from others there
UNVERIFIED = "launch with HPC_MP_VERIFY=0 to train it unverified"
NO_FIELDS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "id2label",
             "label2id", "attn_implementation", "_attn_implementation")


def small_model(spec: JobSpec, shape: ModelShape, small: JobSpec) -> tuple[Config, ModelShape]:
    """Return the configuration and the shape of the model of a shrunk job.

    Args:
        spec, shape: the job itself.

    Raises:
        HpcMpError: transformers, or the reader of its code, refuses what results.
    """
    config, tensor = read_config(spec), spec.parallel.tensor
    kind = config["model_type"]
    whole = CONFIG_MAPPING[kind](**{key: value for key, value in config.items() if key not in NO_FIELDS}).to_dict()
    latent, own_head = LATENT_HEADS in whole, shape.head_dim * shape.heads != shape.hidden
    few = 1 if shape.kv_heads == 1 or tensor > shape.kv_heads else 2
    numbers = {
        "layers": _layers(spec, shape, small), "hidden": HIDDEN, "heads": HEADS,
        "kv_heads": HEADS if latent or shape.heads == shape.kv_heads else few, "head_dim": HIDDEN // HEADS * (1 + own_head),
        "rotary": LATENT // 2, "latent": LATENT, "intermediate": INTERMEDIATE - bool(shape.intermediate % tensor),
        "expert_intermediate": EXPERT_INTERMEDIATE, "vocabulary": VOCABULARY + bool(shape.vocabulary % tensor),
        "experts": EXPERTS - bool(shape.experts % spec.parallel.expert), "choices": CHOICES,
        "window": WINDOW if shape.narrowest(spec.data.sequence_length) is not None else UNSEEN}
    values = {key: value for key, value in _with(whole, numbers, shape.layers).items() if key not in NO_FIELDS}
    if _learns_positions(shape):
        values |= dict.fromkeys(("n_positions", "max_position_embeddings") & values.keys(), POSITIONS)
    result = {"model_type": kind, **{key: value for key, value in values.items() if not latent or key not in LATENT_SIZES}}
    try:
        model = FAMILIES[kind].read(result) if kind in FAMILIES else shape_of(read_model(result))
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise HpcMpError(f"model_type = {kind!r}", f"cannot be verified: its code does not take a small model ({error})",
                         UNVERIFIED) from None
    if (parameters := sum(prod(weight.shape) for weight in family_of(model).all_weights(model))) > MOST:
        raise HpcMpError(f"model_type = {kind!r}", f"cannot be verified: a small model of it has {parameters} parameters",
                         UNVERIFIED)
    return result, model.of_classes(shape.classes)


def _layers(spec: JobSpec, shape: ModelShape, small: JobSpec) -> int:
    """Return the number of the first layers that have every kind, enough for the stages of a shrunk job and one more."""
    family, firsts, held = family_of(shape), dict[object, int](), stage_cut(spec, shape).layers
    for layer in range(shape.layers):
        weights = tuple((weight.name, weight.shape, weight.cut) for weight in family.block_weights(shape, layer))
        kind = shape.window_of(layer), shape.experts_of(layer), layer in family.unattended, weights
        firsts.setdefault(kind, layer)
    full = max(1, small.stages - (held[0] == 0) - (held[-1] == 0 and len(held) > 1))
    least = full * (2 if spec.parallel.recompute.startswith(GROUPED) else 1) + (full > 1)
    if shape.encoder:  # of each stack
        return max(2, (least + 1) // 2)
    return min(shape.layers, max(*firsts.values(), least - 1, 1) + 1)


def _with(whole: Mapping[str, Any], numbers: Mapping[str, int], layers: int) -> Config:
    """Return a configuration with small numbers; of lists with an entry for each of ``layers`` the first entries."""
    names = {key: numbers[number] for number, keys in NAMES.items() for key in keys}
    small: Config = {}
    for key, value in whole.items():
        if key in names and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(names[key], value) if key in COUNTS else names[key]
        elif key in WINDOWS and isinstance(value, int):
            small[key] = numbers["window"]
        elif key == "word_embed_proj_dim":
            small[key] = HIDDEN if value == whole.get("hidden_size") else HIDDEN // 2
        elif key in ("n_group", "topk_group") and isinstance(value, int):
            small[key] = min(value, 2 if key == "n_group" else 1)
        elif key.endswith(("_token_id", "_token_ids")):
            small[key] = _within(value, numbers["vocabulary"])
        elif key.startswith("rope_") and isinstance(value, dict):
            small[key] = _rotary(value, numbers["head_dim"])
        elif isinstance(value, list) and len(value) == layers:
            small[key] = value[:numbers["layers"]]
        elif isinstance(value, list) and key.endswith("_layers") and all(type(layer) is int for layer in value):
            small[key] = [layer for layer in value if layer < numbers["layers"]]
        else:
            small[key] = value
    return small


def _within(value: Any, vocabulary: int) -> Any:
    """Return the id of a token, or a list of them, inside a small vocabulary."""
    if isinstance(value, list):
        return [_within(item, vocabulary) for item in value]
    return min(value, vocabulary - 1) if type(value) is int else value


def _rotary(parameters: Mapping[str, Any], head_dim: int) -> Config:
    """Return parameters of rotary positions, with factors for the frequencies of a small head."""
    frequencies = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    return {name: value[:frequencies] if isinstance(value, list) else
            _rotary(value, head_dim) if isinstance(value, dict) else value for name, value in parameters.items()}


def _learns_positions(shape: ModelShape) -> bool:
    """Return True if the model has an embedding of positions."""
    family = family_of(shape)
    others = (weight for weight in family.embedding_weights(shape) if weight.name != f"{family.embedding}.weight")
    return any(weight.shape[0] >= shape.positions for weight in others)
