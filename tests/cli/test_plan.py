"""``hpc-mp plan``: from a job file or a model to an answer that a person reads, a document, or a job file."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job import load_job

JOB = """
[model]
config = {{ model_type = "llama", num_hidden_layers = 8, hidden_size = 2048, num_attention_heads = 16, vocab_size = 32000 }}
[data]
files = ["text/*.txt"]
sequence_length = 2048
[train]
steps = 10
global_batch = 16
precision = "bf16"
{more}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return written(tmp_path / "job.toml", "[parallel]\nrecompute = \"full\"")


def written(path: Path, more: str) -> Path:
    path.write_text(JOB.format(more=more))
    return path


def plan(*words: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


def refused(*words: object) -> HpcMpError:
    error = plan(*words).exception
    assert isinstance(error, HpcMpError), error
    return error


def test_a_person_reads_that_it_fits_how_fast_and_the_keys_to_paste(job: Path) -> None:
    text = plan(job, "--cluster", "H100:1").stdout
    assert text.startswith("fits ") and " of a GPU's 79.6 GiB: " in text and " tokens/s, " in text and "8 GPUs (H100" in text
    pasted = tomllib.loads(text[text.index("[job]"):])
    assert pasted["job"] == {"nodes": 1, "ranks_per_node": 8} and pasted["parallel"]["recompute"] == "full"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in pasted["parallel"].items())
    spec = load_job(written(job, f"[job]\nnodes = 1\nranks_per_node = 8\n[parallel]\n{lines}"))
    assert spec.parallel.microbatches == pasted["parallel"].get("microbatches", 1)
    assert plan(job, "--machine", "H100").stdout.splitlines()[:3] == text.splitlines()[:3]  # what was chosen is chosen again


def test_the_document_has_every_rank_and_part(job: Path) -> None:
    document = json.loads(plan(job, "--cluster", "H100:2", "--set", "parallel.pipeline=4", "--explain", "--json").stdout)
    assert len(document["footprints"]) == 4 and document["job"]["parallel"]["pipeline"] == 4
    assert sum(document["step"]["parts"].values()) == pytest.approx(document["step"]["seconds"])
    assert document["what_if"]["nodes"]["step"]["tokens_per_s"] > document["step"]["tokens_per_s"]
    most = max(sum(value for name, value in rank.items() if name != "host") for rank in document["footprints"])
    assert most <= document["memory"] and {"slower", "does not fit"} <= document["lost"].keys()


def test_the_explanation_has_all_lines_and_the_limit(job: Path) -> None:
    text = plan(job, "--machine", "H100", "--explain").stdout
    parts = ("memory    ", "time      ", "twice the nodes", "twice the memory of a GPU", "limit     ")
    assert all(word in text for word in parts)
    assert "limit" not in plan(job, "--machine", "H100").stdout


def test_a_written_job_is_planned_alike(tmp_path: Path) -> None:
    config, made = tmp_path / "config.json", tmp_path / "made.toml"
    config.write_text(json.dumps({"model_type": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 8}))
    words = ["--model", config, "--sequence", 512, "--global-batch", 32, "--set", "data.files=[\"a.txt\"]"]
    first = plan(*words, "--machine", "A100 40GB", "--goal", "gpus", "--write", made)
    assert first.exit_code == 0 and "1 GPU (" in first.stdout
    spec = load_job(made)
    assert (spec.train.global_batch, spec.train.precision) == (32, "bf16")
    assert (spec.job.ranks_per_node, spec.data.sequence_length) == (1, 512)
    assert plan(made, "--machine", "A100 40GB").stdout.splitlines()[1] == first.stdout.splitlines()[1]
    assert "exists" in refused(*words, "--machine", "H100", "--write", made).rule


def test_what_does_not_fit_is_refused_with_a_remedy_that_fits(tmp_path: Path) -> None:
    keys = "[job]\nnodes = 1\n[parallel]\nrecompute = \"none\"\nmicrobatches = 1\ntensor = 1\npipeline = 1"
    words = [written(tmp_path / "job.toml", keys), "--machine", "V100", "--global-batch", 256]
    error = refused(*words)
    assert 'recompute = "none"' in error.value and "need at least" in error.rule and "activations" in error.rule
    key = error.remedy.removeprefix("set ").split(",")[0].replace(" = ", "=", 1)
    assert key.startswith("parallel.") and plan(*words, "--set", key).exit_code == 0


@pytest.mark.parametrize(("more", "words", "part"), [
    ("", (), "is not a machine"), ("", ("--machine", "Hopper 100"), "is not a machine"),
    ("", ("--model", "llama"), "either a job file or"),
    ("", ("--cluster", "H100:1", "--set", "parallel.tensor=3"), "does not divide"),
    ("[slurm]\ngpu_type = \"nothing\"", (), "machine 'nothing'"),
    ("", ("--machine", "H100", "--sequence", "4096"), "positions"), ("", ("--cluster", "H100:x"), "whole number"),
])
def test_a_question_without_an_answer_is_refused(tmp_path: Path, more: str, words: tuple[str, ...], part: str) -> None:
    assert part in str(refused(written(tmp_path / "job.toml", more), *words))


def test_a_program_has_its_own_layout(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[program]\ncommand = ["python", "train.py"]')
    assert "starts a program" in refused(path, "--machine", "H100").rule
    assert "takes either" in refused().rule
