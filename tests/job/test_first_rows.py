"""Files whose first bytes or rows are not what a job would train on, and tokenizers that do not fit: refused at launch."""

import gzip
import json
import tomllib
from pathlib import Path

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.first_rows import HEAD, first_rows
from hpc_mp.job.inputs import find_files
from hpc_mp.job.tokenizer_files import check_tokenizer, find_tokenizer


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


# What is wrong: the file's name, its content, the rule, the remedy. What is no plain text is not in wrong_rows.toml.
TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("wrong_rows.toml").read_text(encoding="utf-8"))
WRONG: dict[str, tuple[str, bytes, str, str]] = {
    **{wrong: (name, f"{text}\n".encode() if text else b"", *said) for wrong, (name, text, *said) in TEXTS.items()},
    "gzip under another name": ("a.txt", gzip.compress(b"text"), "is compressed by gzip", "add .gz"),
    "gzip in .jsonl": ("a.jsonl", gzip.compress(line({"text": "x"})), "is compressed by gzip", "add .gz"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "is UTF-16", "iconv -f UTF-16"),
    "UTF-16 without a mark": ("a.txt", "text".encode("utf-16-le"), "holds NUL bytes", "iconv"),
    "Latin-1": ("a.txt", "Ça va déjà".encode("latin-1"), "is not UTF-8 (byte 0xc7 at 0)", "iconv -f ISO-8859-1"),
    "Latin-1 in a row": ("a.jsonl", '{"text": "déjà"}\n'.encode("latin-1"), "is not UTF-8 (byte 0xe9 at 11)", "iconv"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", ["data.files", "evaluate.files"])
def test_what_would_be_trained_on_wrongly_is_refused(tmp_path: Path, wrong: str, key: str) -> None:
    name, content, rule, remedy = WRONG[wrong]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HpcMpError) as caught:
        first_rows(find_files([f"{tmp_path}/*"], key), key)
    assert caught.value.value.startswith(f"{key}: {tmp_path / name}")
    assert rule in f"{caught.value.value}: {caught.value.rule}" and remedy in caught.value.remedy


def test_every_file_is_looked_at(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.jsonl").write_bytes(line({"text": "x"}))
    files = find_files([f"{tmp_path}/*"])
    assert [row.path for row in first_rows(files)] == list(files)
    (tmp_path / "37.jsonl").write_bytes(line({"instruction": "Add.", "output": "2"}))
    with pytest.raises(HpcMpError, match=r"37\.jsonl, line 1: is not a row"):
        first_rows(files)


@pytest.mark.parametrize(("name", "content", "parts"), [
    ("a.txt", b"once upon a time", [("once upon a time", True)]),
    ("a.txt", "\ufeffonce".encode(), [("once", True)]),
    ("a.md", b"[link](x) {braces}", [("[link](x) {braces}", True)]),
    ("a.txt", b'{"name": "package", "version": 1}', [('{"name": "package", "version": 1}', True)]),  # code, not a data set
    ("a.txt", ("é" * HEAD).encode(), [("é" * 200, True)]),  # a character lies across the end of what is read
    ("a.txt", b"caf\xe9 " + "déjà vu ".encode() * 9, [("caf " + "déjà vu " * 9, True)]),
    ("a.jsonl", b"\n" + line({"text": "x", "id": 5}), [("x", True)]),
    ("a.jsonl", b"\xef\xbb\xbf" + line({"text": "x"}), [("x", True)]),
    ("a.jsonl", line({"prompt": "x", "completion": "y"}).rstrip(), [("x", False), ("y", True)]),
    ("a.jsonl", line({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}),
     [("user: x", False), ("y", True)]),
    ("a.json", b'[{"text": ""}, {"text": "x"}]', [("x", True)]),
    ("a.jsonl", line({"text": "x" * 2 * HEAD}) + line({"text": "y"}), [("x" * 200, True)]),  # longer than what is read at first
    ("a.jsonl", line({"text": "x"}) + b'{"text": "' + b"y" * 2 * HEAD, [("x", True)]),  # a row beyond it is the ranks' to judge
])
def test_what_is_right_is_shown(tmp_path: Path, name: str, content: bytes, parts: list[tuple[str, bool]]) -> None:
    (tmp_path / name).write_bytes(content)
    (row,) = first_rows([tmp_path / name])
    assert list(row.parts) == parts and row.size == len(content)


def test_an_empty_file_among_others_is_none(tmp_path: Path) -> None:
    for name, content in (("a.txt", b""), ("b.txt", b"text")):
        (tmp_path / name).write_bytes(content)
    assert [bool(row.parts) for row in first_rows(find_files([f"{tmp_path}/*.txt"]))] == [False, True]


# --- tokenizers ------------------------------------------------------------------------------------------------------

def tokenizer(directory: Path, content: object, name: str = "tokenizer.json") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(content))
    return directory


BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 7}}, "added_tokens": []}


@pytest.mark.parametrize(("content", "size"), [
    (BPE, 8),
    (BPE | {"added_tokens": [{"id": 9, "content": "<end>"}]}, 10),
    ({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, 3)])
def test_the_vocabulary_must_hold_all_ids(tmp_path: Path, content: object, size: int) -> None:
    given = tokenizer(tmp_path / "given", content)
    check_tokenizer(given, size)
    with pytest.raises(HpcMpError, match=f"largest id {size - 1} needs a vocabulary of {size}, but the model's is {size - 1}"):
        check_tokenizer(given, size - 1)


def test_a_tokenizer_of_two_files(tmp_path: Path) -> None:
    given = tokenizer(tmp_path / "given", {"a": 0, "b": 4}, "vocab.json")
    (given / "merges.txt").write_text("")
    check_tokenizer(given, 5)
    with pytest.raises(HpcMpError, match="largest id 4"):
        check_tokenizer(given, 4)


def test_tokenizers_that_no_rank_could_load(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match="not supported yet"):
        check_tokenizer(tokenizer(tmp_path / "spm", "x", "tokenizer.model"), 100)
    with pytest.raises(HpcMpError, match="holds no vocabulary"):
        check_tokenizer(tokenizer(tmp_path / "empty", {}), 100)
    with pytest.raises(HpcMpError, match="cannot be read"):
        check_tokenizer(tokenizer(tmp_path / "list", []), 100)
    with pytest.raises(HpcMpError, match="too small for a tokenizer trained here"):
        check_tokenizer(None, 256)
    check_tokenizer(None, 257)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    bare, given = tokenizer(tmp_path / "bare", {}, "tokenizer_config.json"), tokenizer(tmp_path / "given", BPE)
    with pytest.raises(HpcMpError, match="holds no tokenizer") as caught:
        find_tokenizer(None, bare)
    assert caught.value.value == f"model.pretrained = {bare}" and "set data.tokenizer" in caught.value.remedy
    assert find_tokenizer(given, bare) == given
    assert find_tokenizer(None, None) is None, "a model that begins with random weights gets a tokenizer of its own"
