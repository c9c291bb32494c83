"""A job file trains T5 on prompts and completions as plain transformers does, from a checkpoint of its own to an export."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from engines import run_engine
from exact import EXACT, check_state
from layouts import STACKS, prepare, run_whole, start, trained_run
from ranks import run_ranks
from stacks import Training, plain_model, values
from tokenizers import decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from torch import Tensor
from transformers import AutoTokenizer, T5ForConditionalGeneration

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.data import IGNORE, PairRows, TokenSet, load_tokens, prepare_job, rows_of, training_samples
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.own_loop.hugging_face import HuggingFace

PROMPT, LENGTH, STEPS, BATCH = 5, 9, 3, 8
JOB = f"""
[job]
name = "t5"
ranks_per_node = 8
device = "cpu"
[model]
pretrained = "checkpoint"
[data]
files = ["rows.jsonl"]
tokenizer = "tokenizer"
format = "prompt"
prompt_length = {PROMPT}
sequence_length = {LENGTH}
[parallel]
tensor = 2
pipeline = 2
microbatches = 2
zero = 3
partition = [3, 2]
[train]
steps = {STEPS}
global_batch = {BATCH}
precision = "fp64"
eps = 1e-2
learning_rate = 1e-2
clip = 0.5
dropout = 0.0
[evaluate]
files = ["held-out.jsonl"]
"""
Rows = list[dict[str, str]]


def rows(count: int, first: int) -> Rows:
    words = Path(json.__file__).read_text().split()
    return [{"prompt": " ".join(words[at:at + at % 4]), "completion": " ".join(words[at + 4:at + 5 + at % 3])}
            for at in range(first, first + count)]


def written(directory: Path, model: str) -> Path:
    """Write a checkpoint of plain transformers, rows, and a job file, which is returned."""
    run_ranks(1, lambda: plain_model(Training(model)).save_pretrained(directory / "checkpoint"))
    words = sorted({f"▁{word}" for row in rows(40, 100) + rows(5, 300) for text in row.values() for word in text.split()})
    encoder = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(["</s>", "?", *words])}, unk_token="?"))
    encoder.pre_tokenizer, encoder.decoder = Metaspace(prepend_scheme="always"), decoders.Metaspace(prepend_scheme="always")
    (directory / "tokenizer").mkdir()
    encoder.save(str(directory / "tokenizer" / "tokenizer.json"))
    (directory / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for name, given in {"rows.jsonl": rows(40, 100), "held-out.jsonl": rows(5, 300)}.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in given))
    (directory / "job.toml").write_text(JOB)
    return directory / "job.toml"


def batch(tokenizer: Any, given: Rows) -> dict[str, Tensor]:
    """Return the arguments of transformers' forward."""
    def filled(texts: list[str], filler: int) -> Tensor:
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
        return torch.tensor([row + [filler] * (max(map(len, ids)) - len(row)) for row in ids])

    ids = filled([row["prompt"] for row in given], -1)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(),
            "labels": filled([row["completion"] for row in given], IGNORE)}


def of_plain_transformers(spec: JobSpec, run: RunDirectory, exported: Path) -> tuple[list[float], float, float]:
    """Return the losses of a training by plain transformers, the largest difference between its parameters and those of the
    exported model, and this one's loss on the held-out rows."""
    torch.set_num_threads(1)
    directory = Path(spec.model.pretrained or "")
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer.read_text())
    tokens = load_tokens(run.cache / run.tokens.read_text().split()[0])
    order = training_samples(spec, read_shape(spec), tokens)
    given = [json.loads(line) for line in (directory.parent / "rows.jsonl").read_text().splitlines()]
    model = T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0)
    losses = []
    with StaysDouble():
        for step in range(STEPS):
            own = [given[order.first_token(place)] for place in range(step * BATCH, (step + 1) * BATCH)]
            loss = model(**batch(tokenizer, own)).loss
            loss.backward()
            losses.append(float(loss))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        back = T5ForConditionalGeneration.from_pretrained(exported, dtype=torch.float64)
        held_out = [json.loads(line) for line in (directory.parent / "held-out.jsonl").read_text().splitlines()]
        with torch.no_grad():
            evaluated = back(**batch(tokenizer, held_out)).loss
    state = dict(back.named_parameters())
    assert state.keys() == dict(model.named_parameters()).keys()
    return losses, max(float((state[name] - values).abs().max()) for name, values in model.named_parameters()), float(evaluated)


@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.prove) for model in STACKS])
def test_a_run_equals_plain_transformers_from_checkpoint_to_export(tmp_path: Path, model: str) -> None:
    spec = load_job(written(tmp_path, model))
    check_job(spec, read_shape(spec))
    run = trained_run(spec)
    export(run, tmp_path / "exported")
    losses, apart, evaluated = run_ranks(1, of_plain_transformers, spec, run, tmp_path / "exported")[0]
    assert max(abs(line["loss"] - loss) for line, loss in zip(read_lines(run.metrics), losses, strict=True)) < EXACT
    assert losses[0] - losses[-1] > 1e-3 and apart < EXACT
    assert abs(read_lines(run.evaluations)[0]["loss"] - evaluated) < EXACT
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (model == "t5") and config["decoder_start_token_id"] == 5


@pytest.mark.prove
def test_ranks_hold_what_the_planner_counts(tmp_path: Path) -> None:
    spec = load_job(written(tmp_path, "t5 1.1"), ["train.steps=2", "parallel.zero=1", "evaluate.files=[]"])
    check_state(spec, run_engine(spec))


@pytest.mark.prove
def test_a_run_keeps_its_prompt_length(tmp_path: Path) -> None:
    """Its own checkpoint is refused; another run may begin with it, at the first sample."""
    path = written(tmp_path, "t5")
    keys = ("job.ranks_per_node=1", "parallel.tensor=1", "parallel.pipeline=1", 'parallel.partition="auto"', "parallel.zero=0")
    run = trained_run(load_job(path, [*keys, "train.steps=1"]))
    changed = [*keys, f"data.prompt_length={PROMPT - 1}", "train.steps=2"]
    prepare(spec := load_job(path, changed), run)
    with pytest.raises(AssertionError, match=f"was trained with prompt_length = {PROMPT}, but this job has {PROMPT - 1}"):
        run_whole(spec, run=run)
    begun = start(load_job(path, [*changed, f'checkpoint.resume="{run.path}"']))
    run_whole(load_job(begun.job), run=begun)
    assert "samples begin anew" in begun.main_log.read_text()


def test_rows_are_samples(tmp_path: Path) -> None:
    """Every row once in an epoch, and behind the last one nothing that counts."""
    spec = load_job(written(tmp_path, "t5"))
    tokens = prepare_job(spec, 307, tmp_path / "cache", lambda done, total: None)
    pairs = rows_of(spec, read_shape(spec), tokens)
    assert isinstance(pairs, PairRows) and (pairs.parts, len(pairs)) == ([40], 40)
    order = training_samples(spec, read_shape(spec), tokens)
    assert sorted(map(order.first_token, range(40))) == [*range(40)] and len(order) == 40
    inputs, labels = pairs.batch(range(39, 42))
    assert (labels[1:] == IGNORE).all() and [*inputs[1]] == [0] * PROMPT + [5] + [0] * (LENGTH - PROMPT - 1)
    assert pairs.documents([39, 40]).tolist() == [[0, pairs.prompts[39]], [0, 1]]
    longest = int(pairs.prompts.max())
    with pytest.raises(HpcMpError, match=f"a prompt of {longest} tokens with its end: has more than the {longest - 1} places"):
        rows_of(spec, replace(read_shape(spec), prompt=longest - 1), tokens)
    with pytest.raises(HpcMpError, match="a prompt follows on a completion"):
        PairRows(replace(tokens, directory=reversed_loss(tokens, tmp_path / "reversed")), LENGTH, PROMPT, 5, "data.files")


def reversed_loss(tokens: TokenSet, directory: Path) -> Path:
    """Copy a token set in which prompts count and completions do not."""
    shutil.copytree(tokens.directory, directory)
    counted = tokens.loss()
    assert counted is not None
    (directory / "loss.bin").write_bytes((1 - counted).tobytes())
    return directory


REFUSED = {
    "data.prompt_length=9": "must be less than data.sequence_length(9)",
    'data.format="auto"': "the encoder sees a prompt",
    'data.documents="separate"': "each row is a sample of its own",
    'parallel.recompute="selective"': "biases are added",
    'parallel.tensor_modules=["*SelfAttention"]': "all layers share a table",
    "train.compile=true": "is not compiled",
    "lora.rank=2": "adapters are for models of one stack",
    "parallel.sequence=true": "gives each rank only some of the tokens, but of a t5 model the tokens of a sample are those of",
    'model.config={ model_type = "gpt2" }': "gpt2 has no encoder",
    "parallel.expert=2": "t5 has no experts",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_an_encoder_does_not_support_is_refused(tmp_path: Path, override: str) -> None:
    text = JOB.replace('pretrained = "checkpoint"', 'config = { model_type = "t5" }').replace("partition = [3, 2]\n", "")
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(HpcMpError, match=re.escape(REFUSED[override])):
        spec = load_job(tmp_path / "job.toml", ["train.precision=\"fp32\"", override])
        check_job(spec, read_shape(spec))


def test_a_loop_of_ones_own_is_refused() -> None:
    with pytest.raises(HpcMpError, match="has an encoder: a loop of your own has tokens of one kind"):
        HuggingFace.read({"model_type": "t5"}, None, None)


def test_first_values_have_the_deviations_of_transformers() -> None:
    model = Training("t5 1.1", {"d_model": 64, "d_ff": 96, "tie_word_embeddings": False}).model()
    source, plain = values(model), T5ForConditionalGeneration(model.config)
    for name, parameter in plain.named_parameters():
        weight = next(weight for weight in model.family.all_weights(model.shape) if weight.name == name)
        own = source(weight, tuple(slice(0, size) for size in weight.shape))
        assert own.shape == parameter.shape
        assert own.std(correction=0) == pytest.approx(parameter.std(correction=0).item(), rel=0.35)
