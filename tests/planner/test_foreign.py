"""Configurations of other frameworks, and the jobs that are made of them."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job, resolve
from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.layout import check_division, check_job, layout_of, read_shape
from hpc_mp.job.values import toml_value
from hpc_mp.layout.layout import Layout
from hpc_mp.planner.foreign import Foreign, layout_settings, read_foreign
from hpc_mp.planner.foreign_plan import changes_to
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.question import Question

FOLDER = Path(__file__).with_name("foreign")
FILES: dict[str, dict[str, Any]] = table(__file__, "foreign.toml", "files")
MODELS: dict[str, dict[str, Any]] = table(__file__, "foreign.toml", "models")
KINDS = ("taken", "counted as ", "not known", "no effect on memory or speed")
files = pytest.mark.parametrize("name", FILES)


def written(tmp_path: Path, text: str | bytes, name: str = "configuration.json") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def layout(spec: JobSpec) -> Layout:
    shape = read_shape(spec)
    check_job(spec, shape)
    return layout_of(spec, shape)


def foreign_layout(tmp_path: Path, row: Mapping[str, Any], foreign: Foreign) -> Layout:
    """Load a job file with nothing but its model and a length, and the settings as overrides."""
    model = MODELS[row["model"]]
    stated = foreign.settings | row.get("given", {})
    settings = layout_settings(foreign._replace(settings=stated), row["ranks"], 8, model["num_hidden_layers"]) | {
        "job.nodes": row["ranks"] // min(8, row["ranks"]), "job.ranks_per_node": min(8, row["ranks"])}
    job = (f"[model]\nconfig = {toml_value(model)}\n[data]\nfiles = ['x']\nsequence_length = 2048\n"
           "[train]\nsteps = 1\nglobal_batch = 1")
    return layout(load_job(written(tmp_path, job, "job.toml"), [f"{key}={toml_value(item)}" for key, item in settings.items()]))


def own_layout(row: Mapping[str, Any], tmp_path: Path) -> Layout:
    own, local = row["own"], min(8, row["ranks"])
    return layout(resolve({
        "job": {"nodes": row["ranks"] // local, "ranks_per_node": local}, "model": {"config": MODELS[row["model"]]},
        "data": {"files": ["x"], **own["data"]}, "parallel": {"order": "PDT", **own["parallel"]},
        "train": {"steps": 1, **own["train"]}}, tmp_path))


def test_every_file_of_the_folder_has_a_row() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES.keys() and len(FILES) == 20


@files
def test_the_layout_is_that_of_the_same_job_written_here(tmp_path: Path, name: str) -> None:
    row, foreign = FILES[name], read_foreign(FOLDER / name)
    assert foreign.framework == row["framework"]
    own = own_layout(row, tmp_path)
    assert foreign_layout(tmp_path, row, foreign) == own
    before, after = row["changed"]
    text = (FOLDER / name).read_text()
    assert text.count(before) == 1
    assert foreign_layout(tmp_path, row, read_foreign(written(tmp_path, text.replace(before, after), name))) != own


@files
def test_every_key_is_answered(name: str) -> None:
    row, answers = FILES[name], read_foreign(FOLDER / name).answers
    kinds = {answer.key: answer.kind for answer in answers}
    assert len(answers) == len(kinds) == row["keys"] and all(kind.startswith(KINDS) for kind in kinds.values())
    for kind, stated in zip(KINDS, ("taken", "counted", "unknown"), strict=False):
        assert {key for key, answer in kinds.items() if answer.startswith(kind)} == {*row.get(stated, ())}, kind
    assert all(answer.ours for answer in answers if answer.kind == "taken")


CHOICES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4), "pipeline": (1, 2, 4), "context": (1, 2), "expert": (1, 2), "zero": (0, 1, 2, 3),
    "sequence": (False, True), "microbatches": (1, 2, 4, 8), "recompute": ("none", "selective", "full"), "virtual_stages": (2, 4),
    "offload": ("none", ("optimizer",), ("optimizer", "parameters"))}
# fsdp = hybrid_shard says the groups of shards too; a script without a global batch says it by its microbatches
UNSAID = {("trainer_fsdp.json", "zero"), ("megatron_fsdp.sh", "microbatches")}


def asked(tmp_path: Path, name: str, ranks: int, given: Mapping[str, Any]) -> tuple[Foreign, Question, Question]:
    """Return a configuration, its question without it, and with its settings."""
    row, local = FILES[name], min(8, ranks)
    length = {"data.sequence_length": row["own"]["data"]["sequence_length"], "train.precision": "bf16"}
    foreign = read_foreign(FOLDER / name, {**given, **length})
    job, model = {"nodes": ranks // local, "ranks_per_node": local}, {"config": MODELS[row["model"]]}
    spec = resolve({"job": job, "model": model, "data": {"files": ["x"], "sequence_length": 1},
                    "train": {"steps": 1, "global_batch": ranks}}, tmp_path)
    base = Question(spec, read_shape(spec), machine_named("H100"))
    return foreign, base, base.having(**layout_settings(foreign, ranks, local, base.shape.layers))


@files
def test_all_that_a_form_says_can_be_said(tmp_path: Path, name: str) -> None:
    """Each value of each key leads to changes of the file with which it is read as that job; a wrong table would find none."""
    foreign, base, own = asked(tmp_path, name, FILES[name]["ranks"], FILES[name].get("given", {}))
    assert list(changes_to(foreign, base, own.spec, own.spec)) == [{}]
    said = set()
    for key, ways in foreign.form["says"].items():
        for value in CHOICES.get(key, ()):
            word = " ".join(value) if isinstance(value, tuple) else str(value).lower()
            also = {"virtual_stages": ("parallel.schedule", "interleaved_1f1b"), "zero": ("parallel.offload", "none")}
            job = own.having(**{f"parallel.{key}": value, **dict([also[key]] if key in also else [])}).spec
            words = job.parallel.model_dump() | {"uneven": base.shape.layers % job.stages > 0, "uneven_heads": False}
            refused = any(all(words[axis] is least if isinstance(least, bool) else words[axis] >= least
                              for axis, least in each.items()) for each in foreign.form["refused"])
            if not {"*", word} & ways.keys() or refused or (key == "virtual_stages" and job.parallel.pipeline == 1):
                continue
            with suppress(HpcMpError):
                check_arithmetic(job)
                check_division(job, base.shape)
                assert list(changes_to(foreign, base, own.spec, job)) or (name, key) in UNSAID, (key, value)
                said.add(key)
    assert said >= {"microbatches", "zero"} and len(said) > (len(foreign.form["says"]) - 1) // 2


def test_uneven_heads_and_stages_are_not_proposed(tmp_path: Path) -> None:
    """Two tensor ranks share out eight heads, three do not; 80 layers are four stages, but not three."""
    foreign, base, own = asked(tmp_path, "automodel_3d.yaml", 48, {"train.global_batch": 96})
    for tensor, pipeline, microbatches, count in ((2, 4, 16, 1), (3, 4, 12, 0), (4, 3, 12, 0)):
        job = own.having(**{"parallel.tensor": tensor, "parallel.pipeline": pipeline, "parallel.virtual_stages": 5,
                            "parallel.microbatches": microbatches}).spec
        assert len(list(changes_to(foreign, base, own.spec, job))) == count


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_json_is_read_however_it_is_laid_out(tmp_path: Path, name: str) -> None:
    tree = json.loads((FOLDER / name).read_text())
    plain = read_foreign(FOLDER / name)
    for layout_of_text in ({"separators": (",", ":")}, {"indent": "\t"}):
        again = read_foreign(written(tmp_path, json.dumps(tree, **layout_of_text), name))
        assert (again.settings, [answer.kind for answer in again.answers]) == (
            plain.settings, [answer.kind for answer in plain.answers])


def test_an_unknown_key_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    for name, old, new, key in (
            ("ds_zero1.json", '"bf16"', '"zero_optimisation": {"stage": 3}, "bf16"', "zero_optimisation.stage"),
            ("gpt3_175b.sh", "--fp16", "--fp16 --tensor-parallel-size 4", "--tensor-parallel-size"),
            ("nemo2.yaml", "trainer:", "trainer:\n  tensor_model_paralel_size: 4", "trainer.tensor_model_paralel_size")):
        before, text = read_foreign(FOLDER / name), (FOLDER / name).read_text().replace(old, new, 1)
        after = read_foreign(written(tmp_path, text, name))
        assert [answer.key for answer in after.answers if answer.kind == "not known" and answer not in before.answers] == [key]
        assert after._replace(answers=()) == before._replace(answers=())


def test_variables_conditions_and_comments_of_a_script(tmp_path: Path) -> None:
    script = """
TP=2
GBS=$(($TP*4*8))
if [ "$BIG" = 1 ]; then
    TP=8
fi
ARGS=(--num-layers ${LAYERS:-${DEPTH:-12}} # --bf16
      --seq-length=512)
python tools/prepare.py --seq-length 9
torchrun pretrain_gpt.py "${ARGS[@]}" --micro-batch-size 4 --global-batch-size ${BATCH-$GBS} --fp16 $MORE {degree} \\
    2>&1 | tee --append log
"""
    foreign = read_foreign(written(tmp_path, script.replace("{degree}", ""), "run.sh"))
    assert {answer.key: (answer.value, answer.kind) for answer in foreign.answers} == {
        "--num-layers": ("12", "counted as the model of --model"), "--seq-length": ("512", "taken"),
        "--micro-batch-size": ("4", "taken"), "--global-batch-size": ("64", "taken"), "--fp16": ("$MORE", "taken")}
    for degree in ("$TP", "$UNSET"):  # set in a condition, and nowhere
        with pytest.raises(HpcMpError, match="must be a whole number"):
            read_foreign(written(tmp_path, script.replace("{degree}", f"--tensor-model-parallel-size {degree}"), "run.sh"))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.json", '{"train_batch_size": ', "is damaged"), ("a.json", "[1, 2]", "is damaged"),
    ("a.yaml", "distributed: &a {tp_size: *b}", "is damaged"), ("a.yml", "a: !!int ''", "is damaged"),
    ("a.yaml", "distributed: &a\n  tp_size: *a", "is damaged"), ("a.yaml", "learning: 1", "no keys of DeepSpeed"),
    ("a.sh", "echo hello", "no keys of DeepSpeed"), ("a.sh", b"\xff\x00", "no keys of DeepSpeed"),
    ("a.json", '{"train_batch_size": "many"}', "train_batch_size = many: must be a whole number"),
    ("a.json", '{"train_batch_size": 1.5}', "must be a whole number"), ("a.json", '{"train_batch_size": [1, 2]}', "whole number"),
    ("absent/a.json", None, "cannot be read")])
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    with pytest.raises(HpcMpError, match=message):
        read_foreign(tmp_path / name if text is None else written(tmp_path, text, name))


@pytest.mark.parametrize(("name", "ranks", "message"), [
    ("automodel_3d.yaml", 24, r"ranks = 24: is not data\(1\) × tensor\(4\) × pipeline\(4\) × context\(1\) = 16"),
    ("gpt3_175b.sh", 32, r"ranks = 32: is not data\(1\) × tensor\(8\)"),
    ("automodel_hsdp.yaml", 24, r"the global batch = 32: is not data\(12\)"),
    ("ds_zero1.json", 48, r"the global batch = 256: is not data\(48\) × microbatches\(1\) × microbatch size\(4\) = 192"),
    ("accelerate_fsdp.yaml", 16, "states no batch size")])
def test_what_does_not_divide_is_refused(name: str, ranks: int, message: str) -> None:
    with pytest.raises(HpcMpError, match=message):
        layout_settings(read_foreign(FOLDER / name), ranks, 8, 32)


KEYS = sorted({answer.key for name in FILES for answer in read_foreign(FOLDER / name).answers})
words = st.text(max_size=8) | st.sampled_from(["auto", "full", "8"])
values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | words, lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=4)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), values, max_size=6), st.integers(1, 64))
def test_any_table_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, pairs: dict[str, Any], ranks: int) -> None:
    read_or_refuse(written(tmp_path_factory.getbasetemp(), json.dumps(pairs), "any.json"), ranks)


@given(st.text() | st.lists(st.sampled_from(
    ["A=", "${A}", "$A", "(", ")", '"', "'", "\\\n", "\n", " ", "#", "--bf16", "--tensor-model-parallel-size", "2", "a.py ",
     "if x", "fi", "$(", "`", "export A=1", "A+=", "|"])).map("".join), st.sampled_from([".sh", ".yaml", ".json"]))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str) -> None:
    read_or_refuse(written(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"), f"any{suffix}"), 8)


def read_or_refuse(path: Path, ranks: int) -> None:
    try:
        foreign = read_foreign(path)
        assert all(answer.kind.startswith(KINDS) for answer in foreign.answers)
        layout_settings(foreign, ranks, 8, 32)
    except HpcMpError as error:
        assert error.value and error.rule and error.remedy
