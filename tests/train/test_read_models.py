"""Models without a table, read from their code in transformers, equal one process of plain transformers in fp64 to 1e-12."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import read_types
import torch
from engines import run_engine
from exact import EXACT, WRONG, Plain, Trained, cases
from layouts import JOB, layout, run_whole, start
from planting import planted, wrapped
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_division, check_pretrained, read_shape
from hpc_mp.layout import flat
from hpc_mp.layout.models import FAMILIES, family_of, reading
from hpc_mp.layout.models.shape import config_of, text_part
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.data import bpe
from hpc_mp.train.model import attention_table, build_stage, transformers_stage
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.experts import Experts
from hpc_mp.train.parallel.projection import TensorAxis

TYPES = asset_table("env/model-types.toml")
EXACTLY: list[str] = TYPES["verified"]
REFUSED: dict[str, str] = TYPES["refused"]
LAYOUTS = {"pp2": layout(1, 2, microbatches=3), "zero3": layout(data=2, zero=3), "tp2": layout(2), "tp3": layout(3),
           "tp2 pp2": layout(2, 2, microbatches=3), "sequence": layout(2, sequence="true"), "ep2": layout(data=2, expert=2),
           "sp2 ep2": layout(2, 1, 2, sequence="true", expert=2), "cp2": layout(context=2),
           "cp2 ulysses": layout(context=2, context_method='"ulysses"')}
# What "tp2 pp2" shows too, which no type refuses: these meet only the types that they meet in `make test`.
IMPLIED = ("pp2", "tp2")
QUICK = {("mistral", "tp2 pp2"), ("gpt-sw3", "pp2"), ("deepseek_v2", "zero3"), ("gemma3_text", "sequence"),
         ("llama4_text", "pp2"), ("qwen2_moe", "sp2 ep2"), ("bloom", "sequence"), ("opt", "sequence"), ("gpt_neo", "tp2 pp2"),
         ("olmo2", "tp3"), ("phi3", "tp2")}
QUICK_FORMS = {("falcon with groups", "tp3"), ("falcon with biases for distances", "sequence")}
OTHERS = {"sequence": "parallel.sequence = true", "ep2": "has no experts",  # what a type may refuse
          "sp2 ep2": "has no experts|parallel.sequence = true", "cp2": "parallel.context = 2",
          "cp2 ulysses": "parallel.context = 2"}
# Other forms of types whose projections depend on the configuration: the type, keys, and layouts.
FORMS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "falcon with groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, ("tp2", "tp3", "tp2 pp2")),
    "falcon without groups": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}, ("tp3", "sequence")),
    "falcon with biases for distances": ("falcon", {"alibi": True, "bias": True}, ("pp2", "tp3", "sequence")),
    "gpt_bigcode without groups": ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}, ("tp3",)),
    "gpt_oss with odd experts": ("gpt_oss", {"intermediate_size": 15, "num_local_experts": 5, "swiglu_limit": 0.001}, (
        "tp2", "tp2 pp2", "ep2", "sp2 ep2", "zero3")),
    "deepseek_v3 with biases": ("deepseek_v3", {"attention_bias": True}, ("tp3", "sequence")),
    "deepseek_v3 with queries of one matrix": ("deepseek_v3", {"q_lora_rank": None}, ()),
    "opt without biases": ("opt", {"enable_bias": False}, ("tp3",)),
    "phi3 without groups": ("phi3", {"num_key_value_heads": 4}, ("tp3",)),
}

Job = Callable[..., JobSpec]  # (type, *overrides)


def tiny(kind: str) -> dict[str, Any]:
    """Return the small configuration of a type, or of another form of one."""
    kind, more, _ = FORMS.get(kind, (kind, {}, ()))
    return read_types.tiny(kind) | more


@pytest.fixture(scope="module")
def job(place: Path) -> Job:
    def write(kind: str, *overrides: str) -> JobSpec:
        config = tiny(kind)
        assert (refusal := read_types.read(config)) is None, refusal
        return load_job(read_types.write_job(place, config, JOB), overrides)

    return write


@pytest.mark.parametrize(("kind", "name"), cases(
    [(kind, name) for kind in EXACTLY for name in LAYOUTS if name not in IMPLIED or (kind, name) in QUICK], QUICK))
def test_a_type_equals_one_process(trained: Trained, plain: Plain, job: Job, kind: str, name: str) -> None:
    spec = job(kind, *LAYOUTS[name])
    try:
        check_division(spec, read_shape(spec))
    except HpcMpError as refusal:
        assert re.search(OTHERS[name], str(refusal)) and (kind, name) not in QUICK
        return
    assert trained(spec).distance(plain(job(kind))) < EXACT


@pytest.mark.parametrize(("form", "name"), cases([(form, name) for form in FORMS for name in FORMS[form][2]], QUICK_FORMS))
def test_a_form_of_a_type_equals_one_process(trained: Trained, plain: Plain, job: Job, form: str, name: str) -> None:
    assert trained(job(form, *LAYOUTS[name])).distance(plain(job(form))) < EXACT


BIASED, SPREAD = "gpt_oss with odd experts", layout(2, data=2, expert=2)
AROUND_EXPERTS: dict[str, tuple[list[str], list[str]]] = {  # what changes a training, and a layout
    "losses of routers": (["train.router_balance=0.5", "train.router_z=0.05"], SPREAD),
    "capacity": (["train.expert_capacity=0.75"], [*SPREAD, "parallel.sequence=true"]),
    "split backwards": ([], layout(1, 2, 2, expert=2, microbatches=3, schedule='"zero_bubble"')),
    "once more": ([], layout(data=2, expert=2, zero=3, recompute='"full"')),
    "whole on tensor ranks": ([], [*SPREAD, "parallel.sequence=true", 'parallel.tensor_modules=["*.self_attn"]']),
    "all axes": ([], layout(2, 2, 2, expert=2, zero=3, microbatches=3)),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", AROUND_EXPERTS)
def test_experts_with_biases_equal_one_process(trained: Trained, plain: Plain, job: Job, name: str) -> None:
    training, keys = AROUND_EXPERTS[name]
    result = trained(job(BIASED, *keys, *training))
    assert result.distance(expected := plain(job(BIASED, *training))) < EXACT
    assert not training or expected.distance(plain(job(BIASED))) > WRONG, "it must change what is trained"


@pytest.mark.parametrize("kind", cases(REFUSED, ("phimoe",)))
def test_what_cannot_be_divided_is_refused(kind: str) -> None:
    refusal = read_types.read(read_types.tiny(kind))
    assert isinstance(refusal, HpcMpError) and refusal.rule.startswith(REFUSED[kind].removesuffix("…"))


def test_every_type_has_a_verdict() -> None:
    assert {*read_types.TYPES, *FAMILIES} == {*EXACTLY, *REFUSED, *FAMILIES}


@planted(Experts, "__init__")
def biases_on_each_rank(right: Any, experts: Any, *args: Any) -> None:
    right(experts, *args)
    experts.down.tensor = copy.copy(experts.down.tensor)
    experts.down.tensor.rank = 0


@planted(Experts, "__init__")
def halves_side_by_side(right: Any, experts: Any, *args: Any) -> None:
    right(experts, *args)
    gated = experts.gated
    experts.gated = lambda both: gated(both.unflatten(-1, (2, -1)).mT.flatten(-2))


CONTROLS = {
    "a factor of logits": ("cohere", (), wrapped(reading, "sheet_of", lambda right: lambda config: replace(
        right(config), head_scale=1.0))),
    "sinks": ("gpt_oss", (), lambda: attention_table.AttentionInterface.register(
        attention_table.FUSED, lambda *tensors, s_aux, **more: attention_table._fused(*tensors, **more))),
    "chunks": ("llama4_text", (), wrapped(transformers_stage, "in_chunks", lambda right: (
        lambda documents, begins, chunk, *more: right(documents, begins, chunk + 1, *more)))),
    "biases for distances": ("bloom", LAYOUTS["tp2"], wrapped(TransformersStage, "_alibi", lambda right: (
        lambda stage, hidden: right(stage, hidden).flip(0)))),
    "a rank's own heads": ("falcon", LAYOUTS["tp2"], wrapped(build_stage, "selected_heads", lambda right: (
        lambda order, own, *more: right(order, replace(own, query=range(len(own.query))), *more)))),
    "a bias that is added once": ("gpt_oss", LAYOUTS["tp2"], biases_on_each_rank),
    "columns of a gate and the other half in turn": ("gpt_oss", LAYOUTS["tp2"], halves_side_by_side),
    "a share of what all heads have in common": ("deepseek_v3", LAYOUTS["tp2"], wrapped(flat, "part_of", lambda right: (
        lambda *weight: replace(right(*weight), partial=False)))),
    "the sum of a router's gradients": ("qwen2_moe", LAYOUTS["tp2"], wrapped(
        TensorAxis, "enter", lambda right: lambda axis, x: x if x.shape[-1] == 2 else right(axis, x))),
}


@pytest.mark.parametrize("what", cases(CONTROLS, {*CONTROLS} - {
    "columns of a gate and the other half in turn", "a share of what all heads have in common"}))
def test_what_is_forgotten_is_seen(plain: Plain, job: Job, what: str) -> None:
    kind, keys, forget = CONTROLS[what]
    spec = job(kind, *keys)
    assert run_engine(spec, before=forget).distance(plain(job(kind))) > WRONG


@pytest.mark.parametrize(("kind", "keys", "reason"), [
    ("gpt_oss", layout(context=2), "its attention has sinks"),
    ("bloom", layout(context=2), "attention is computed by its own code"),
    ("jamba", ['data.documents="separate"'], "which would mix documents"),
    ("bloom", ["train.dropout=0.1"], "by an attention of its own"),
    ("biogpt", ["train.dropout=0.1"], "by bernoulli"),
])
def test_a_layout_that_would_be_wrong_is_refused(job: Job, kind: str, keys: list[str], reason: str) -> None:
    spec = job(kind, *keys)
    with pytest.raises(HpcMpError, match=reason):
        check_division(spec, read_shape(spec))


@pytest.mark.parametrize(("kind", "name"), cases(
    [("deepseek_v3 with queries of one matrix", "tp2 pp2"),
     ("deepseek_v3", "tp2 pp2"), ("laguna", "tp2 pp2"), ("ernie4_5_moe", "tp2 pp2"), ("gpt_oss", "sp2 ep2"),
     ("aria_text", "sp2 ep2")], [("deepseek_v3", "tp2 pp2"), ("gpt_oss", "sp2 ep2")]))
def test_a_checkpoint_is_read_and_exported_as_transformers_has_it(plain: Plain, job: Job, place: Path, tmp_path: Path, kind: str,
                                                                  name: str) -> None:
    """One that plain transformers has saved: some types have weights that no update changes, buffers or frozen parameters."""
    directory = place / f"saved {kind}"

    def save() -> None:
        torch.manual_seed(1)
        values = tiny(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).double()
        for name, kept in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in name:
                torch.nn.init.normal_(kept)
        model.save_pretrained(directory)

    spec = saved_job(directory, save, place, tmp_path, name)
    expected, run = plain(spec), start(spec)
    assert run_whole(spec, run=run).distance(expected) < EXACT
    shape = read_shape(spec)
    kept = [weight.name for weight in family_of(shape).all_weights(shape) if not weight.trained]
    export(run, tmp_path / "model")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "model"))
    assert bool(kept) is (name == "tp2 pp2")
    assert {key: values.shape for key, values in before.items()} == {key: values.shape for key, values in after.items()}
    same = after.keys() & expected.parameters.keys()  # others have published names
    assert same and all(float((after[key] - expected.parameters[key].view_as(after[key])).abs().max()) < EXACT for key in same)
    assert all(torch.equal(before[name], after[name].double()) for name in before if "correction_bias" in name)


def saved_job(directory: Path, save: Callable[[], None], place: Path, cache: Path, name: str = "tp2 pp2") -> JobSpec:
    """Return the job of a checkpoint, which a process saves, with a tokenizer."""
    if not directory.exists():
        run_ranks(1, save)
        made = bpe.train([place / "text.jsonl"], ["text"], vocabulary=read_types.VOCABULARY, cache=cache / "cache")
        shutil.copy(made / "tokenizer.json", directory)
    assert read_types.read(text_part(config_of(directory))) is None
    path = place / f"{directory.name}.toml"
    path.write_text(JOB.replace("config = {{ {model} }}", 'pretrained = "{model}"').format(model=directory))
    return load_job(path, LAYOUTS[name])


SEEING = {"gemma3": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                     "image_size": 28, "patch_size": 14},
          "qwen3_5": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}}


@pytest.mark.parametrize("kind", cases(SEEING, ("gemma3",)))
def test_the_language_model_of_one_that_sees_is_trained(plain: Plain, place: Path, tmp_path: Path, kind: str) -> None:
    directory = place / f"saved-{kind}"

    def save() -> None:
        torch.manual_seed(1)
        text = read_types.tiny(f"{kind}_text")
        AutoModelForImageTextToText.from_config(AutoConfig.for_model(
            kind, text_config=text, vision_config=SEEING[kind])).double().save_pretrained(directory)

    spec = saved_job(directory, save, place, tmp_path)
    expected, run = plain(spec), start(spec)
    assert run_whole(spec, run=run).distance(expected) < EXACT
    export(run, tmp_path / "model")
    assert config_of(tmp_path / "model")["model_type"] == f"{kind}_text"
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"num_hidden_layers": 1, "layer_types": config["text_config"]["layer_types"][:1]}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(HpcMpError, match=r"language_model\S*layers\.1\S* and \d+ more, which no part of a"):
        check_pretrained(spec)
