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


# --- documents as they are trained -----------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>{% endfor %}" \
           "{% if add_generation_prompt %}<assistant>\n{% endif %}"


def shown(job: Path, *overrides: str, rows: int = 2) -> str:
    words = [word for override in overrides for word in ("--set", override)]
    done = CliRunner().invoke(cli, ["data", "show", str(job), "--rows", str(rows), *words])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_documents_as_they_are_trained(job: Path) -> None:
    folder = job.parent
    (folder / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 3)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "template.jinja").write_text(TEMPLATE)
    said = shown(job, "data.files=['chats.jsonl', 'pairs.jsonl']", "data.template=template.jinja")
    assert [line for line in said.splitlines() if "document" in line] == [
        f"{folder}/chats.jsonl, document 1: 29 tokens, of which 5 count in the loss",
        f"{folder}/chats.jsonl, document 2: 29 tokens, of which 5 count in the loss",
        f"{folder}/pairs.jsonl, document 1: 3 tokens, of which 2 count in the loss"]
    assert said.splitlines()[1:5] == ["<│u│s│e│r│>│⏎", "Hi│<│/│s│>│<│a│s│s│i│s│t│a│n│t│>│⏎", "⟦Hello│<│/│s│>⟧", ""]
    assert said.splitlines()[-2] == "a⟦b│<|endoftext|>⟧"
    document = json.loads(CliRunner().invoke(cli, ["data", "show", str(job), "--json"]).stdout)["documents"]
    (one,) = document
    assert one["file"] == str(folder / "text.txt") and all(one["counts"]) and "".join(one["texts"]).startswith("some text\nsome")
    words = ["data", "show", str(job), "--json", "--set", "data.documents=separate"]
    separate = json.loads(CliRunner().invoke(cli, words).stdout)
    assert separate["documents"][0]["counts"] == [False, *one["counts"][1:]], "nothing precedes the first token of a document"


def test_what_is_shown_is_what_is_prepared(job: Path) -> None:
    (job.parent / "chats.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(40)))
    (job.parent / "template.jinja").write_text(TEMPLATE)
    words = ["--json", "--set", "data.files=['chats.jsonl']", "--set", "data.template=template.jinja"]
    made = load_tokens(Path(json.loads(CliRunner().invoke(cli, ["data", "prepare", str(job), *words]).stdout)["directory"]))
    documents = json.loads(CliRunner().invoke(cli, ["data", "show", str(job), *words, "--rows", "40"]).stdout)["documents"]
    loss = made.loss()
    assert loss is not None
    assert [token for document in documents for token in document["ids"]] == made.tokens().tolist()
    assert [count for document in documents for count in document["counts"]] == loss.astype(bool).tolist()


def test_a_share_is_held_out(job: Path) -> None:
    (job.parent / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(200)))
    words = ["--json", "--set", "data.files=['rows.jsonl']"]
    whole = json.loads(CliRunner().invoke(cli, ["data", "prepare", str(job), *words]).stdout)
    words += ["--set", "evaluate.share=0.2"]
    split = json.loads(CliRunner().invoke(cli, ["data", "prepare", str(job), *words]).stdout)
    assert split["held_out"]["tokens"] > 0 and split["tokens"] > split["held_out"]["tokens"]
    assert split["tokenizer"] != whole["tokenizer"], "the tokenizer is trained on the others alone"
    words += ["--set", f"data.tokenizer={whole['tokenizer']}"]
    split = json.loads(CliRunner().invoke(cli, ["data", "prepare", str(job), *words]).stdout)
    assert split["tokens"] + split["held_out"]["tokens"] == whole["tokens"]
