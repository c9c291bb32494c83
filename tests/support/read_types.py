"""Tiny configurations of the causal language models of the installed transformers that have no table."""

import json
import tomllib
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import FAMILIES
from hpc_mp.layout.models.reading import keep, place_of
from hpc_mp.train.model.reader import read_model

TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
LONGEST = 150  # of a reason that is kept
LAYERS, VOCABULARY, POSITIONS, WINDOW = 4, 307, 64, 7
SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "n_layer": LAYERS,
    "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": WINDOW, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "word_embed_proj_dim": 32,
    "ffn_dim": 48, "rotary_dim": 4, "shared_expert_intermediate_size": 16, "moe_layer_start_index": 1, "ffn_hidden_size": 48,
    "attention_chunk_size": WINDOW, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_intermediate_size": 16, "dense_intermediate_size": 48}
# What other types name otherwise, and the layers of those that mix tokens in several ways.
MIXED = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "num_layers": LAYERS},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {"layer_types": MIXED, "linear_head_dim": 8, "linear_num_heads": 4},
    "granite_swa": {"layer_rope_theta": [10000.0, 100.0] * 2}, "granitemoe_swa": {"layer_rope_theta": [10000.0, 100.0] * 2}}


def tiny(model_type: str) -> dict[str, Any]:
    """Return a configuration of few small layers, with the other values of the type's defaults, but without dropout."""
    kind = CONFIG_MAPPING[model_type]
    try:
        default = kind().to_dict()
    except Exception:  # transformers refuses its own default
        return {"model_type": model_type}
    known = {*default, *kind.attribute_map}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "qk_rope_head_dim" in known:
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    sizes |= {key: 0.0 for key, value in default.items() if ("dropout" in key or "pdrop" in key) and isinstance(value, float)}
    try:
        kind(**sizes)
    except Exception:
        sizes.pop("head_dim", None)
    return {"model_type": model_type, **sizes, **OWN.get(model_type, {})}


def read(config: dict[str, Any]) -> HpcMpError | None:
    """Read a model's code in this process, unless that has been done before. Return the reason why it is refused."""
    if not place_of(config).exists():
        try:
            keep(config, read_model(config))
        except HpcMpError as refusal:
            return refusal
    return None


def inline(config: dict[str, Any]) -> str:
    """Return the keys of a configuration as those of a table of TOML in one line."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())


def write_job(directory: Path, config: dict[str, Any], form: str) -> Path:
    path = directory / f"{config['model_type']}.toml"
    path.write_text(form.format(model=inline(config)))
    return path


def main() -> None:
    """Write the reasons of all types that are refused."""
    path = asset("env/model-types.toml")
    text = path.read_text()
    verified = tomllib.loads(text)["verified"]
    reasons = {kind: refusal.rule for kind in TYPES if kind not in {*verified, *FAMILIES} and (refusal := read(tiny(kind)))}
    lines = [f"{json.dumps(kind)} = {json.dumps(shortened(reason))}" for kind, reason in sorted(reasons.items())]
    path.write_text(text[:text.index("[refused]")] + "\n".join(["[refused]", *lines, ""]))


def shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"


if __name__ == "__main__":
    main()
