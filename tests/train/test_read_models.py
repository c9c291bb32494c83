"""Models without a table, read from their code in transformers, equal one process of plain transformers in fp64 to 1e-12."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import read_types
import torch
from engines import run_engine
from exact import EXACT, WRONG, Plain, Trained, cases
from layouts import JOB, layout, run_whole, start
from planting import wrapped
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_division, read_shape
from hpc_mp.layout.models import FAMILIES, family_of, reading
from hpc_mp.layout.models.shape import config_of
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.data import bpe
from hpc_mp.train.model import attention_table, transformers_stage
from hpc_mp.train.parallel.projection import TensorAxis

TYPES = asset_table("env/model-types.toml")
EXACTLY: list[str] = TYPES["verified"]
REFUSED: dict[str, str] = TYPES["refused"]
LAYOUTS = {"pp2": layout(1, 2, microbatches=3), "zero3": layout(data=2, zero=3), "tp2": layout(2), "tp3": layout(3),
           "tp2 pp2": layout(2, 2, microbatches=3), "sequence": layout(2, sequence="true"), "ep2": layout(data=2, expert=2),
           "sp2 ep2": layout(2, 1, 2, sequence="true", expert=2), "cp2": layout(context=2)}
QUICK = {("mistral", "tp2 pp2"), ("gpt-sw3", "pp2"), ("deepseek_v2", "zero3"), ("gemma3_text", "sequence"), ("gpt_oss", "tp2"),
         ("llama4_text", "pp2"), ("qwen2_moe", "sp2 ep2"), ("bloom", "pp2")}
OTHERS = {"sequence": "parallel.sequence = true", "ep2": "has no experts",  # what a type may refuse
          "sp2 ep2": "has no experts|parallel.sequence = true", "cp2": "parallel.context = 2"}

Job = Callable[..., JobSpec]  # (type, *overrides)


@pytest.fixture(scope="module")
def job(place: Path) -> Job:
    def write(kind: str, *overrides: str) -> JobSpec:
        config = read_types.tiny(kind)
        assert (refusal := read_types.read(config)) is None, refusal
        return load_job(read_types.write_job(place, config, JOB), overrides)

    return write


@pytest.mark.parametrize(("kind", "name"), cases([(kind, name) for kind in EXACTLY for name in LAYOUTS], QUICK))
def test_a_type_equals_one_process(trained: Trained, plain: Plain, job: Job, kind: str, name: str) -> None:
    spec = job(kind, *LAYOUTS[name])
    try:
        check_division(spec, read_shape(spec))
    except HpcMpError as refusal:
        assert re.search(OTHERS[name], str(refusal)) and (kind, name) not in QUICK
        return
    assert trained(spec).distance(plain(job(kind))) < EXACT


@pytest.mark.parametrize("kind", cases(REFUSED, ("phimoe",)))
def test_what_cannot_be_divided_is_refused(kind: str) -> None:
    refusal = read_types.read(read_types.tiny(kind))
    assert isinstance(refusal, HpcMpError) and refusal.rule.startswith(REFUSED[kind].removesuffix("…"))


def test_every_type_has_a_verdict() -> None:
    assert {*read_types.TYPES, *FAMILIES} == {*EXACTLY, *REFUSED, *FAMILIES}


CONTROLS = {
    "a factor of logits": ("cohere", (), wrapped(reading, "sheet_of", lambda right: lambda config: replace(
        right(config), head_scale=1.0))),
    "sinks": ("gpt_oss", (), lambda: attention_table.AttentionInterface.register(
        attention_table.FUSED, lambda *tensors, s_aux, **more: attention_table._fused(*tensors, **more))),
    "chunks": ("llama4_text", (), wrapped(transformers_stage, "in_chunks", lambda right: (
        lambda documents, begins, chunk, *more: right(documents, begins, chunk + 1, *more)))),
    "the sum of a router's gradients": ("qwen2_moe", LAYOUTS["tp2"], wrapped(
        TensorAxis, "enter", lambda right: lambda axis, x: x if x.shape[-1] == 2 else right(axis, x))),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_what_is_forgotten_is_seen(plain: Plain, job: Job, what: str) -> None:
    kind, keys, forget = CONTROLS[what]
    spec = job(kind, *keys)
    assert run_engine(spec, before=forget).distance(plain(job(kind))) > WRONG


@pytest.mark.parametrize(("kind", "keys", "reason"), [
    ("gpt_oss", layout(context=2), "its attention has sinks"),
    ("bloom", layout(2, sequence="true"), "by an attention of its own code"),
    ("jamba", ['data.documents="separate"'], "which would mix documents"),
    ("bloom", ["train.dropout=0.1"], "by an attention of its own"),
    ("biogpt", ["train.dropout=0.1"], "by bernoulli"),
])
def test_a_layout_that_would_be_wrong_is_refused(job: Job, kind: str, keys: list[str], reason: str) -> None:
    spec = job(kind, *keys)
    with pytest.raises(HpcMpError, match=reason):
        check_division(spec, read_shape(spec))


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("laguna", marks=pytest.mark.prove),
                                  pytest.param("ernie4_5_moe", marks=pytest.mark.prove)])
def test_what_is_never_trained_is_read_and_exported(plain: Plain, job: Job, place: Path, tmp_path: Path, kind: str) -> None:
    """A checkpoint that plain transformers has saved, with weights that no update changes: buffers, or frozen parameters."""
    directory = place / f"saved {kind}"

    def save() -> None:
        torch.manual_seed(1)
        values = read_types.tiny(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).double()
        for name, kept in (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in name:
                torch.nn.init.normal_(kept)
        model.save_pretrained(directory)

    if not directory.exists():
        run_ranks(1, save)
        made = bpe.train([place / "text.jsonl"], ["text"], vocabulary=read_types.VOCABULARY, cache=tmp_path / "cache")
        shutil.copy(made / "tokenizer.json", directory)
    assert read_types.read(config_of(directory)) is None
    path = place / f"saved-{kind}.toml"
    path.write_text(JOB.replace("config = {{ {model} }}", 'pretrained = "{model}"').format(model=directory))
    spec = load_job(path, LAYOUTS["tp2 pp2"])
    expected, run = plain(spec), start(spec)
    assert run_whole(spec, run=run).distance(expected) < EXACT
    shape = read_shape(spec)
    kept = [weight.name for weight in family_of(shape).all_weights(shape) if not weight.trained]
    export(run, tmp_path / "model")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "model"))
    assert kept and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name].double()) for name in before if "correction_bias" in name)
