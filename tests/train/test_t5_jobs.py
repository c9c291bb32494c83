"""A job file trains T5 on prompts and completions as plain transformers does, from a checkpoint of its own to an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from exact import EXACT
from layouts import STACKS, trained_run
from ranks import run_ranks
from stacks import Training, plain_model
from tokenizers import decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from torch import Tensor
from transformers import AutoTokenizer, T5ForConditionalGeneration

from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.data import IGNORE, Samples, load_tokens, pairs_of
from hpc_mp.train.device.precision import StaysDouble

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


def written(directory: Path, model: str) -> JobSpec:
    """Write a checkpoint of plain transformers, rows, and a job file."""
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
    return load_job(directory / "job.toml")


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
    order = Samples(tokens, LENGTH, spec.train.seed, pairs=pairs_of(spec, tokens))
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
    spec = written(tmp_path, model)
    check_job(spec, read_shape(spec))
    run = trained_run(spec)
    export(run, tmp_path / "exported")
    losses, apart, evaluated = run_ranks(1, of_plain_transformers, spec, run, tmp_path / "exported")[0]
    assert max(abs(line["loss"] - loss) for line, loss in zip(read_lines(run.metrics), losses, strict=True)) < EXACT
    assert losses[0] - losses[-1] > 1e-3 and apart < EXACT
    assert abs(read_lines(run.evaluations)[0]["loss"] - evaluated) < EXACT
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (model == "t5") and config["decoder_start_token_id"] == 5
