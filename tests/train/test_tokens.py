"""Token sets and the cache that keeps them."""

import json
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from token_files import TEXT, prepared, words, write, write_rows
from tokenizers import processors

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.data import bpe, load_tokens
from hpc_mp.train.data import tokens as tokens_module
from hpc_mp.train.data.tokenizer import load

# --- what is in a token set ------------------------------------------------------------------------------------------

def test_documents_are_followed_by_the_end_token(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", ["?", "a", "b", "</s>"], eos_token={"content": "</s>", "special": True})
    files = (write(tmp_path / "1.txt", "a b a"), write(tmp_path / "2.txt", "\n"),
             write_rows(tmp_path / "3.jsonl", {"text": "b"}, {"text": ""}, {"text": "b b"}))
    token_set = prepared(tmp_path / "cache", *files, given=tokenizer)
    assert token_set.tokens().tolist() == [1, 2, 1, 3, 2, 3, 2, 2, 3]  # documents without tokens have no end
    assert token_set.loss() is None and not token_set.has_loss_mask
    assert not (token_set.directory / "loss.bin").exists()
    assert token_set.documents().tolist() == [0, 4, 6]  # nor a beginning
    assert (token_set.count, token_set.dtype) == (9, "uint16")
    assert load_tokens(token_set.directory) == token_set


def test_the_prompt_does_not_count(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", ["?", "a", "b", "</s>"], eos_token="</s>")
    rows = write_rows(tmp_path / "r.jsonl", {"prompt": "a a", "completion": "b"}, {"text": "a"},
                      {"prompt": "a", "completion": ""})
    token_set = prepared(tmp_path / "cache", rows, given=tokenizer)
    loss = token_set.loss()
    assert loss is not None
    assert token_set.tokens().tolist() == [1, 1, 2, 3, 1, 3, 1, 3]
    assert loss.tolist() == [0, 0, 1, 1, 1, 1, 0, 1]
    assert token_set.documents().tolist() == [0, 4, 6]  # a prompt and its completion are one


def test_documents_begin_where_texts_do(tmp_path: Path) -> None:
    """A separator inside a text, as after each turn of a chat, ends nothing."""
    tokenizer = words(tmp_path / "words", ["?", "a", "</s>"], eos_token="</s>")
    files = write(tmp_path / "1.txt", "a </s> a"), write(tmp_path / "2.txt", "</s>")
    token_set = prepared(tmp_path / "cache", *files, given=tokenizer)
    assert token_set.tokens().tolist() == [1, 2, 1, 2, 2, 2]
    assert token_set.documents().tolist() == [0, 4]


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_are_as_wide_as_the_tokenizer_needs(tmp_path: Path, size: int, dtype: str) -> None:
    tokenizer = words(tmp_path / "words", ["?", *map(str, range(size - 2)), "last"])
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", "0 last 7"), given=tokenizer, vocabulary=70000)
    assert token_set.dtype == dtype
    assert token_set.tokens().tolist() == [1, size - 1, 8]
    raw = (token_set.directory / "tokens.bin").read_bytes()
    assert raw == b"".join(i.to_bytes(2 if dtype == "uint16" else 4, "little") for i in (1, size - 1, 8))


def test_a_large_text_keeps_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and batches neither lose nor repeat text, and a document has one end however many pieces it has."""
    text = "".join(f"line {i} é漢\n" for i in range(400))
    monkeypatch.setattr("hpc_mp.train.data.documents.PIECE", 100)
    monkeypatch.setattr(tokens_module, "REPORT", 256)
    seen: list[tuple[int, int]] = []
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", text), write(tmp_path / "b.txt", text),
                         progress=lambda done, total: seen.append((done, total)))
    tokenizer = load(token_set.tokenizer_directory)
    assert tokenizer.encoder.decode(token_set.tokens().tolist(), skip_special_tokens=False) == 2 * (text + bpe.END)
    assert token_set.documents().tolist() == [0, token_set.count // 2]
    assert len(seen) > 10 and seen == sorted(seen)
    assert {total for _, total in seen} == {2 * len(text.encode())} and seen[-1][0] == seen[-1][1]


def test_saved_truncation_padding_and_template_do_not_touch_the_text(tmp_path: Path) -> None:
    directory = words(tmp_path / "words", ["?", "a", "b"])
    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoder.enable_truncation(2)
    encoder.enable_padding(length=8)
    encoder.post_processor = processors.TemplateProcessing("? $A", special_tokens=[("?", 0)])
    encoder.save(str(directory / "tokenizer.json"))
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", "a b a b"), given=directory)
    assert token_set.tokens().tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_nothing_to_train_on(tmp_path: Path, content: str) -> None:
    tokenizer = words(tmp_path / "words", ["?", "a"])
    with pytest.raises(HpcMpError, match="give no token"):
        prepared(tmp_path / "cache", write(tmp_path / "a.txt", content), given=tokenizer)
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_nothing_counts(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", ["?", "a"])
    rows = write_rows(tmp_path / "a.jsonl", {"prompt": "a a", "completion": ""})
    with pytest.raises(HpcMpError, match="none of their 2 tokens counts"):
        prepared(tmp_path / "cache", rows, given=tokenizer)


def test_what_a_user_should_know_is_said_once_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = words(tmp_path / "words", ["?", "a", "None"], eos_token="</s>")  # a token that it does not have
    files = [write(tmp_path / f"{i}.txt", b"a \xff a\n" * 3) for i in range(2)]
    for _ in range(2):  # tokenized, and from the cache
        caplog.clear()
        token_set = prepared(tmp_path / "cache", *files, given=tokenizer)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert "no eos_token" in caplog.messages[0]
        assert "6 undecodable byte sequences" in caplog.messages[1] and str(files[0]) in caplog.messages[1]
    assert token_set.count == 18  # and no token at the ends of documents
    caplog.clear()
    prepared(tmp_path / "cache", write(tmp_path / "fine.txt", TEXT))
    assert not caplog.records


# --- the cache -------------------------------------------------------------------------------------------------------

def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(directory.rglob("*"))}


def test_the_same_bytes_are_tokenized_once(tmp_path: Path) -> None:
    cache = tmp_path / "the cache"
    first = prepared(cache, write(tmp_path / "a dir" / "a.txt", TEXT))
    before = stamps(cache)
    assert prepared(cache, write(tmp_path / "elsewhere" / "b.txt", TEXT), progress=pytest.fail) == first
    assert stamps(cache) == before


def test_what_the_tokens_depend_on(tmp_path: Path) -> None:
    row = json.dumps({"text": TEXT})
    text, rows, more = (write(tmp_path / name, row) for name in ("a.txt", "a.jsonl", "more.txt"))
    more.write_text(row + "more")
    other = words(tmp_path / "words", ["?", "a"])
    token_sets = [prepared(tmp_path / "cache", text), prepared(tmp_path / "cache", rows),
                  prepared(tmp_path / "cache", more), prepared(tmp_path / "cache", text, more),
                  prepared(tmp_path / "cache", more, text), prepared(tmp_path / "cache", text, vocabulary=260),
                  prepared(tmp_path / "cache", text, given=other)]
    assert len({token_set.directory for token_set in token_sets}) == len(token_sets)


@pytest.mark.parametrize("name", ["tokens.bin", "loss.bin", "documents.bin", "meta.json", "SHA256SUMS", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "gone"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    rows = write_rows(tmp_path / "a.jsonl", *[{"prompt": "Who?", "completion": TEXT}] * 2)
    whole = prepared(tmp_path / "cache", rows)
    (file,) = whole.directory.parent.glob(f"{'tokenizer' if name == 'tokenizer.json' else 'tokens'}-*/{name}")
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:],
                          "truncated": content[:middle], "empty": b""}[damage])
    assert prepared(tmp_path / "cache", rows) == whole
    assert file.read_bytes() == content
    assert not list((tmp_path / "cache").glob(".*"))  # nothing is left behind


def test_ranks_refuse_an_incomplete_token_set(tmp_path: Path) -> None:
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", TEXT))
    os.truncate(token_set.directory / "tokens.bin", 2 * token_set.count - 2)
    with pytest.raises(HpcMpError, match=f"should hold {2 * token_set.count} bytes"):
        load_tokens(token_set.directory)
    with pytest.raises(HpcMpError, match="cannot be read"):
        load_tokens(tmp_path)


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if list(tmp_path.glob("cache/tokenizer-*")):  # a slow machine says something of its making, too
            raise KeyboardInterrupt

    text = write(tmp_path / "a.txt", TEXT)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "cache", text, progress=stop)
    assert [path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()] == ["tokenizer"]
    assert prepared(tmp_path / "cache", text).count > 0


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", TEXT)
    with pytest.raises(HpcMpError, match=r"cache .*: cannot be written \(Not a directory\)"):
        prepared(text / "cache", text)


PREPARE = """
import sys
from pathlib import Path
from hpc_mp.train.data import prepare
print("ready", flush=True)
sys.stdin.readline()
files, cache = [Path(file) for file in sys.argv[2:]], Path(sys.argv[1])
token_set = prepare(files, tokenizer_directory=None, pretrained=None, vocabulary=2000, cache=cache)
print(token_set.directory, token_set.count)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_prepare_at_once(tmp_path: Path, damaged: bool) -> None:
    files = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in ("ast", "argparse", "typing")]
    if damaged:
        os.truncate(prepared(tmp_path / "cache", *files, vocabulary=2000).directory / "tokens.bin", 100)
    processes = [subprocess.Popen([sys.executable, "-c", PREPARE, str(tmp_path / "cache"), *map(str, files)], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                 for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=240) for process in processes]
    assert {process.returncode for process in processes} == {0}, outputs
    assert len({out for out, _ in outputs}) == 1
    token_set = load_tokens(Path(outputs[0][0].split()[0]))
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir() if path.is_dir()) == [
        "tokenizer", "tokens"]
    text = "".join(file.read_text() + bpe.END for file in files)
    assert load(token_set.tokenizer_directory).encoder.decode(token_set.tokens().tolist(), False) == text


# --- large text ------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, time
from pathlib import Path
from hpc_mp.train.data import prepare
start = time.perf_counter()
token_set = prepare([Path(sys.argv[1])], tokenizer_directory=Path(sys.argv[2]), pretrained=None, vocabulary=8192,
                    cache=Path(sys.argv[3]))
seconds = time.perf_counter() - start
print(token_set.count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.prove
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    tokenizer = bpe.train([write(tmp_path / "t.txt", source)], ["t"], vocabulary=8192, cache=tmp_path / "cache")
    peaks = []
    for size in (10_000_000, 30_000_000):
        text = write(tmp_path / f"{size}.txt", (source * 9)[:size])
        measured = subprocess.run([sys.executable, "-c", PEAK, text, tokenizer, tmp_path / "cache"], check=True,
                                  stdout=subprocess.PIPE).stdout
        count, seconds, peak = map(float, measured.split())
        print(f"{size} bytes: {count:.0f} tokens, {count / seconds:.0f} tokens/s, peak {peak / 1e6:.0f} MB")
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 100e6
