"""Which fields of a configuration are taken: all of transformers' own, and none that nobody accounts for."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import FAMILIES
from hpc_mp.layout.models.fields import ACTIVATIONS, CARRIED
from hpc_mp.layout.models.rotary import NEEDED
from hpc_mp.layout.stages import layer_costs

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
SIZES = {"data": {"files": ["a.txt"], "sequence_length": 8}, "train": {"steps": 1, "global_batch": 1}}


def from_job(config: dict[str, Any]) -> None:
    read_shape(JobSpec.model_validate({"model": {"config": config}, **SIZES}))


def from_checkpoint(directory: Path, config: dict[str, Any]) -> None:
    save_file({}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    read_shape(JobSpec.model_validate({"model": {"pretrained": str(directory)}, **SIZES}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_transformers_has_an_entry(model_type: str) -> None:
    """A release of transformers with another field fails here, before a model that sets it is trained as another."""
    kind = CONFIG_MAPPING[model_type]
    table = FAMILIES[model_type].fields
    assert {field.name for field in fields(kind)} | set(kind.attribute_map) <= table.keys()
    assert {field.name for field in fields(PreTrainedConfig)} - {"is_encoder_decoder"} <= CARRIED


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes_is_taken(model_type: str, tmp_path: Path) -> None:
    from_job({"model_type": model_type})
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    from_checkpoint(tmp_path, json.loads((tmp_path / "config.json").read_text()))


def test_the_tables_of_names_are_those_of_transformers() -> None:
    learned = {"prelu", "xielu"}  # they have parameters, which no table of weights has
    assert set(ACTIVATIONS) == set(ACT2FN) - learned
    assert set(NEEDED) == {"default", *ROPE_INIT_FUNCTIONS} - {"proportional"}


FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FIELDS["wrong"])
@pytest.mark.parametrize("where", ["job", "checkpoint"])
def test_what_cannot_be_computed_is_refused(name: str, where: str, tmp_path: Path) -> None:
    more, words = FIELDS["wrong"][name]
    with pytest.raises(HpcMpError, match=words):
        from_job(LLAMA | more) if where == "job" else from_checkpoint(tmp_path, LLAMA | more)


@pytest.mark.parametrize("name", FIELDS["right"])
def test_what_can_be_computed_is_taken(name: str, tmp_path: Path) -> None:
    from_job(LLAMA | FIELDS["right"][name])
    from_checkpoint(tmp_path, LLAMA | FIELDS["right"][name])


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0}, "dynamic": {"factor": 2.0}, "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": 8}], ids=["heads by default", "heads of 8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral"])
def test_scaled_positions_are_taken_where_transformers_computes_them(model_type: str, kind: str,
                                                                     head_dim: dict[str, int]) -> None:
    """Mixtral's configuration has no size of a head by default, and some kinds compute with null then."""
    config = LLAMA | head_dim | {"model_type": model_type, "num_hidden_layers": 1, "num_key_value_heads": 4,
                                 "rope_parameters": KINDS[kind] | {"rope_type": kind, "rope_theta": 5e5}}
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    except (TypeError, StrictDataclassClassValidationError):
        with pytest.raises(HpcMpError, match=f"head_dim: is required for rope_type = '{kind}'.*[sS]et head_dim = 8"):
            from_job(config)
    else:
        from_job(config)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_positions_of_a_part_of_each_head_are_taken(kind: str) -> None:
    """Half of a GPT-NeoX's heads of 16 elements turns, so that lists of 4 numbers belong to its pairs."""
    settings = KINDS[kind] | {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 64,
              "rope_parameters": settings}
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **config))
    from_job(config | {"model_type": "gpt_neox"})
    if kind == "longrope":
        with pytest.raises(HpcMpError, match="must be a list of 8 numbers"):
            from_job(config | {"model_type": "gpt_neox", "rope_parameters": settings | {"partial_rotary_factor": 1.0}})


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe", "mixtral"])
def test_no_number_of_key_value_heads_is_refused_where_transformers_refuses_it(model_type: str) -> None:
    with pytest.raises(HpcMpError, match="num_key_value_heads = null: must be a whole number"):
        from_job(LLAMA | {"model_type": model_type, "num_key_value_heads": None})


@pytest.mark.parametrize("key", ["n_ctx", "_name_or_path", "quantization_config", "temperature", "attribute_map", "_auto_class"])
def test_names_of_older_releases_and_internals_are_no_keys_of_a_job(key: str, tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=rf"model\.config\.{key}: is not a key of a llama configuration") as refused:
        from_job(LLAMA | {key: 1})
    assert not {"attribute_map", "_auto_class", "_name_or_path", "n_ctx"} & set(str(refused.value.remedy).split(", "))
    if key in ("attribute_map", "_auto_class"):
        with pytest.raises(HpcMpError, match=rf"config\.json has {key} = 1: is an unknown field of a llama model"):
            from_checkpoint(tmp_path, LLAMA | {key: 1})
    else:
        from_checkpoint(tmp_path, LLAMA | {key: 1})


def test_layers_of_qwen2_with_a_window_are_refused() -> None:
    from_job({"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "sliding_window": 8})
    with pytest.raises(HpcMpError, match=r"layer_types = .*: is not supported yet"):
        from_job({"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]})


GPTJ = {"model_type": "gptj", "n_embd": 32, "n_head": 4, "rotary_dim": 4, "vocab_size": 64}


@pytest.mark.parametrize("value", [None, 0, 3, 10, 64])
def test_positions_of_gptj_turn_an_even_number_of_elements_of_a_head(value: int | None, tmp_path: Path) -> None:
    """transformers fails on each of these, some of them at the first token."""
    from_job(GPTJ | {"rotary_dim": 8})
    with pytest.raises(HpcMpError, match="rotary_dim"):
        from_checkpoint(tmp_path, GPTJ | {"rotary_dim": value})


def test_what_the_first_checkpoint_of_gptj_says_is_taken(tmp_path: Path) -> None:
    said = {"rotary": True, "scale_attn_weights": True, "summary_type": "cls_index", "summary_use_proj": True, "n_inner": None,
            "tokenizer_class": "GPT2Tokenizer", "gradient_checkpointing": False}
    from_checkpoint(tmp_path, GPTJ | said)
    with pytest.raises(HpcMpError, match="scale_attn_weights = false: is not supported yet"):
        from_checkpoint(tmp_path, GPTJ | said | {"scale_attn_weights": False})


def test_a_window_and_experts_change_what_a_layer_costs() -> None:
    """By hand: 64 positions, of which a token sees 8, itself among them, but for the first ones; 2 of 4 experts."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
             "num_hidden_layers": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}

    def cost(model_type: str, **more: Any) -> float:
        spec = JobSpec.model_validate({"model": {"config": {"model_type": model_type, **sizes, **more}}, **SIZES})
        return layer_costs(read_shape(spec), 64).blocks[0]

    dense = cost("llama")
    assert cost("mixtral", **experts) - dense == 2 * (3 * 32 * 48 + 32 * 4)
    seen = [token + 0.5 if token < 8 else 8 for token in range(64)]  # half of itself until the window is full, as without one
    assert cost("mixtral", **experts, sliding_window=8) - cost("mixtral", **experts) == 2 * 2 * 32 * (sum(seen) / 64 - 32)
    assert cost("mixtral", **experts, sliding_window=64) == cost("mixtral", **experts)
