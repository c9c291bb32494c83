"""Mistakes that people make in job files and commands: each is answered at launch with the value, the rule and the remedy, before
anything is written, started or submitted."""

import copy
import dataclasses
import json
import re
import sys
import tomllib
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
GOOD: dict[str, dict[str, Any]] = {
    "job": {"name": "m", "nodes": 2, "ranks_per_node": 2, "device": "cpu"},
    "model": {"config": GPT2},
    "data": {"files": ["text.txt"], "sequence_length": 64},
    "parallel": {"tensor": 2, "pipeline": 2, "microbatches": 2},
    "train": {"steps": 4, "global_batch": 8},
}
TEXT = "\n".join(f"Line {number} of a text that is long enough for a few steps." for number in range(4000))

MISTAKES: dict[str, dict[str, list[Any]]] = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))
FILES = {"corpus/a.txt": TEXT, "pointer/config.json": json.dumps(GPT2),
         "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}

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
    """A job file that is right but for these keys."""
    job = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = job
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    file.write_text(tomli_w.dumps(job))


def test_the_right_job_would_begin(answer: Answer) -> None:
    with pytest.raises(Begun):
        answer("launch", "job.toml", "--on", "local")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in MISTAKES.items() for name in rows])
def test_a_mistake(kind: str, name: str, answer: Answer, tmp_path: Path) -> None:
    *mistake, words = MISTAKES[kind][name]
    given = ["launch", "job.toml", "--on", "local"]
    if kind == "keys":
        write(tmp_path / "job.toml", *mistake)
    elif kind == "files":
        given[1], text = mistake
        (tmp_path / given[1]).write_text(text)
    else:
        given = mistake[0].split()
    code, said = answer(*given)
    assert code == 2 and re.search(words, " ".join(said.split())), said
