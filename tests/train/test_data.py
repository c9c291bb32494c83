"""Patterns to files, files to documents."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from token_files import write

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.inputs import find_files
from hpc_mp.train.data import documents
from hpc_mp.train.data.documents import TextPiece, pieces


def read(*paths: Path) -> list[TextPiece]:
    return list(pieces(paths))


# --- files -----------------------------------------------------------------------------------------------------------

def test_globs_are_sorted_and_each_file_comes_once(tmp_path: Path) -> None:
    files = [write(tmp_path / name) for name in ("a.txt", "b.txt", "deep/down/c.txt")]
    write(tmp_path / "other.md")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "folder.txt").mkdir()
    assert find_files([f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt", f"{tmp_path}/deep/../a.txt"]) == tuple(files)


@pytest.mark.parametrize("folder", ["with space", "runs [old]", "a*b", "what?", "näme", "[!x]", "{a,b}"])
def test_odd_directory_names_are_taken_literally(tmp_path: Path, folder: str) -> None:
    file = write(tmp_path / folder / "sub" / "a [1].txt")
    write(tmp_path / "runs o" / "sub" / "a 1.txt")  # what a pattern would match instead
    assert find_files([str(file)]) == (file,)
    assert find_files([f"{tmp_path}/{folder}/**/*.txt"]) == (file,)
    assert find_files([f"{tmp_path}/{folder}/s?b/*.txt"]) == (file,)


@pytest.mark.parametrize(("pattern", "rule", "remedy"), [
    *table(__file__, "data.toml", "bad_patterns"), ("x" * 300, "matches no file", "check the path")])
def test_bad_patterns(tmp_path: Path, pattern: str, rule: str, remedy: str) -> None:
    for name in ("a.parquet.GZ", "a.tar.gz", "a.txt.bz2", "a.so", "a.pyc"):
        write(tmp_path / name)
    (tmp_path / "folder" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HpcMpError) as caught:
        find_files([f"{tmp_path}/{pattern}"])
    assert caught.value.value.startswith("data.files: ")
    assert rule.format(root=tmp_path) in caught.value.rule
    assert remedy in caught.value.remedy


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(HpcMpError, match="permission denied"):
        find_files([str(file)])


# --- documents -------------------------------------------------------------------------------------------------------

def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "﻿one\r\n\ntwo")
    assert read(file) == [TextPiece(file, "one\r\n\ntwo", counts=True, joined=False, last=True, size=9, replaced=0)]


def test_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", "\n".join([
        '﻿{"text": "one\\nline", "id": 7}', "", '{"prompt": "Q", "completion": "A"}', "  ", '{"text": ""}']))
    assert [(p.text, p.counts, p.last) for p in read(file)] == [
        ("one\nline", True, True), ("Q", False, False), ("A", True, True), ("", True, True)]


@pytest.mark.parametrize("row", [
    "plain", "[]", "3", "null", '{"text": 3}', '{"content": "x"}', '{"prompt": "x"}', '{"completion": "x"}',
    '{"text": "x", "prompt": "y"}', '{"text": "x", "completion": "y"}', '{"prompt": ["x"], "completion": "y"}',
    '{"text": "x"', "[" * 100_000, '{"text": ' + "1" * 5000 + "}", b'{"text": "\xff"}', b"\x00"])
def test_malformed_rows_name_file_and_line(tmp_path: Path, row: str | bytes) -> None:
    file = write(tmp_path / "bad.jsonl", b'{"text": "fine"}\n\n' + (row if isinstance(row, bytes) else row.encode()) + b"\n")
    with pytest.raises(HpcMpError, match=re.escape(f"{file}, line 3: is not a row")) as caught:
        read(file)
    assert '{"prompt": "…", "completion": "…"}' in caught.value.remedy


def test_undecodable_text_is_replaced_and_counted(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", b"caf\xe9 \xff\xfe ok \xef\xbf\xbd")  # the last is U+FFFD itself, rightly encoded
    row = write(tmp_path / "b.jsonl", '{"text": "\\ud83d!"}')  # half of a pair, which JSON can hold and UTF-8 cannot
    fine = write(tmp_path / "c.txt", "naïve \ufffd")
    assert [(p.text, p.replaced) for p in read(text, row, fine)] == [
        ("caf\ufffd \ufffd\ufffd ok \ufffd", 3), ("\ufffd\ufffd\ufffd!", 3), ("naïve \ufffd", 0)]


@pytest.mark.parametrize(("content", "words"), [
    *((content, "NUL bytes") for content in (b"\x7fELF\0\0", "wide".encode("utf-16"), b"some words\n" * 20_000 + b"\0")),
    (None, "No such file")])
def test_binary_files_and_those_that_went_away_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        read(tmp_path / "a.txt" if content is None else write(tmp_path / "a.txt", content))


@given(text=st.text(st.sampled_from("ab \n\r\té漢🙂\ufeff")), size=st.integers(4, 16), row=st.booleans())
def test_pieces_put_together_are_the_document(tmp_path_factory: pytest.TempPathFactory, text: str, size: int, row: bool) -> None:
    content = json.dumps({"text": text}) if row else text
    file = write(tmp_path_factory.getbasetemp() / f"pieces{'.jsonl' if row else '.txt'}", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", size)
        found = read(file)
    whole = "".join(piece.text for piece in found)
    assert whole == (text if row else text.removeprefix("\ufeff"))
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in found) < 4 * size
    assert sum(piece.replaced for piece in found) == 0
    assert sum(piece.size for piece in found) == len(content.encode()) - (0 if row else len(text) - len(whole)) * 3


@pytest.mark.parametrize(("text", "parts"), table(__file__, "data.toml", "pieces"))
def test_where_pieces_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, parts: list[str]) -> None:
    monkeypatch.setattr(documents, "PIECE", 8)
    assert [piece.text for piece in read(write(tmp_path / "a.txt", text))] == parts


def test_pieces_of_a_large_file_stay_small(tmp_path: Path) -> None:
    line = write(tmp_path / "line.txt", b"x" * (5 * documents.PIECE))
    row = write(tmp_path / "row.jsonl", json.dumps({"text": "two words " * documents.PIECE}))
    for file in (line, row):
        found = read(file)
        assert len(found) >= 4
        assert max(len(piece.text) for piece in found) <= 2 * documents.PIECE
