"""Mistakes that people make in job files and commands: each is answered at launch with the value, the rule and the remedy, before
anything is written, started or submitted."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import hpc_mp.cli.main
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.backends.backend import Launch
from hpc_mp.launch.model_check import check_model

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 128}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}
GOOD: dict[str, dict[str, Any]] = {
    "job": {"name": "m", "nodes": 2, "ranks_per_node": 2, "device": "cpu"},
    "model": {"config": GPT2},
    "data": {"files": ["text.txt"], "sequence_length": 64},
    "parallel": {"tensor": 2, "pipeline": 2, "microbatches": 2},
    "train": {"steps": 4, "global_batch": 8},
}
TEXT = "\n".join(f"Line {number} of a text that is long enough for a few steps." for number in range(4000))

# name: (keys of the job file, whole tables, None: left out; what the answer says). Directories that a value names hold what
# FILES says. Those of tests/job/mistakes.py are answered by the same command.
Row = tuple[dict[str, Any], str]
KEYS: dict[str, Row] = {
    "steps as text": ({"train.steps": "100"}, r"train.steps = '100': must be a whole number. Write it without quotes"),
    "steps with a point": ({"train.steps": 1e3}, r"train.steps = 1000.0: must be a whole number"),
    "one file without brackets": ({"data.files": "text.txt"}, r"must be a list. Write it in brackets"),
    "a directory of files": ({"data.files": ["corpus"]}, r"corpus: is a directory. Name the files in it"),
    "a sequence of nothing": ({"data.sequence_length": 0}, r"sequence_length = 0: must be at least 1"),
    "a hidden size that heads do not share": ({"model.config.n_embd": 66}, r"n_embd\(66\) / n_head\(4\): must be a whole"),
    "more model ranks than ranks": ({"parallel.tensor": 8}, r"tensor\(8\) × pipeline\(2\).* does not divide 4 ranks"),
    "ZeRO in words": ({"parallel.zero": "stage2"}, r"zero = 'stage2': must be a whole number. Write zero = 2"),
    "experts of a model without": ({"train.router_balance": 0.1}, r"gpt2 has no experts, and so no router. Leave it out"),
    "a rate as text": ({"train.learning_rate": "1e-3"}, r"learning_rate = '1e-3': must be a number. Write it without quotes"),
    "a rate that is no number": ({"train.learning_rate": float("nan")}, r"learning_rate = nan: must be finite"),
    "a rate's schedule misspelt": ({"train.lr_schedule": "cosin"}, r"lr_schedule = 'cosin': must be 'constant', 'linear'"),
    "another optimizer": ({"train.optimizer": "adam"}, r"optimizer = 'adam': must be 'adamw' or 'sgd'"),
    "a negative clip": ({"train.clip": -1.0}, r"clip = -1.0: must be at least 0"),
    "no checkpoint kept": ({"checkpoint.keep": 0}, r"checkpoint.keep = 0: must be at least 1"),
    "held-out text that is not there": ({"evaluate.files": ["held.txt"]}, r"evaluate.files: .*held.txt: matches no file"),
    "nodes as a yes": ({"job.nodes": True}, r"job.nodes = true: must be a whole number"),
    "another architecture": ({"model.config.model_type": "bert"}, r"'bert': is not one of gpt2, llama"),
    "an architecture like another": ({"model.config.model_type": "mistral"}, r"is not one of [^.]*\. Use a model"),
    "an architecture of a later release": ({"model.config.model_type": "qwen3"}, r"is not one of [^.]*\. Use a model"),
    "an architecture of another kind": ({"model.config.model_type": "llama4"}, r"is not one of [^.]*\. Use a model"),
    "no vocabulary": ({"model.config.vocab_size": 0}, r"vocab_size = 0: must be a whole number from 1"),
    "a value that transformers refuses": ({"model.config.dtype": "float31"}, r"is refused by transformers .*float31"),
    "a negative rotary base": ({"model.config": LLAMA | {"rope_theta": -1.0}}, r"rope_theta = -1.0: must be a number above 0"),
    "an epsilon as text": ({"model.config": LLAMA | {"rms_norm_eps": "1e-6"}}, r"rms_norm_eps = '1e-6': must be a number"),
    "heads that cannot turn": ({"model.config": LLAMA | {"head_dim": 15}}, r"heads of 15 elements: cannot be rotated .*even"),
    "a model of the hub": ({"model": {"pretrained": "meta-llama/Llama-3-8B"}}, r"\(models are never downloaded\)"),
    "no model": ({"model": None}, r"model: is required. Add \[model\]"),
    "an empty checkpoint": ({"model": {"pretrained": "corpus"}}, r"its config.json cannot be read .*save_pretrained"),
    "a checkpoint without weights": ({"model": {"pretrained": "ck"}}, r"holds no \*.safetensors file. Save it again"),
    "half a config": ({"model": {"pretrained": "half"}}, r"its config.json is not JSON .*Use a directory written by"),
    "weights that git has not fetched": ({"model": {"pretrained": "pointer"}}, r"is an incomplete copy .*Copy or download"),
    "a tokenizer that is not there": ({"data.tokenizer": "corpus"}, r"with a tokenizer\. .*holds tokenizer\.json"),
    "a variable that is a number": ({"environment": {"set": {"A": 5}}}, r"set.A = 5: must be text. Write it in quotes"),
    "a table of another tool": ({"optimizer": {"name": "adamw"}},
                                r"optimizer: is not a key of a job file. Move it: optimizer belongs to"),
    "a key misspelt": ({"train.learning_rat": 1.0}, r"learning_rat = 1.0: is not a key .*Did you mean 'learning_rate'"),
    "documents of another tool": ({"data.documents": "packed"}, r"documents = 'packed': must be 'joined' or 'separate'"),
    "negative retries": ({"slurm.retries": -1}, r"slurm.retries = -1: must be at least 0"),
}
# file name, its text; what the answer says
JOB_FILES: dict[str, tuple[str, str, str]] = {
    "a bracket forgotten": ("job.toml", "[job\nname =", r"is not valid TOML \(.*line 1.*\). Correct that line"),
    "a table twice": ("job.toml", "[job]\n[job]\n", r"is not valid TOML .*twice"),
    "nothing": ("job.toml", "", r"model: is required. .*`hpc-mp init` writes a whole job file"),
    "JSON": ("job.json", '{"job": {}}', r"is not valid TOML .*A job file is TOML; `hpc-mp init` writes one"),
    "YAML": ("job.yaml", "job:\n  name: x\n", r"is not valid TOML .*A job file is TOML"),
    "a job script": ("job.sbatch", "#!/bin/bash\nsrun python train.py\n", r"is TOML; .*`hpc-mp lint` checks job scripts"),
    "a program": ("train.py", "import torch\n", r"is not valid TOML .*with the model and the data in it"),
}
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a job file that is not there": (("launch", "jop.toml"), r"job file jop.toml: cannot be read .*Name a job file"),
    "a directory": (("launch", "."), r"job file \.: cannot be read \(Is a directory\). Name a job file"),
    "an override without a value": (("launch", "job.toml", "--set", "train.steps"), r"must have the form SECTION.KEY=VALUE"),
    "an override misspelt": (("launch", "job.toml", "--set", "train.stepz=4"), r"train.stepz = 4: is not a key .*mean 'steps'"),
    "an override of a table": (("launch", "job.toml", "--set", "train=4"), r"train = 4: must be a table. Write its keys below"),
    "an override in words": (("launch", "job.toml", "--set", "train.steps=many"), r"'many': must be a whole number"),
    "a back end misspelt": (("launch", "job.toml", "--on", "slrm"), r"'slrm' is not one of 'auto', 'slurm', 'local', 'mpi'"),
    "nothing to go on with": (("launch", "job.toml", "--on", "local", "--resume"), r"there is no run in .*Launch it without"),
    "a run that is not there": (("report", "runs/m"), r"does not exist.*Pass DIRECTORY"),
    "a job file that is there": (("init", "job.toml"), r"job.toml: exists. Pass another name, or --force"),
    "a verb of others: resume": (("resume", "job.toml"), r"Did you mean 'hpc-mp launch JOB.toml --resume'\?"),
    "a verb of others: submit": (("submit", "job.toml"), r"Did you mean 'hpc-mp launch JOB.toml'\?"),
    "a verb of others: dry-run": (("dry-run", "job.toml"), r"Did you mean 'hpc-mp launch JOB.toml --dry-run'\?"),
    "a verb of others: kill": (("kill", "job.toml"), r"Did you mean 'hpc-mp cancel RUN'\?"),
    "a verb misspelt": (("lanch", "job.toml"), r"No such command 'lanch'. Did you mean 'launch'\?"),
    "a verb that there is not": (("qsub", "job.toml"), r"No such command 'qsub'. 'hpc-mp --help' lists them"),
}
FILES = {"corpus/a.txt": TEXT, "ck/config.json": json.dumps(GPT2), "half/config.json": "{",
         "pointer/config.json": json.dumps(GPT2), "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}

Answer = Callable[..., tuple[int, str]]


class Begun(Exception):
    """A back end was asked to start the run: the mistake got through."""


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """``hpc-mp WORDS`` up to where a back end would write, start or submit: its exit code and what it says. Nothing may lie in
    the directory that did not before."""
    def start(launch: Launch) -> None:
        launch.check(check_model)
        raise Begun

    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(backend, start=start))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "text.txt").write_text(TEXT)
    write(tmp_path / "job.toml", {})

    def run(*words: str) -> tuple[int, str]:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["hpc-mp", *words])
        with pytest.raises(SystemExit) as end:
            hpc_mp.cli.main.main()
        assert sorted(tmp_path.rglob("*")) == before
        said = capfd.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


def write(file: Path, changes: dict[str, Any]) -> None:
    """A job file that is right but for these keys; None: left out."""
    job = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = job
        for name in tables:
            table = table.setdefault(name, {})
        if value is None:
            del table[last]
        else:
            table[last] = value
    file.write_text(tomli_w.dumps(job))


def test_there_are_sixty_and_the_right_job_would_begin(answer: Answer) -> None:
    assert len(KEYS) + len(JOB_FILES) + len(COMMANDS) >= 60
    with pytest.raises(Begun):
        answer("launch", "job.toml", "--on", "local")


@pytest.mark.parametrize("name", [*KEYS, *JOB_FILES, *COMMANDS])
def test_a_mistake(name: str, answer: Answer, tmp_path: Path) -> None:
    given: tuple[str, ...] = ("launch", "job.toml", "--on", "local")
    if name in KEYS:
        changes, words = KEYS[name]
        write(tmp_path / "job.toml", changes)
    elif name in JOB_FILES:
        file, text, words = JOB_FILES[name]
        (tmp_path / file).write_text(text)
        given = ("launch", file, "--on", "local")
    else:
        given, words = COMMANDS[name]
    code, said = answer(*given)
    assert code == 2 and re.search(words, " ".join(said.split())), said
