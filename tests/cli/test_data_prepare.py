"""``hpc-mp data prepare``: the tokens that ranks find afterwards."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import write_job

from hpc_mp.cli.main import cli
from hpc_mp.job import load_job
from hpc_mp.job.layout import read_shape
from hpc_mp.train.data import load_tokens, prepare_job, tokens


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def test_ranks_find_what_was_prepared(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(cli, ["data", "prepare", str(job), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    made, spec = load_tokens(Path(document["directory"])), load_job(job)
    assert document == {
        "directory": str(made.directory), "tokens": made.count, "files": 1,
        "tokenizer": str(made.tokenizer_directory), "held_out": None,
        "steps_per_epoch": -(-((made.count - 1) // spec.data.sequence_length) // spec.train.global_batch)}
    assert made.count > 0 and (made.tokenizer_directory / "tokenizer.json").exists()

    def again(*_: object) -> None:
        raise AssertionError("the text is tokenized again")

    monkeypatch.setattr(tokens, "_tokenize", again)
    cache = Path(spec.job.directory) / ".cache"  # where a run's ranks look: RunDirectory.cache
    assert prepare_job(spec, read_shape(spec).vocabulary, cache, again) == made
    said = CliRunner().invoke(cli, ["data", "prepare", str(job)])
    assert said.exit_code == 0 and f"{made.count:,} of 1 file" in said.stdout and str(made.tokenizer_directory) in said.stdout
    (job.parent / "text.txt").write_text("another text " * 200)
    other = CliRunner().invoke(cli, ["data", "prepare", str(job)])
    assert isinstance(other.exception, AssertionError), "negative control: another text is not there yet"


def test_overrides_count(job: Path) -> None:
    def prepared(*overrides: str) -> dict[str, object]:
        words = [word for override in overrides for word in ("--set", override)]
        found: dict[str, object] = json.loads(CliRunner().invoke(cli, ["data", "prepare", str(job), "--json", *words]).stdout)
        return found

    plain, shorter = prepared(), prepared("data.sequence_length=8")
    assert plain["directory"] == shorter["directory"], "tokens do not depend on it"
    assert int(str(shorter["steps_per_epoch"])) > 2 * int(str(plain["steps_per_epoch"]))


@pytest.mark.parametrize(("override", "words"), [
    ("data.files=['gone-*.txt']", "gone-*.txt"), ("model.config.vocab_size=100", "is too small for a tokenizer trained here")])
def test_what_cannot_be_prepared_is_refused(job: Path, override: str, words: str) -> None:
    done = CliRunner().invoke(cli, ["data", "prepare", str(job), "--set", override])
    assert done.exit_code != 0 and done.stdout == "" and words in str(done.exception)
