"""What a launch says of the text before it trains on it, and how many steps an epoch is."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from launching import write_job
from safetensors.numpy import save_file

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job import load_job
from hpc_mp.job.epochs import steps_of, with_steps
from hpc_mp.launch import training_text
from hpc_mp.launch.launch import LaunchRequest, launched_text, preview
from hpc_mp.launch.listener import Listener, Teller
from hpc_mp.launch.training_text import counted_steps, report_text, text_rows
from hpc_mp.layout.models import FAMILIES
from hpc_mp.train.data import Samples, tokens
from hpc_mp.train.data.bpe import train

ROWS = [{"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(200)]
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12,
         "vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": False}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, nodes=1, ranks=2)


@pytest.fixture
def rows(job: Path) -> Path:
    """Prompts with their completions."""
    path = job.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def tokenizer(rows: Path) -> Path:
    return train([rows], ["rows"], vocabulary=300, cache=rows.parent / "made")


@pytest.fixture
def pretrained(job: Path) -> Path:
    """A checkpoint of a small Llama, without a tokenizer."""
    directory, family = job.parent / "pretrained", FAMILIES["llama"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    save_file({weight.name: np.zeros(weight.shape, np.float32) for weight in family.all_weights(family.read(LLAMA))},
              directory / "model.safetensors")
    job.write_text(job.read_text().replace("config = {", f'pretrained = "{directory}"\n# config = {{'))
    return directory


def dry_run(job: Path, *overrides: str) -> dict[str, Any]:
    words = [word for override in overrides for word in ("--set", override)]
    done = CliRunner().invoke(cli, ["launch", str(job), "--on", "local", "--dry-run", "--json", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    said = " ".join(done.stderr.split())
    return {**json.loads(done.stdout)["data"], "said": said}


# --- refused ---------------------------------------------------------------------------------------------------------

def test_a_checkpoint_without_its_tokenizer_does_not_get_a_new_one(job: Path, pretrained: Path, tokenizer: Path) -> None:
    with pytest.raises(HpcMpError, match=f"model.pretrained = {pretrained}: holds no tokenizer.*Set data.tokenizer"):
        dry_run(job)
    shown = dry_run(job, f"data.tokenizer={tokenizer}")
    assert shown["tokenizer"] == str(tokenizer)
    assert f"tokenizer {tokenizer} (data.tokenizer)" in shown["said"]
    (tokenizer / "tokenizer.json").rename(pretrained / "tokenizer.json")
    assert f"tokenizer {pretrained} (of the checkpoint)" in dry_run(job)["said"]
    file = pretrained / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<more>"})
    file.write_text(json.dumps(content))
    with pytest.raises(HpcMpError, match="largest id 300 needs a vocabulary of 301, but the model's is 300"):
        dry_run(job)


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_chats_without_a_template(job: Path, tokenizer: Path) -> None:
    """Refused before the start, also where a tokenizer is trained; then the first row is shown as it is trained."""
    (job.parent / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 200)
    files = "data.files=['chats.jsonl']"
    for named, words in ((f"data.tokenizer={tokenizer}", f"tokenizer {tokenizer}"),
                         ("job.name=x", "the tokenizer that is trained")):
        with pytest.raises(HpcMpError, match=f"{words}.* has no chat template") as caught:
            dry_run(job, files, named)
        assert "data.template" in caught.value.remedy
    (job.parent / "template.jinja").write_text(TEMPLATE)
    shown = dry_run(job, files, f"data.tokenizer={tokenizer}", "data.template=template.jinja")
    row = r"first row prompt “user: Hi”, completion “Hello” in \S+chats.jsonl: (\d+) tokens, of which 6 count"
    assert re.search(row, shown["said"])
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    assert dry_run(job, files, f"data.tokenizer={tokenizer}")["first_row_counted"] == shown["first_row_counted"] == 6


def test_mixtures_are_shown(job: Path, rows: Path) -> None:
    said = dry_run(job, "data.files=['text.txt', 'rows.jsonl']", "data.weights=[3, 1]")["said"]
    assert f"mixture 75.0 % of the samples of {job.parent}/text.txt, 25.0 % of {rows}" in said
    assert "mixture 7" not in dry_run(job)["said"]
    with pytest.raises(HpcMpError, match="has two weights"):
        dry_run(job, "data.files=['text.txt', '*.txt']", "data.weights=[3, 1]")


def test_a_held_out_share_is_shown(job: Path, rows: Path) -> None:
    said = dry_run(job, f"data.files=['{rows}']", "evaluate.share=0.2")["said"]
    assert "held out 20.0 % of the rows and text files" in said


def test_rows_of_another_shape_are_refused_at_launch(job: Path, rows: Path) -> None:
    files = 'evaluate.files=["*.jsonl"]'
    assert dry_run(job, files)
    (rows.parent / "z.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(HpcMpError, match=f"evaluate.files: {rows.parent}/z.jsonl, line 1: is not a row .it has no turn"):
        dry_run(job, files)


def test_files_of_which_nothing_can_be_trained_are_refused_at_launch(job: Path) -> None:
    (job.parent / "text.txt").write_text("x" * 31)
    with pytest.raises(HpcMpError, match=r"data\.sequence_length = 32: is more than the text has: 1 file with 31 bytes"):
        dry_run(job)


def test_the_text_of_every_element_of_an_array_is_looked_at(job: Path) -> None:
    (job.parent / "other.jsonl").write_text('{"instruction": "x", "output": "y"}\n')
    plan = preview(LaunchRequest(job, "local"), Listener()).plans[0]
    other = plan.spec.model_copy(update={"data": plan.spec.data.model_copy(update={"files": (f"{job.parent}/other.jsonl",)})})
    assert launched_text((plan, plan)).rows == launched_text((plan,)).rows
    with pytest.raises(HpcMpError, match="an instruction with its output"):
        launched_text((plan, replace(plan, spec=other)))


def test_held_out_files_that_are_trained_on_are_named(job: Path, rows: Path) -> None:
    for given, words in (("text.txt", "1 of 1 file in evaluate.files.*is no held-out loss"), ("rows.jsonl", "^$")):
        spec = load_job(job, [f'evaluate.files=["{given}"]'])
        assert re.search(words, text_rows(report_text(spec, 512), spec).get("warning", ""))


# --- shown -----------------------------------------------------------------------------------------------------------

def test_the_first_row_is_shown_as_it_is_trained(job: Path, rows: Path, tokenizer: Path) -> None:
    overrides = ('data.files=["rows.jsonl"]', f"data.tokenizer={tokenizer}")
    shown = dry_run(job, *overrides)
    made = tokens.prepare_job(load_job(job, overrides), 512, rows.parent / "runs" / ".cache", lambda done, total: None)
    first = int(made.documents()[1])
    loss = made.loss()
    assert loss is not None
    assert (shown["first_row_tokens"], shown["first_row_counted"]) == (first, int(loss[:first].sum()))
    assert 0 < shown["first_row_counted"] < first
    assert (f"prompt “What is 0 + 0?”, completion “It is 0.” in {rows}: {first} tokens, of which "
            f"{shown['first_row_counted']} count in the loss") in shown["said"]
    assert "text 1 file of rows, " in shown["said"]
    assert "all documents end to end, cut there" in shown["said"] and "tokens see earlier documents" in shown["said"]
    assert "tokens see their own document alone" in dry_run(job, *overrides, 'data.documents="separate"')["said"]
    assert not shown["exact"] and abs(shown["tokens"] / made.count - 1) < 0.02 and "estimated from bytes" in shown["said"]
    counted = dry_run(job, *overrides)
    assert counted["exact"] and counted["tokens"] == made.count and "estimated" not in counted["said"]
    samples = len(Samples(made, 32, 0))
    assert (counted["samples"], counted["steps"]) == (samples, -(-samples // 8))
    assert f"{made.count:,} tokens = {samples} samples = {-(-samples // 8)} steps of 8; train.steps = 5 is" in counted["said"]
    rows.write_text(rows.read_text() + rows.read_text())
    assert not dry_run(job, *overrides)["exact"], "another text is not there yet"


def test_a_text_whose_tokenizer_comes_later(job: Path) -> None:
    shown = dry_run(job)
    assert "trained on these files" in shown["said"] and shown["first_row_tokens"] is None
    assert "“some text some text" in shown["said"] and "1 file of plain text, one document each" in shown["said"]
    epochs = preview(LaunchRequest(job, "local", ("train.epochs=2",)), Listener())
    assert epochs.plans[0].spec.train.steps == steps_of(2, epochs.text.amount.samples, 8), "an estimate"
    assert not (job.parent / "runs").exists(), "a dry run writes nothing"


# --- epochs ----------------------------------------------------------------------------------------------------------

def test_steps_of_epochs() -> None:
    for epochs, samples, batch, steps in ((1, 80, 8, 10), (1, 81, 8, 11), (2, 81, 8, 21), (0.5, 80, 8, 5), (1.1, 10, 1, 11),
                                          (0.01, 10, 8, 1), (3, 0, 8, 1)):
        assert steps_of(epochs, samples, batch) == steps


def test_epochs_are_counted_in_tokens(job: Path) -> None:
    given, said = load_job(job, ["train.epochs=3"]), []
    counted = counted_steps(given, Teller(said.append))
    samples = (tokens.find_prepared(given, 512, job.parent / "runs" / ".cache").count - 1) // 32  # type: ignore[union-attr]
    assert counted.train.epochs is None and counted.train.steps == -(-3 * samples // 8)
    assert len(said) == 1 and "train.epochs = 3: 1 kB are tokenized" in said[0]
    assert counted_steps(given, Teller(said.append)) == counted and len(said) == 1, "they are there already"
    assert counted_steps(load_job(job), Listener()) == load_job(job), "steps stay"


def test_epochs_without_tokenizers_or_with_a_longer_warm_up_are_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_text, "find_spec", lambda name: None)
    with pytest.raises(HpcMpError, match=r"train\.epochs = 2: needs the tokens of the text.*Set train.steps to epochs"):
        counted_steps(load_job(job, ["train.epochs=2"]), Listener())
    given = load_job(job, ["train.epochs=1", "train.warmup_steps=50"])
    with pytest.raises(HpcMpError, match=r"warmup_steps = 50: is more than train\.steps = 4"):
        with_steps(given, 32)


@pytest.mark.parametrize(("steps", "saved", "evaluated", "way"), [
    (100, 7, 20, "let evaluate.every divide checkpoint.every"), (100, 20, 20, ""), (100, 40, 20, ""), (100, 20, 40, ""),
    (8, 20, 20, "; set both"), (8, 40, 20, "; set both"), (8, 20, 40, "; let evaluate")])
def test_checkpoints_that_can_never_be_the_best_are_noted(job: Path, steps: int, saved: int, evaluated: int, way: str) -> None:
    """With what would mend that."""
    (job.parent / "held-out.txt").write_text("held out " * 2000)
    spec = load_job(job, [f"train.steps={steps}", f"checkpoint.every={saved}", f"evaluate.every={evaluated}",
                          'evaluate.files=["held-out.txt"]'])
    note = text_rows(report_text(spec, 512), spec).get("note", "")
    assert way in note and ("let evaluate.every divide checkpoint.every" in note or steps == 8) == bool(way)
