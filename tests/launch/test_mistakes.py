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
# FILES says.
Row = tuple[dict[str, Any], str]
KEYS: dict[str, Row] = {
    "no steps": ({"train.steps": 0}, r"train.steps = 0: must be at least 1. Write steps = 1"),
    "steps as text": ({"train.steps": "100"}, r"train.steps = '100': must be a whole number. Write it without quotes"),
    "steps with a point": ({"train.steps": 1e3}, r"train.steps = 1000.0: must be a whole number"),
    "steps left out": ({"train.steps": None}, r"train: has neither steps nor epochs. Set steps"),
    "files left out": ({"data.files": None}, r"data.files: is required. Add it to \[data\]"),
    "no file": ({"data.files": []}, r"data.files = \[\]: names no file. Write for example"),
    "one file without brackets": ({"data.files": "text.txt"}, r"must be a list. Write it in brackets"),
    "a file that is not there": ({"data.files": ["txet.txt"]}, r"txet.txt: matches no file .*Check the path"),
    "a pattern that matches nothing": ({"data.files": ["corpus/*.md"]}, r"\*.md: matches no file"),
    "a directory of files": ({"data.files": ["corpus"]}, r"corpus: is a directory. Name the files in it"),
    "a sequence beyond the positions": ({"data.sequence_length": 256}, r"longer than the model's 128 positions. Use at most 128"),
    "a sequence of nothing": ({"data.sequence_length": 0}, r"sequence_length = 0: must be at least 1"),
    "more tensor ranks than heads": ({"model.config.n_head": 1}, r"does not divide the model's 1 attention heads. Use a divisor"),
    "a hidden size that heads do not share": ({"model.config.n_embd": 66}, r"n_embd\(66\) / n_head\(4\): must be a whole"),
    "more model ranks than ranks": ({"parallel.tensor": 8}, r"tensor\(8\) × pipeline\(2\).* does not divide 4 ranks"),
    "an odd tensor degree": ({"parallel.tensor": 3}, r"= 6: does not divide 4 ranks.* Choose degrees whose product divides 4"),
    "a batch that does not divide": ({"train.global_batch": 7}, r"global_batch = 7: is not a multiple of .*Use 6 or another"),
    "more microbatches than samples": ({"parallel.microbatches": 16}, r"is not a multiple of data\(1\) × microbatches\(16\)"),
    "ZeRO-4": ({"parallel.zero": 4}, r"parallel.zero = 4: must be at most 3"),
    "ZeRO in words": ({"parallel.zero": "stage2"}, r"zero = 'stage2': must be a whole number. Write zero = 2"),
    "a schedule misspelt": ({"parallel.schedule": "1fb1"}, r"'1fb1': is not a schedule. Use one of gpipe"),
    "a table that is not there": ({"parallel.schedule": "t.csv"}, r"t.csv: cannot be read .*Name a file that can be read"),
    "an order of other letters": ({"parallel.order": "DPX"}, r"order = 'DPX': must be auto, .*the letters D, P, T"),
    "virtual stages of 1f1b": ({"parallel.virtual_stages": 2}, r"1f1b has one stage per rank. Leave virtual_stages out"),
    "a partition of too many layers": ({"parallel.partition": [3, 2]}, r"has 5 layers, but the model has 4. Change the layers"),
    "a partition of too many stages": ({"parallel.partition": [2, 1, 1]}, r"has 3 entries for 2 stages"),
    "a map of too few ranks": ({"parallel.rank_map": [0, 0, 1]}, r"rank_map = \[0, 0, 1\]: does not put .*List every node"),
    "offload misspelt": ({"parallel.offload": ["optimiser"]}, r'\["optimiser"\]: must be "none" or a list of "optimizer"'),
    "a horizon without offload": ({"parallel.offload_horizon": 2}, r"has no effect unless activations are offloaded"),
    "recompute misspelt": ({"parallel.recompute": "all"}, r'recompute = \'all\': must be "none", "selective", "full"'),
    "a shard degree that does not divide": ({"parallel.shard_degree": 3}, r"shard_degree = 3: does not divide the data degree"),
    "an odd sequence in a ring": (
        {"parallel.context": 2, "parallel.tensor": 1, "data.sequence_length": 63}, r"63: is not a multiple of 2 × context\(2\)"),
    "experts of a model without": ({"train.router_balance": 0.1}, r"gpt2 has no experts, and so no router. Leave it out"),
    "a negative rate": ({"train.learning_rate": -1e-3}, r"learning_rate = -0.001: must be at least 0"),
    "a rate as text": ({"train.learning_rate": "1e-3"}, r"learning_rate = '1e-3': must be a number. Write it without quotes"),
    "a rate that is no number": ({"train.learning_rate": float("nan")}, r"learning_rate = nan: must be finite"),
    "one beta": ({"train.betas": [0.9]}, r"betas = \[0.9\]: must be two numbers of at least 0 and less than 1"),
    "a beta of one": ({"train.betas": [0.9, 1.0]}, r"betas = \[0.9, 1.0\]: must be two numbers"),
    "a warm-up beyond the end": ({"train.warmup_steps": 10}, r"warmup_steps = 10: is more than train.steps = 4.*Lower"),
    "a rate's schedule misspelt": ({"train.lr_schedule": "cosin"}, r"lr_schedule = 'cosin': must be 'constant', 'linear'"),
    "dropout in percent": ({"train.dropout": 10}, r"dropout = 10: must be less than 1"),
    "another optimizer": ({"train.optimizer": "adam"}, r"optimizer = 'adam': must be 'adamw' or 'sgd'"),
    "momentum of AdamW": ({"train.momentum": 0.9}, r"momentum = 0.9: has no effect with optimizer = 'adamw'. Use betas"),
    "a negative clip": ({"train.clip": -1.0}, r"clip = -1.0: must be at least 0"),
    "no checkpoint kept": ({"checkpoint.keep": 0}, r"checkpoint.keep = 0: must be at least 1"),
    "a run that is not there": ({"checkpoint.resume": "runs/m/0007"}, r"0007: is not there.*Give DIRECTORY"),
    "an evaluation of nothing": ({"evaluate.every": 10}, r"every = 10: has no effect without evaluate.files. Name the files"),
    "held-out text that is not there": ({"evaluate.files": ["held.txt"]}, r"evaluate.files: .*held.txt: matches no file"),
    "an hour in words": ({"job.time_limit": "1 hour"}, r"time_limit = '1 hour': must be a time as Slurm writes it. Write"),
    "no node": ({"job.nodes": 0}, r"job.nodes = 0: must be at least 1"),
    "nodes as a yes": ({"job.nodes": True}, r"job.nodes = true: must be a whole number"),
    "another device": ({"job.device": "tpu"}, r"device = 'tpu': must be 'auto', 'cpu' or 'cuda'"),
    "a name with a slash": ({"job.name": "a/b"}, r"job.name = 'a/b': must be 1 to 128 letters.* Write for example run-1"),
    "a name that climbs": ({"job.name": ".."}, r"job.name = '..': must be 1 to 128 letters"),
    "another architecture": ({"model.config.model_type": "bert"}, r"'bert': is not one of gpt2, llama"),
    "an architecture like another": ({"model.config.model_type": "mistral"}, r"is not one of [^.]*\. Use a model"),
    "an architecture of a later release": ({"model.config.model_type": "qwen3"}, r"is not one of [^.]*\. Use a model"),
    "an architecture of another kind": ({"model.config.model_type": "llama4"}, r"is not one of [^.]*\. Use a model"),
    "an architecture misspelt": ({"model.config.model_type": "gtp2"}, r"'gtp2': is not one of .*Did you mean 'gpt2'"),
    "a size misspelt": ({"model.config.n_layers": 4}, r"config.n_layers: is not a key of a gpt2 .*Did you mean 'n_layer'"),
    "no vocabulary": ({"model.config.vocab_size": 0}, r"vocab_size = 0: must be a whole number from 1"),
    "layers as text": ({"model.config.n_layer": "4"}, r"n_layer = '4': must be a whole number"),
    "an activation misspelt": ({"model.config.activation_function": "gelu_neww"}, r"'gelu_neww': is not a supported .*Choose"),
    "a value that transformers refuses": ({"model.config.dtype": "float31"}, r"is refused by transformers .*float31"),
    "key-value heads that do not divide": ({"model.config": LLAMA | {"num_key_value_heads": 3}}, r"heads\(4\) / num_k"),
    "a negative rotary base": ({"model.config": LLAMA | {"rope_theta": -1.0}}, r"rope_theta = -1.0: must be a number above 0"),
    "rotary positions misspelt": (
        {"model.config": LLAMA | {"rope_scaling": {"rope_type": "yarnn", "factor": 2.0}}}, r"'yarnn': is not a .*Choose"),
    "an epsilon as text": ({"model.config": LLAMA | {"rms_norm_eps": "1e-6"}}, r"rms_norm_eps = '1e-6': must be a number"),
    "heads that cannot turn": ({"model.config": LLAMA | {"head_dim": 15}}, r"heads of 15 elements: cannot be rotated in .*even"),
    "a model of the hub": ({"model": {"pretrained": "meta-llama/Llama-3-8B"}}, r"\(models are never downloaded\)"),
    "no model": ({"model": None}, r"model: is required. Add \[model\]"),
    "two models": ({"model.pretrained": "ck"}, r"model: has both pretrained and config. Leave config out to"),
    "an empty checkpoint": ({"model": {"pretrained": "corpus"}}, r"its config.json cannot be read .*save_pretrained"),
    "a checkpoint without weights": ({"model": {"pretrained": "ck"}}, r"holds no \*.safetensors file. Save it again"),
    "half a config": ({"model": {"pretrained": "half"}}, r"its config.json is not JSON .*Use a directory written by"),
    "weights that git has not fetched": ({"model": {"pretrained": "pointer"}}, r"is an incomplete copy .*Copy or download"),
    "a tokenizer that is not there": ({"data.tokenizer": "corpus"}, r"with a tokenizer.*holds tokenizer.json"),
    "a variable that is a number": ({"environment": {"set": {"A": 5}}}, r"set.A = 5: must be text. Write it in quotes"),
    "a variable with a blank": ({"environment": {"set": {"A B": "5"}}}, r"'A B': must consist of letters, digits"),
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
    "a run that is not there": (("report", "runs/m"), r"is not there.*Give DIRECTORY"),
    "a job file that is there": (("init", "job.toml"), r"job.toml: exists. Give another name, or --force"),
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


def test_there_are_sixty_and_more() -> None:
    assert len(KEYS) + len(JOB_FILES) + len(COMMANDS) >= 60


def test_the_right_job_would_begin(answer: Answer) -> None:
    with pytest.raises(Begun):
        answer("launch", "job.toml", "--on", "local")


@pytest.mark.parametrize("name", KEYS)
def test_a_key(name: str, answer: Answer, tmp_path: Path) -> None:
    changes, words = KEYS[name]
    write(tmp_path / "job.toml", changes)
    _refused(words, *answer("launch", "job.toml", "--on", "local"))


@pytest.mark.parametrize("name", JOB_FILES)
def test_a_job_file(name: str, answer: Answer, tmp_path: Path) -> None:
    file, text, words = JOB_FILES[name]
    (tmp_path / file).write_text(text)
    _refused(words, *answer("launch", file, "--on", "local"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(name: str, answer: Answer) -> None:
    given, words = COMMANDS[name]
    _refused(words, *answer(*given))


def _refused(words: str, code: int, said: str) -> None:
    assert code == 2
    assert re.search(words, " ".join(said.split())), said
