"""Files whose first bytes or rows are not what a job would train on, and tokenizers that do not fit: refused at launch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.first_rows import HEAD, first_rows
from hpc_mp.job.inputs import find_files
from hpc_mp.job.tokenizer_files import check_tokenizer, find_tokenizer

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
ALPACA = {"instruction": "Add.", "input": "1 + 1", "output": "2"}


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


# what is wrong: (the file's name, its content, the rule, the remedy)
WRONG: dict[str, tuple[str, bytes, str, str]] = {
    "an array": ("a.json", json.dumps([ALPACA]).encode(), "a .json file is neither raw text nor one row per line", "jq -c '.[]'"),
    "rows in .json": ("a.json", line({"text": "x"}), "a .json file is neither raw text", "into a .jsonl file"),
    "a table": ("a.csv", b"prompt,completion\na,b\n", "a table is neither raw text", '{"prompt": "…", "completion": "…"}'),
    "an array in .jsonl": ("a.jsonl", b'[\n  {"text": "x"}\n]\n', "holds a JSON array", "jq -c '.[]'"),
    "an array on one line": ("a.jsonl", line([{"text": "x"}]), "holds a JSON array", "jq -c '.[]'"),
    "an array in .txt": ("a.txt", json.dumps([ALPACA], indent=2).encode(), "holds a JSON array of rows", "jq -c '.[]'"),
    "rows in .txt": ("a.txt", line({"text": "x"}) * 3, "holds JSON rows", "rename it to .jsonl"),
    "chats in .txt": ("a.txt", line({"id": 1, "messages": CHAT}), "holds JSON rows", "rename it to .jsonl"),
    "chats": ("a.jsonl", line({"messages": CHAT}), "line 1: is not a row (it holds a chat,", "chat template"),
    "chats of ShareGPT": ("a.jsonl", line({"conversations": [{"from": "human", "value": "x"}]}), "it holds a chat", "template"),
    "chats as prompt": ("a.jsonl", line({"prompt": CHAT[:1], "completion": CHAT[1:]}), "its prompt is a chat", "as one string"),
    "alpaca": ("a.jsonl", line(ALPACA), "it holds an instruction with its output", "jq -c '{prompt: (.instruction"),
    "response": ("a.jsonl", line({"prompt": "x", "response": "y"}), "prompt and response",
                 "jq -c '{prompt: .prompt, completion: .re"),
    "preferences": ("a.jsonl", line({"prompt": "x", "chosen": "y", "rejected": "z"}), "a pair of answers", "the chosen answer"),
    "content": ("a.jsonl", line({"content": "x"}), "a text under content", "jq -c '{text: .content}'"),
    "tokens": ("a.jsonl", line({"input_ids": [1, 2]}), "it holds tokens", "the text from which they were made"),
    "a prompt alone": ("a.jsonl", line({"prompt": "x"}), "it holds 'prompt', but neither", '{"text": "…"}'),
    "both": ("a.jsonl", line({"text": "x", "prompt": "y", "completion": "z"}), "both a text and a prompt", '{"text": "…"}'),
    "no text": ("a.jsonl", line({"text": None}), "its text is not a string", "as one string"),
    "a later row": ("a.jsonl", line({"text": "x"}) + b"\n" + line({"txt": "x"}), "line 3: is not a row (it holds 'txt'", "write"),
    "no JSON": ("a.jsonl", b"once upon a time\n", "line 1: is not a row (Expecting value", '{"text": "…"}'),
    "rows over several lines": ("a.jsonl", b'{\n "text": "x"\n}\n', "line 1: is not a row", "on each line"),
    "gzip under another name": ("a.txt", gzip.compress(b"text"), "is compressed by gzip", "unpack it"),
    "gzip in .jsonl": ("a.jsonl", gzip.compress(line({"text": "x"})), "is compressed by gzip", "unpack it"),
    "parquet under another name": ("a.jsonl", b"PAR1\x15\x04", "is parquet", "as JSON lines"),
    "PDF": ("a.txt", b"%PDF-1.7\n", "is PDF", "pdftotext"),
    "a pointer": ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer",
                  "git lfs pull"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "is UTF-16", "iconv -f UTF-16"),
    "UTF-16 without a mark": ("a.txt", "text".encode("utf-16-le"), "holds NUL bytes", "iconv"),
    "Latin-1": ("a.txt", "Ça va déjà".encode("latin-1"), "is not UTF-8 (byte 0xc7 at 0)", "iconv -f ISO-8859-1"),
    "Latin-1 in a row": ("a.jsonl", '{"text": "déjà"}\n'.encode("latin-1"), "is not UTF-8 (byte 0xe9 at 11)", "iconv"),
    "nothing": ("a.txt", b"", "contains no text", "name files with text"),
    "rows without text": ("a.jsonl", b'{"text": ""}\n{"prompt": "a", "completion": " "}\n',
                          "contains no text", "name files with text"),
    "blanks": ("a.jsonl", b"\n \n", "contains no text", "name files with text"),
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
    (tmp_path / "37.jsonl").write_bytes(line(ALPACA))
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
    ({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, 3),
])
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
