"""What tensor ranks cut, share and hold alike, and what is refused; without torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, resolve
from hpc_mp.layout.flat import rank_units, stage_spans
from hpc_mp.layout.models import Family, ModelShape, TensorCut, check_layout, family_of, left_whole, read_shape

MODELS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 12, "vocab_size": 5, "n_inner": 10, "n_positions": 8},
    "llama": {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 12,
              "num_key_value_heads": 6, "intermediate_size": 10, "vocab_size": 5, "max_position_embeddings": 8, "mlp_bias": True},
}


def spec(model: str, tensor: int, **more: object) -> JobSpec:
    return resolve({"job": {"ranks_per_node": tensor}, "model": {"config": MODELS[model]},
                    "data": {"files": ["x"], "sequence_length": 8}, "parallel": {"tensor": tensor, **more},
                    "train": {"steps": 1, "global_batch": 1}}, Path("/"))


def model_of(model: str) -> tuple[Family, ModelShape]:
    return family_of(model), read_shape(spec(model, 1))


@pytest.mark.parametrize("modules", [("*",), ("*.mlp", "lm_head"), ("*.attn", "*.self_attn")])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("model", MODELS)
def test_first_replicas_hold_every_element_once(model: str, tensor: int, modules: tuple[str, ...]) -> None:
    family, shape = model_of(model)
    held: dict[str, int] = {}
    for rank in range(tensor):
        for unit in rank_units(family, shape, stage_spans([shape.layers]), TensorCut(tensor, rank, modules), 2).values():
            for slot in unit.slots:
                held[slot.weight.name] = held.get(slot.weight.name, 0) + slot.size * (slot.replica == 0)
                assert slot.copies == tensor if not slot.cut else tensor % slot.copies == 0
    assert held == {weight.name: prod(weight.shape) for weight in family.all_weights(shape)}


def test_neighbours_share_a_key_value_head() -> None:
    family, shape = model_of("llama")
    held = []
    for rank in range(12):
        units = rank_units(family, shape, stage_spans([shape.layers]), TensorCut(12, rank), 1)
        slot = next(s for s in units["model.layers.1"].slots if s.weight.name.endswith("k_proj.weight"))
        held.append((slot.box[0].start, slot.box[0].stop, slot.copies, slot.replica))
    assert held == [(rank // 2 * 2, rank // 2 * 2 + 2, 2, rank % 2) for rank in range(12)]


@pytest.mark.parametrize(("model", "tensor", "more", "said"), [
    ("llama", 4, {}, r"tensor = 4: is neither a divisor nor a multiple of the model's 6 key-value heads. Use 2"),
    ("llama", 5, {}, r"tensor = 5: does not divide the model's 12 attention heads"),
    ("llama", 2, {"tensor_modules": ["*.mlp", "*.q_proj"]}, r"with '\*.q_proj'.*model.layers.\*.self_attn, model.layers.\*.mlp"),
    ("gpt2", 2, {"tensor_modules": ["lm_head"]}, r"matches no module.*transformer.wte, transformer.h.\*.attn"),  # it is tied
    ("llama", 2, {"tensor_modules": []}, "matches no module"),
    ("llama", 6, {"sequence": True}, r"length = 8: is cut over tensor\(6\) ranks into pieces of 2, and 2 of them"),
    ("llama", 1, {"sequence": True}, "sequence = true: has no effect with parallel.tensor = 1"),
    ("llama", 1, {"tensor_modules": ["*.mlp"]}, "has no effect with parallel.tensor = 1"),
])
def test_what_cannot_be_cut_is_refused_with_the_arithmetic(model: str, tensor: int, more: dict[str, object], said: str) -> None:
    with pytest.raises(HpcMpError, match=said):
        check_layout(read_shape(spec(model, 1)), spec(model, tensor, **more))


@pytest.mark.parametrize(("model", "tensor", "more"), [
    ("llama", 12, {}), ("llama", 6, {}), ("llama", 5, {"tensor_modules": ["*.mlp"]}),
    ("llama", 4, {"sequence": True, "tensor_modules": ["lm_head"]})])
def test_what_can_be_cut_is_not(model: str, tensor: int, more: dict[str, object]) -> None:
    check_layout(read_shape(spec(model, 1)), spec(model, tensor, **more))


def test_all_that_ranks_hold_alike_is_listed_with_its_reason() -> None:
    family, shape = model_of("llama")
    assert left_whole(family, shape, TensorCut()) == ""
    assert left_whole(family, shape, TensorCut(12, 0, ("*.self_attn", "*.[02].mlp", "lm_head"))) == (
        "not among parallel.tensor_modules: model.embed_tokens, model.layers.1.mlp; "
        "a vector of hidden size: model.layers.*.input_layernorm, model.layers.*.post_attention_layernorm, model.norm; "
        "6 key-value heads, each on 2 ranks: model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj; "
        "added once, to the sum over the ranks: model.layers.0,2.mlp.down_proj.bias")
    assert "looked up by position, not by token: transformer.wpe" in left_whole(*model_of("gpt2"), TensorCut(2))
