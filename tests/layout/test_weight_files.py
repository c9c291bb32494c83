"""Weights of a checkpoint: found where transformers finds them, and refused where they are not the model's."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import FAMILIES
from hpc_mp.layout.models.weight_files import INDEX, SINGLE, check_weights, weight_files
from hpc_mp.train.model.initial import read

Arrays = dict[str, np.ndarray]
CONFIGS: dict[str, dict[str, Any]] = table(__file__, "weight_files.toml", "configs")


def arrays(config: dict[str, Any]) -> Arrays:
    """As ``save_pretrained`` writes them: fused weights are (in, n x out), experts lie apart."""
    family = FAMILIES[config["model_type"]]
    shape = family.read(config)
    found = {}
    for weight in family.all_weights(shape):
        fused = family.model_type == "gpt2" and "c_attn" in weight.name
        sizes = (*weight.shape[:-2], weight.shape[-2] * weight.shape[-1]) if fused else weight.shape
        for at, name in weight.stored or (((), weight.name),):
            found[name] = np.zeros(sizes[len(at):], np.float32)
    return found


def check(directory: Path, config: dict[str, Any]) -> None:
    family = FAMILIES[config["model_type"]]
    check_weights(directory, config, family, family.read(config))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_plain_checkpoint_is_taken(model: str, tmp_path: Path) -> None:
    weights = arrays(CONFIGS[model])
    save_file(weights | {"transformer.h.0.attn.bias": np.zeros(1), "x.rotary_emb.inv_freq": np.zeros(1)}, tmp_path / SINGLE)
    check(tmp_path, CONFIGS[model])
    assert weight_files(tmp_path).keys() > weights.keys()


def test_experts_are_taken_apart_and_together(tmp_path: Path) -> None:
    config = CONFIGS["mixtral"]
    weights = arrays(config)
    apart = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert weights.pop(apart).shape == (12, 8)
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(HpcMpError, match=f"holds no weight named {apart}"):
        check(tmp_path, config)
    save_file(weights | {apart: np.zeros((8, 12), np.float32)}, tmp_path / SINGLE)
    with pytest.raises(HpcMpError, match=r"has the shape \(8, 12\).*requires \(12, 8\)"):
        check(tmp_path, config)
    together = {name: value for name, value in weights.items() if "block_sparse_moe" not in name}
    for layer in (0, 1):
        together |= {f"model.layers.{layer}.mlp.gate.weight": np.zeros((3, 8), np.float32),
                     f"model.layers.{layer}.mlp.experts.gate_up_proj": np.zeros((3, 24, 8), np.float32),
                     f"model.layers.{layer}.mlp.experts.down_proj": np.zeros((3, 8, 12), np.float32)}
    save_file(together, tmp_path / SINGLE)
    check(tmp_path, config)
    save_file(together | {"model.layers.0.block_sparse_moe.gate.weight": np.zeros((3, 8), np.float32)}, tmp_path / SINGLE)
    with pytest.raises(HpcMpError, match=r"holds model\.layers\.0\.block_sparse_moe\.gate\.weight, which no part of a mixtral"):
        check(tmp_path, config)


def test_a_bare_gpt2_needs_no_prefix(tmp_path: Path) -> None:
    weights = arrays(CONFIGS["gpt2"])
    save_file({name.removeprefix("transformer."): value for name, value in weights.items()}, tmp_path / SINGLE)
    check(tmp_path, CONFIGS["gpt2"])


@pytest.mark.parametrize("older", [False, True], ids=["", "norms by their older names"])
@pytest.mark.parametrize("model", ["BertForMaskedLM", "BertForPreTraining"])
def test_published_checkpoints_of_bert_are_read(model: str, older: bool, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11}
    whole = getattr(transformers, model)(transformers.BertConfig(**sizes))
    whole.save_pretrained(tmp_path)
    config, family = json.loads((tmp_path / "config.json").read_text()), FAMILIES["bert"]
    if older:
        weights = load_file(tmp_path / SINGLE)
        save_file({name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
                   for name, value in weights.items()}, tmp_path / SINGLE)
    check(tmp_path, config)
    state, source = whole.state_dict(), read(tmp_path, family)
    for weight in family.all_weights(family.read(config)):
        assert source(weight, tuple(slice(0, size) for size in weight.shape)).equal(state[weight.name]), weight.name


def test_the_single_file_goes_before_all_others(tmp_path: Path) -> None:
    weights = arrays(CONFIGS["llama"])
    for name in (SINGLE, "model_old.safetensors", "model-00001-of-00001.safetensors"):
        save_file(weights, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}))
    assert set(weight_files(tmp_path).values()) == {tmp_path / SINGLE}
    (tmp_path / SINGLE).unlink()
    assert set(weight_files(tmp_path).values()) == {tmp_path / "model-00001-of-00001.safetensors"}
    check(tmp_path, CONFIGS["llama"])
    (tmp_path / INDEX).unlink()
    with pytest.raises(HpcMpError, match=f"an incomplete copy: model-00001-of-00001.safetensors lacks {INDEX}"):
        weight_files(tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(HpcMpError, match=f"holds neither {SINGLE} nor {INDEX}"):
        weight_files(tmp_path)


PARTS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INCOMPLETE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part": (lambda path: (path / PARTS[1]).unlink(), f"of the 3 files in its .*, {PARTS[1]} is missing"),
    "all parts but one": (lambda path: [(path / name).unlink() for name in PARTS[1:]],
                          f"its .*, {PARTS[1]} and 1 more are missing"),
    "the end of a part": (lambda path: os.truncate(path / PARTS[2], (path / PARTS[2]).stat().st_size - 1),
                          f"{PARTS[2]}: is an incomplete copy .only .* of its .* bytes"),
    "most of a header": (lambda path: os.truncate(path / PARTS[0], 20), f"{PARTS[0]}: is an incomplete copy .only 12 of the"),
    "all of a part": (lambda path: os.truncate(path / PARTS[0], 0), f"{PARTS[0]}: is an incomplete copy .only 0 bytes"),
    "what a pointer of Git LFS stands for": (
        lambda path: (path / PARTS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        f"{PARTS[1]}: is an incomplete copy .a Git LFS pointer"),
}


@pytest.mark.parametrize("lost", INCOMPLETE)
def test_an_incomplete_copy_is_called_so(tmp_path: Path, lost: str) -> None:
    weights = arrays(CONFIGS["llama"])
    names = sorted(weights)
    mapping = {name: PARTS[place % 3] for place, name in enumerate(names)}
    for part in PARTS:
        save_file({name: weights[name] for name in names if mapping[name] == part}, tmp_path / part)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": mapping}))
    check(tmp_path, CONFIGS["llama"])
    spoil, words = INCOMPLETE[lost]
    spoil(tmp_path)
    with pytest.raises(HpcMpError, match=r"incomplete copy.*[Cc]opy or download") as refused:
        check(tmp_path, CONFIGS["llama"])
    assert re.search(words, str(refused.value))


FIRST = "model.layers.0.mlp.up_proj.weight"


# What is wrong: a weight, which is another one or (None) missing; further keys of the configuration; the rule.
REFUSED: dict[str, tuple[str, np.ndarray | None, dict[str, Any], str]] = {
    "a weight is missing": (FIRST, None, {}, f"holds no weight named {FIRST}"),
    "a weight of another shape": (FIRST, np.zeros((12, 9), np.float32), {}, r"has the shape \(12, 9\).*requires \(12, 8\)"),
    "whole numbers": (FIRST, np.zeros((12, 8), np.int8), {}, "is stored as I8, which is not a plain"),
    "scales beside the weights": (FIRST + "_scale_inv", np.zeros(1, np.float32), {}, "_scale_inv, which no part of a llama"),
    "two layers more": ("model.layers.2.mlp.up_proj.weight", np.zeros((12, 8), np.float32), {}, "which no part of a llama"),
    "quantized": ("a", np.zeros(1), {"quantization_config": {"quant_method": "fp8"}}, r"is quantized \(fp8\)"),
    "a tied head of its own": ("lm_head.weight", np.ones((11, 8), np.float32), {"tie_word_embeddings": True},
                               "differs from the embedding, but tie_word_embeddings is true"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_weights_are_refused(name: str, tmp_path: Path) -> None:
    weight, value, more, words = REFUSED[name]
    config = CONFIGS["llama"] | more
    weights: dict[str, np.ndarray | None] = arrays(config) | {weight: value}
    save_file({name: array for name, array in weights.items() if array is not None}, tmp_path / SINGLE)
    with pytest.raises(HpcMpError, match=words):
        check(tmp_path, config)


def test_a_tied_head_that_is_the_embedding_is_taken(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"tie_word_embeddings": True}
    weights = arrays(config)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}, tmp_path / SINGLE)
    check(tmp_path, config)


@pytest.mark.parametrize("content", [
    b"", b"abc", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (20).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(HpcMpError, match=r"is not a safetensors file|is an incomplete copy"):
        check(tmp_path, CONFIGS["llama"])


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    weights = arrays(CONFIGS["llama"])
    save_file({name: value for name, value in weights.items() if name != FIRST}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "a.safetensors")}))
    with pytest.raises(HpcMpError, match=f"a.safetensors lacks {FIRST}"):
        check(tmp_path, CONFIGS["llama"])
    (tmp_path / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(HpcMpError, match="cannot be read"):
        check(tmp_path, CONFIGS["llama"])
