"""The known fields of a Hugging Face configuration and their allowed values, as a table.

transformers silently accepts any field, and code shared by many models reads fields that no family declares (``is_causal``). So
every family names the fields that its reader or its modules read, and the values that the engine supports. Fields without effect
on training are named here. A field without an entry is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean, shown


@dataclass(frozen=True, slots=True)
class ConfigField:
    """The allowed values of one field.

    Attributes:
        holds: returns True for an allowed value; null is a value too.
        rule, remedy: the text of the error for other values.
        in_job: True if the job file may set it. Names of older releases are only in a checkpoint's config.json.
    """

    holds: Callable[[Any], bool] = lambda value: True
    rule: str = ""
    remedy: str = ""
    in_job: bool = True


Fields = dict[str, ConfigField]


def only(*values: Any, rule: str = "is not supported yet", remedy: str = "leave it out") -> ConfigField:
    """Return a field that the engine supports only with these values."""
    return ConfigField(lambda value: value in values, rule, remedy)


def number(rule: str, holds: Callable[[float], bool]) -> ConfigField:
    """Return a field with a finite number; null if transformers has a default."""
    return ConfigField(lambda value: value is None or (is_number(value) and holds(value)), f"must be {rule}", "change that value")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


# Checked by their readers: the family's reader of sizes, transformers' own validation, or the check of the weights.
READ = ConfigField()
OLDER = ConfigField(in_job=False)
DROPOUT = number("a number from 0 to less than 1", lambda value: 0 <= value < 1)
POSITIVE = number("a number above 0", lambda value: value > 0)
EPSILON = number("a number of at least 0", lambda value: value >= 0)

# The activations of transformers that have no parameters.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu",
    "sqrtsoftplus", "swish", "tanh",
)
ACTIVATION = ConfigField(lambda value: value in ACTIVATIONS, "is not a supported activation",
                         f"choose one of {', '.join(ACTIVATIONS)}")

# Without effect on training, and kept in the configuration of an exported model. Formats of numbers are
# train.precision; outputs and caches are for other uses of the model, ids of tokens for text generation.
CARRIED = frozenset((
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
))
# Fields that older releases of transformers wrote in addition, and that are no longer read, including generation settings.
LEFT_OVER = frozenset((
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels", "bad_words_ids", "begin_suppress_tokens",
    "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "is_decoder", "length_penalty", "max_length", "min_length", "n_ctx", "name_or_path", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_past", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
    "unk_token_id", "use_bfloat16",
))
ATTENTION = only(None, "sdpa", rule="would have no effect: the engine chooses how attention is computed", remedy="leave it out")

COMMON: Fields = {
    **dict.fromkeys(CARRIED, READ),
    **dict.fromkeys(LEFT_OVER | {"quantization_config"}, OLDER),
    **dict.fromkeys(("model_type", "tie_word_embeddings"), READ),
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "is_causal": only(True, remedy="leave it out, or set it to true: a token sees only the earlier ones"),
    "is_encoder_decoder": only(False),
    "add_cross_attention": only(False),
    "cross_attention_hidden_size": only(None),
    "tie_encoder_decoder": only(False),
    "pruned_heads": only(None, {}),
}
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings", "initializer_range")


def check_fields(config: Mapping[str, Any], table: Mapping[str, ConfigField], model_type: str, checkpoint: str | None) -> None:
    """Check that every field of a configuration is known and allowed. Raises HpcMpError for a field without an entry, or a value
    that its entry does not allow.

    Args:
        config: the result of ``read_config``.
        table: the family's table.
        checkpoint: the directory that it comes from; None: the job file.
    """
    for key, value in config.items():
        entry = table.get(key)
        if checkpoint is None and (entry is None or not entry.in_job):
            keys = [name for name, field in table.items() if field.in_job and not name.startswith("_")]
            raise HpcMpError(f"model.config.{key}", f"is not a key of a {model_type} configuration",
                             did_you_mean(key, keys, f"the keys are {', '.join(sorted(keys))}", likeness=0.5))
        if entry is None and value is not None:
            raise HpcMpError(f"model.pretrained = {checkpoint}: its config.json has {key} = {shown(value)}",
                             f"is an unknown field of a {model_type} model: it may change what the model computes",
                             "remove it from config.json if it does not")
        if entry is not None and not entry.holds(value):
            raise HpcMpError(f"the model's {key} = {shown(value)}", entry.rule, entry.remedy)
