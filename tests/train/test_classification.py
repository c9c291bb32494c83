"""Rows with a class: from their files to samples, and from a launched run to an export that plain transformers computes with."""

import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from exact import EXACT, cases
from layouts import MASKED, layout, run_whole, start, trained_run
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerBase,
)

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.launch import _conclude, _loss_words
from hpc_mp.cli.main import cli
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_pretrained, read_shape
from hpc_mp.launch.listener import Teller
from hpc_mp.launch.sweep import _words
from hpc_mp.layout.models import family_of
from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.history import complete
from hpc_mp.rundir.outcome import Outcome, figures
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.checkpoint.export_adapters import export_adapters
from hpc_mp.train.data import IGNORE, LabelledRows, held_out_samples, prepare_held_out, prepare_job, training_samples
from hpc_mp.train.data.sampler import permuted
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.rank.first_values import own_values

Row = Mapping[str, Any]
LENGTH, NAMES = 12, ("bad", "fair", "good")
WORDS = ("a", "film", "of", "great", "charm", "and", "wit", "that", "is", "bad", "dull", "long", "slow", "good", "kind", "was")
LLAMA = ('model_type = "llama", num_hidden_layers = 2, hidden_size = 32, num_attention_heads = 4, intermediate_size = 64, '
         'vocab_size = 307, max_position_embeddings = 32, pad_token_id = 0')
BERT = MASKED["bert"].replace("pad_token_id = 3", "pad_token_id = 0")
KINDS = {"llama": LLAMA, "bert": BERT, "roberta": MASKED["roberta"],  # whose positions leave [SEP] out
         "modernbert": MASKED["modernbert"] + ', classifier_pooling = "mean"'}
JOB = """
[job]
device = "cpu"
[model]
config = {{ {model} }}
[data]
files = ["rows.jsonl"]
sequence_length = {length}
tokenizer = "words"
text = ["text"]
label = "kind"
labels = ["bad", "fair", "good"]
[train]
objective = "classification"
steps = 3
global_batch = 8
precision = "fp64"
learning_rate = 1e-2
eps = 1e-2
[evaluate]
share = 0.3
"""


def rows(number: int = 60) -> list[dict[str, str]]:
    generator = np.random.default_rng(1)

    def text() -> str:
        return " ".join(generator.choice(WORDS, generator.integers(1, 18)))

    return [{"text": text(), "other": text(), "kind": NAMES[place % 3]} for place in range(number)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that writes [CLS] and [SEP], and rows in files of every kind."""
    place = tmp_path_factory.mktemp("rows")
    (place / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(place / "vocab.txt")).save_pretrained(place / "words")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows()), place / "rows.parquet")
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (place / name).open("w", newline="") as file:
            table = csv.DictWriter(file, ["text", "other", "kind"], delimiter=delimiter)
            table.writeheader()
            table.writerows(rows())
    return place


def job(folder: Path, model: str = LLAMA, *overrides: str) -> JobSpec:
    path = folder / "job.toml"
    path.write_text(JOB.format(model=model, length=LENGTH))
    return load_job(path, overrides)


def encoded(folder: Path, *columns: Sequence[str]) -> Any:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "words")
    return tokenizer(*map(list, columns), truncation=True, max_length=LENGTH, padding="max_length", return_tensors="np")


def in_order(spec: JobSpec, first: bool, folder: Path) -> LabelledRows:
    return LabelledRows(prepare_job(spec, 307, folder / "cache", lambda done, total: None), LENGTH, first)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet"])
@pytest.mark.parametrize("pair", [False, True])
def test_samples_are_those_of_transformers(folder: Path, name: str, pair: bool, caplog: pytest.LogCaptureFixture) -> None:
    keys = ["text", "other"] if pair else ["text"]
    spec = job(folder, LLAMA, f'data.files=["{name}"]', f"data.text={json.dumps(keys)}", "evaluate.share=0.0")
    expected = encoded(folder, *([row[key] for row in rows()] for key in keys))
    samples = in_order(spec, False, folder)
    ids, labels, types = samples.batch(range(len(samples)))
    assert len(samples) == 60 and (ids == expected["input_ids"]).all() and (types == expected["token_type_ids"]).all()
    ends = expected["attention_mask"].sum(1) - 1
    assert (labels[range(60), ends] == [number % 3 for number in range(60)]).all() and (labels != IGNORE).sum() == 60
    tokenizer = AutoTokenizer.from_pretrained(folder / "words")
    longer = sum(len(tokenizer(*(row[key] for key in keys))["input_ids"]) > LENGTH for row in rows())
    assert f"{longer} of 60 rows for classification have more tokens" in caplog.text and longer > 5


def test_the_first_token_stands_for_a_row_that_sees_no_padding(folder: Path) -> None:
    samples = in_order(job(folder, BERT, "evaluate.share=0.0"), True, folder)
    _, labels, _ = samples.batch(range(60))
    mask = encoded(folder, [row["text"] for row in rows()])["attention_mask"]
    documents = samples.documents(range(60))
    assert (labels[:, 0] != IGNORE).all() and documents is not None and (documents == [(0, size) for size in mask.sum(1)]).all()
    assert (samples.batch(range(60, 62))[1] == IGNORE).all() and [*samples.documents([60])[0]] == [0, LENGTH]


def test_rows_are_held_out_or_trained_on_each_once_in_an_epoch(folder: Path) -> None:
    spec = job(folder, LLAMA)
    tokens = prepare_job(spec, 307, folder / "cache", lambda done, total: None)
    held_out = prepare_held_out(spec, 307, folder / "cache", lambda done, total: None, tokens)
    assert held_out is not None and tokens.rows + held_out.rows == 60 and 5 < held_out.rows < 40
    samples = training_samples(spec, read_shape(spec), tokens)
    assert len(samples) == tokens.rows and len(held_out_samples(spec, read_shape(spec), held_out)) == held_out.rows
    size = len(samples)
    epochs = [[samples.first_token(position) for position in range(begin, begin + size)] for begin in (0, size)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(size)] and epochs[0] != epochs[1]
    assert epochs[1] == [permuted(place, size, seed=spec.train.seed, epoch=1) for place in range(size)], "as runs began"
    assert samples.label_count(range(size, size + 7)) == 7


REFUSED = {
    "an unknown class": ('{"text": "a", "kind": "odd"}', "which is none of the classes bad, fair, good"),
    "a number beyond": ('{"text": "a", "kind": 3}', "its kind is 3"),
    "no text": ('{"body": "a", "kind": 1}', "its text is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_without_its_class_is_refused(folder: Path, name: str) -> None:
    line, rule = REFUSED[name]
    (folder / "wrong.jsonl").write_text('{"text": "a", "kind": 1}\n' + line + "\n")
    with pytest.raises(HpcMpError, match=rule):
        in_order(job(folder, LLAMA, 'data.files=["wrong.jsonl"]'), False, folder)


def held_out_of(spec: JobSpec, run: RunDirectory, folder: Path) -> list[Row]:
    """Return the rows that a run has held out, found by their tokens."""
    training = prepare_job(spec, 307, run.cache, lambda done, total: None)
    tokens = prepare_held_out(spec, 307, run.cache, lambda done, total: None, training)
    assert tokens is not None
    ids, *_ = LabelledRows(tokens, LENGTH, False).batch(range(tokens.rows))
    every = encoded(folder, [row["text"] for row in rows()])["input_ids"]
    return [row for row, own in zip(rows(), every, strict=True) if (ids == own).all(1).any()]


def accuracy_and_loss(model: Any, tokenizer: Path, held_out: Sequence[Row]) -> tuple[float, float]:
    """Compute held-out rows by plain transformers."""
    batch = AutoTokenizer.from_pretrained(tokenizer)(
        [row["text"] for row in held_out], truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    labels = torch.tensor([NAMES.index(row["kind"]) for row in held_out])
    with torch.no_grad(), StaysDouble():
        output = model.double().eval()(**batch, labels=labels)
    return float((output.logits.argmax(1) == labels).double().mean()), float(output.loss)


@pytest.mark.parametrize(("model", "overrides"), cases([
    ("llama", tuple(layout(2, 2, microbatches=2))), ("bert", tuple(layout(2, 1, 2, zero=3, sequence="true"))),
    ("llama", ("lora.rank=2",)), ("bert", ("lora.rank=2", *layout(2))), ("roberta", tuple(layout(2, 2, microbatches=2))),
    ("modernbert", tuple(layout(2, 1, 2, zero=3, sequence="true")))], {("llama", ("lora.rank=2",))}))
def test_an_export_computes_the_evaluation_of_its_run(folder: Path, model: str, overrides: tuple[str, ...]) -> None:
    spec = job(folder, KINDS[model], *overrides)
    run = start(spec)
    run_whole(spec, run=run)
    target = folder / f"{model} {' '.join(overrides)[:20].replace('/', ' ')}"
    export(run, target, force=True)
    config = AutoConfig.from_pretrained(target)
    assert config.architectures[0].endswith("ForSequenceClassification") and config.id2label == dict(enumerate(NAMES))
    with StaysDouble():
        exported = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float64)
    line, held_out = [*read_lines(run.evaluations)][-1], held_out_of(spec, run, folder)
    accuracy, loss = accuracy_and_loss(exported, target, held_out)
    assert line["label_tokens"] == len(held_out) and abs(line["loss"] - loss) < EXACT and abs(line["accuracy"] - accuracy) < EXACT


@pytest.mark.prove
def test_the_best_checkpoint_is_that_of_the_highest_accuracy(folder: Path) -> None:
    """A run ends by it too, and wherever an evaluation is in words, its accuracy is."""
    keys = ("train.steps=9", "train.learning_rate=0.03", "checkpoint.every=1", "checkpoint.keep=1", "evaluate.every=1")
    spec = job(folder, LLAMA, 'evaluate.best="accuracy"', *keys, "evaluate.patience=3")
    run = trained_run(spec)
    lines = read_lines(run.evaluations)
    best = max(lines, key=lambda line: line["accuracy"])
    assert len(lines) < 9 and lines[-1]["step"] - best["step"] == 3 and best["loss"] > min(line["loss"] for line in lines)
    assert "no higher accuracy on the held-out text for 3 evaluations: the run ends" in run.main_log.read_text()
    assert [step_of(path) for path in complete_steps(run.checkpoints)] == [best["step"], lines[-1]["step"]]
    assert complete(run, spec) and not complete(run, job(folder, LLAMA, *keys, "evaluate.patience=9"))
    outcome, said = Outcome(run.path, "completed", **figures(run, 1)), list[str]()
    _conclude(outcome, "", Teller(said.append))
    newest, highest = (f"loss {line['loss']:.4f}, accuracy {line['accuracy']:.4f}" for line in (lines[-1], best))
    assert any(text.startswith(f"held out  {newest}") for text in said)
    shown = CliRunner().invoke(cli, ["status", str(run.path)]).output
    assert f"best      {run.checkpoint(best['step'])}, held out {highest}" in shown and f": {newest}" in shown
    for text in (_words(outcome), _loss_words(outcome), shown, run.main_log.read_text(), *said):
        assert "accuracy" in text or "held out" not in text
        assert "perplexity" not in text


def begun(folder: Path, name: str, labels: Sequence[str] = NAMES, *overrides: str, model: str = "llama") -> JobSpec:
    """Return a job that begins with a checkpoint: ``plain`` of a language model, or ``told`` of a classifier."""
    config, place = AutoConfig.for_model(**tomllib.loads(f"config = {{ {KINDS[model]} }}")["config"]), f"{model} {name}"
    if not (folder / place).exists():
        config.id2label = {0: "good", 1: "fair", 2: "bad"} if name == "told" else config.id2label
        plain = AutoModelForCausalLM if model == "llama" else AutoModelForMaskedLM
        kind = AutoModelForSequenceClassification if name == "told" else plain
        kind.from_config(config).save_pretrained(folder / place)
    path = folder / "begun.toml"
    path.write_text(JOB.format(model=LLAMA, length=LENGTH).replace(f"config = {{ {LLAMA} }}", f'pretrained = "{place}"'))
    return load_job(path, [f"data.labels={json.dumps(labels)}", *overrides])


ENCODERS = {"bert": (["bert.pooler.dense", "classifier"], 0.2), "roberta": (["classifier.dense", "classifier.out_proj"], 0.2),
            "modernbert": (["classifier"], 32**-0.5)}  # layers that a model of masked tokens lacks, and their deviation


@pytest.mark.parametrize("model", cases(ENCODERS, ("roberta",)))
def test_an_encoder_of_masked_tokens_gets_a_head_and_one_with_a_head_is_read(folder: Path, model: str) -> None:
    plain, told = begun(folder, "plain", model=model), begun(folder, "told", NAMES[::-1], model=model)
    layers, deviation = ENCODERS[model]
    lacking = sorted(f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight"))
    assert check_pretrained(plain) == lacking and check_pretrained(told) == []
    shape = read_shape(told)
    for spec, without in ((plain, lacking), (told, [])):
        values, held = own_values(spec, shape), AutoModelForSequenceClassification.from_pretrained(
            str(spec.model.pretrained), num_labels=3).state_dict()
        for weight in family_of(shape).all_weights(shape):
            own = values(weight, tuple(slice(0, size) for size in weight.shape))
            if weight.name not in without:
                assert own.reshape(held[weight.name].shape).equal(held[weight.name]), weight.name
            elif weight.name.endswith("weight"):
                assert 0.8 < float(own.std()) / deviation < 1.2 and 0.8 < float(held[weight.name].std()) / deviation < 1.2
            else:
                assert not own.any()


def test_a_checkpoint_without_a_head_gets_one_and_a_head_is_read(folder: Path) -> None:
    assert check_pretrained(begun(folder, "plain")) == ["score.weight"]
    told, shape = begun(folder, "told", NAMES[::-1]), read_shape(begun(folder, "told", NAMES[::-1]))
    weight, box = family_of(shape).head_weights(shape)[0], (slice(0, 3), slice(0, 32))
    stored = load_file(folder / "llama told" / "model.safetensors")["score.weight"]
    assert check_pretrained(told) == [] and own_values(told, shape)(weight, box).equal(stored)
    new = own_values(begun(folder, "plain"), shape)(weight, box)
    assert 0.01 < float(new.std()) < 0.03, "as transformers initializes it"
    with pytest.raises(HpcMpError, match="is not the order of the head"):
        check_pretrained(begun(folder, "told"))
    with pytest.raises(HpcMpError, match=r"has the shape \(3, 32\), but .* requires \(2, 32\)\. Name as many classes"):
        check_pretrained(begun(folder, "told", NAMES[:2]))


@pytest.mark.prove
@pytest.mark.parametrize("model", KINDS)
def test_adapters_with_a_new_head_are_those_of_peft(folder: Path, model: str) -> None:
    spec = begun(folder, "plain", NAMES, "lora.rank=2", *layout(2), model=model)
    run = start(spec)
    run_whole(spec, run=run)
    assert "begin with initial values" in run.main_log.read_text()
    export_adapters(run, folder / "adapters", force=True)
    with StaysDouble():
        base = AutoModelForSequenceClassification.from_pretrained(folder / f"{model} plain", num_labels=3, dtype=torch.float64)
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapters")
    line = [*read_lines(run.evaluations)][-1]
    accuracy, loss = accuracy_and_loss(adapted, folder / "words", held_out_of(spec, run, folder))
    assert abs(line["loss"] - loss) < EXACT and abs(line["accuracy"] - accuracy) < EXACT
    again = begun(folder, "plain", NAMES, f'lora.pretrained="{folder / "adapters"}"', "train.learning_rate=0.0", model=model)
    second = start(again)
    assert abs(run_whole(again, run=second).evaluations[-1][1] - loss) < EXACT, "they are read again"
