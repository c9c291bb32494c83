"""Files of rows in every kind: the same rows give the same tokens, and what is damaged or malformed is refused as a whole."""

import gzip
import json
import random
import re
import subprocess
import sys
import tomllib
import tracemalloc
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from chats import by_transformers, chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from token_files import prepared, write

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import ZSTD
from hpc_mp.job.first_rows import first_rows
from hpc_mp.job.inputs import find_files
from hpc_mp.job.row_files import rows
from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading
from hpc_mp.train.data.tokens import TokenSet

zstd = import_module(ZSTD)
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": f"It is {number} degrees."}]
     + ([{"role": "user", "content": "naïve 漢字"}, {"role": "assistant", "content": "🙂\n"}] if number % 3 == 0 else [])}
    for number in range(200)]
LINES = "".join(json.dumps(chat) + "\n" for chat in CHATS).encode()


def saved(path: Path) -> None:
    """Write a data set as `datasets` does, in several files, after it was put into another order and back."""
    table = datasets.Dataset.from_list(CHATS[::-1])
    table.select(range(len(CHATS))[::-1]).save_to_disk(path, num_shards=3)


def arrow_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(CHATS)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=70)


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_bytes(LINES),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:3000]) + gzip.compress(LINES[3000:])),  # as pigz
    "rows.jsonl.zst": lambda path: path.write_bytes(zstd.compress(LINES[:3000]) + zstd.compress(LINES[3000:])),
    "rows.ndjson.zst": lambda path: path.write_bytes(zstd.compress(LINES)),
    "rows.json": lambda path: path.write_text(json.dumps(CHATS, indent=2)),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(b" [" + LINES.replace(b"\n", b" ,")[:-2] + b"]\n")),
    "lines.json": lambda path: path.write_bytes(LINES),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(CHATS), path, row_group_size=70),
    "rows.feather": lambda path: pyarrow.feather.write_feather(pyarrow.Table.from_pylist(CHATS), path, "lz4"),
    "rows.arrow": arrow_stream,
    "saved": saved,
}


def tokens_of(tmp_path: Path, files: Sequence[Path], reading: DocumentReading = AS_THEY_ARE, **more: Any) -> TokenSet:
    tokenizer = tmp_path / "tokenizer"
    if not tokenizer.exists():
        chat_tokenizer(tokenizer, "chatml_marked")
    return prepared(tmp_path / "cache", *files, given=tokenizer, vocabulary=500, reading=reading, **more)


@pytest.mark.parametrize("name", WRITERS)
def test_kinds_of_files(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    files = find_files([str(tmp_path / name)])
    seen: list[tuple[int, int]] = []
    token_set = tokens_of(tmp_path, files, progress=lambda done, total: seen.append((done, total)))
    loss = token_set.loss()
    assert loss is not None
    assert (token_set.tokens().tolist(), loss.tolist()) == by_transformers(tmp_path / "tokenizer", CHATS)
    before = "user: What is 0? assistant: It is 0 degrees. user: naïve 漢字"
    assert first_rows(files)[0].parts == ((before, False), ("🙂\n", True))
    sizes = [sum(size for _, _, size in rows(path)) for path in files]
    assert sizes == [path.stat().st_size for path in files], "a row has its part of the file"


def test_compressed_texts(tmp_path: Path) -> None:
    text = "one naïve 漢字\n" * 8_000
    plain = write(tmp_path / "text.txt", text)
    packed = [write(tmp_path / "text.txt.gz", gzip.compress(text.encode())),
              write(tmp_path / "t.zst", zstd.compress(text.encode()))]
    expected = tokens_of(tmp_path, [plain]).tokens().tolist()
    for path in packed:
        assert tokens_of(tmp_path, find_files([str(path)])).tokens().tolist() == expected
        assert first_rows([path])[0].parts[0][0].startswith("one naïve")


def test_large_windows_of_zstd(tmp_path: Path) -> None:
    """As `zstd --long=31` writes large corpora; its libraries refuse that by default."""
    key = zstd.CompressionParameter
    packer = zstd.ZstdCompressor(options={key.window_log: 28, key.enable_long_distance_matching: 1, key.content_size_flag: 0})
    path = write(tmp_path / "rows.jsonl.zst", packer.compress(LINES) + packer.flush())
    with pytest.raises(zstd.ZstdError, match="too much memory"):
        zstd.ZstdFile(path).read()
    assert tokens_of(tmp_path, [path]).documents().shape == (200,)


@pytest.mark.parametrize("name", [
    "rows.jsonl.gz", "rows.jsonl.zst", "rows.json.gz", "rows.parquet", "rows.feather", "rows.arrow"])
@pytest.mark.parametrize("damage", ["cut", "changed", "text"])
def test_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    content = path.read_bytes()
    middle = len(content) // 2
    if (name, damage) == ("rows.arrow", "changed"):
        middle = 8  # Arrow keeps no checksum of values
    changed = content[:middle] + bytes(64) + content[middle + 64:]
    path.write_bytes({"cut": content[:-20], "changed": changed, "text": b"once " * 99}[damage])
    with pytest.raises(HpcMpError, match=rf"{name}.*: is (damaged|not a row)"):
        tokens_of(tmp_path, [path])
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list(CHATS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "all")
    with pytest.raises(HpcMpError, match="holds 2 splits of a data set: train, test") as caught:
        find_files([str(tmp_path / "all")])
    assert caught.value.remedy == f"name one, for example {tmp_path}/all/train"
    assert tokens_of(tmp_path, find_files([f"{tmp_path}/all/train"])).documents().shape == (200,)
    (tmp_path / "all" / "train" / "state.json").write_text("{}")
    with pytest.raises(HpcMpError, match="is no whole data set"):
        find_files([f"{tmp_path}/all/train"])


def test_tables_that_are_compressed_once_more(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=r"is a compressed \.parquet file"):
        find_files([str(write(tmp_path / "a.parquet.gz"))])


def test_columns_that_nobody_reads_are_left_out(tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1], "vector": [[0.0] * 10], "text": ["x"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row for _, row, _ in rows(tmp_path / "a.parquet")] == [{"text": "x"}]
    pyarrow.parquet.write_table(table.drop(["text"]), tmp_path / "b.parquet")
    with pytest.raises(HpcMpError, match=r"b\.parquet, row 1: is not a row \(it holds 'id', 'vector', but neither"):
        tokens_of(tmp_path, [tmp_path / "b.parquet"])


def test_entries_that_a_table_fills_with_nothing(tmp_path: Path) -> None:
    """Rows of a table have all keys of all rows; those without a value are not there for a template."""
    calls = [{"type": "function", "function": {"name": "a", "arguments": {"city": "Paris"}}}]
    other = [{"type": "function", "function": {"name": "b", "arguments": {"day": 1}}}]
    chats = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": some}]}
             for some in (calls, other)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    found = [row["messages"][1] for _, row, _ in rows(tmp_path / "a.parquet") if not isinstance(row, bytes)]
    assert found == [{"role": "assistant", "tool_calls": some} for some in (calls, other)]


VALUES = st.recursive(
    st.none() | st.integers() | st.text("a\"\\é\n]}{[,", max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text("ab,]", max_size=2), items, max_size=3), max_leaves=8)


@given(values=st.lists(VALUES, max_size=8), array=st.booleans(), block=st.integers(1, 9))
def test_json_is_read_in_blocks_of_any_size(tmp_path_factory: pytest.TempPathFactory, values: list[Any], array: bool,
                                            block: int) -> None:
    text = json.dumps(values, indent=1) if array else "\n".join(map(json.dumps, values))
    if not array and text.startswith("["):  # then it is an array, whose values are those of its first one
        return
    path = write(tmp_path_factory.getbasetemp() / "values.json", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpc_mp.job.row_files.BLOCK", block)
        found = [json.loads(row) for _, row, _ in rows(path) if isinstance(row, bytes)]
    assert found == values


# --- malformed rows --------------------------------------------------------------------------------------------------

TABLE = Path(__file__).parents[1] / "job" / "unusable_rows.toml"
BAD = [*(row for form, row, *_ in tomllib.loads(TABLE.read_text(encoding="utf-8")).values() if form == "auto"),
       '{"text": 3}', '{"text": null}', '{"txt": "x"}', "null", "{",
       '{"input_ids": [1]}', '{"prompt": "a"}', '{"conversations": []}',
       '{"instruction": "a", "output": "b"}', "[1]", "true", "once", '{"messages": 7}',
       '{"prompt": "a", "chosen": "b", "rejected": "c"}'][:40]


def test_forty_malformed_rows_are_named_at_once(tmp_path: Path) -> None:
    """Among good rows; each with its file, line, reason and remedy, before anything is tokenized."""
    good = json.dumps(CHATS[0])
    file = write(tmp_path / "rows.jsonl", "".join(f"{good}\n\n{row}\n" for row in BAD))
    with pytest.raises(HpcMpError) as caught:
        tokens_of(tmp_path, [file])
    assert len(BAD) == len(caught.value.several) == 40
    for place, error in enumerate(caught.value.several):
        assert error.value == f"data.files: {file}, line {3 * place + 3}"
        assert error.rule.startswith("is not a row (") and error.remedy
    assert "40 rows cannot be used; the others are rows.jsonl 6, rows.jsonl 9" in str(caught.value)
    assert str(caught.value).startswith(str(caught.value.several[0])[:60])
    assert not list((tmp_path / "cache").glob("tokens-*")) and not list((tmp_path / "cache").glob(".*"))
    write(file, f"{good}\n" * 3)
    assert tokens_of(tmp_path, [file]).documents().shape == (3,), "control: without them it is trained on"


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "rows.jsonl.zst"])
def test_malformed_rows_of_other_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    found = [CHATS[1], {"messages": [{"role": "bot", "content": "x"}, *CHATS[1]["messages"]]}, CHATS[2]]
    lines = "".join(json.dumps(row) + "\n" for row in found).encode()
    {"rows.json": lambda: path.write_text(json.dumps(found)),
     "rows.jsonl.zst": lambda: path.write_bytes(zstd.compress(lines)),
     "rows.parquet": lambda: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)}[name]()
    place = "line" if "jsonl" in name else "row"
    words = f"{path}, {place} 2: is not a row (its messages[0].role is 'bot'). Use one of system"
    with pytest.raises(HpcMpError, match=re.escape(words)):
        tokens_of(tmp_path, [path])


def test_rows_that_a_template_refuses(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "mistral", "mistral")
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    path = write(tmp_path / "a.jsonl", json.dumps(CHATS[0]) + "\n" + json.dumps({"messages": messages}) + "\n")
    with pytest.raises(HpcMpError, match=r"line 2: is not a row \(the chat template refuses it: roles must alternate") as caught:
        prepared(tmp_path / "cache", path, given=tokenizer, vocabulary=500)
    assert "data.template" in caught.value.remedy


@pytest.mark.parametrize("form", ["sharegpt", "alpaca"])
def test_rows_by_an_explicit_key(tmp_path: Path, form: str) -> None:
    """They are the same chats as rows of messages, and nothing without the key."""
    pairs = [[turn["content"] for turn in chat["messages"]][:2] for chat in CHATS]
    found = [{"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
             if form == "sharegpt" else {"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    path = write(tmp_path / "rows.json", json.dumps(found))
    token_set = tokens_of(tmp_path, [path], DocumentReading(form))  # type: ignore[arg-type]
    loss = token_set.loss()
    assert loss is not None
    assert (token_set.tokens().tolist(), loss.tolist()) == by_transformers(
        tmp_path / "tokenizer", [{"messages": chat["messages"][:2]} for chat in CHATS])
    with pytest.raises(HpcMpError, match="200 rows cannot be used") as caught:
        tokens_of(tmp_path, [path])
    assert f'set data.format = "{form}"' in caught.value.remedy
    assert first_rows([path], form=form)[0].chat  # type: ignore[arg-type]


# --- large files -----------------------------------------------------------------------------------------------------

RESIDENT = """
import sys
from pathlib import Path
from hpc_mp.train.data import prepare, tokens
tokens.REPORT = 1
resident = []
def progress(done, total):
    with open("/proc/self/statm") as file:
        resident.append((done / total, int(file.read().split()[1]) * 4096))
token_set = prepare([Path(name) for name in sys.argv[3:]], tokenizer_directory=Path(sys.argv[1]), pretrained=None, vocabulary=500,
                    cache=Path(sys.argv[2]), progress=progress)
half = max(size for share, size in resident if share <= 0.5)
print(token_set.count, half, max(size for _, size in resident), len(resident))
"""
PACKERS: dict[str, Callable[[bytes], bytes]] = {"jsonl.zst": zstd.compress, "json.gz": lambda lines: gzip.compress(lines, 1)}


@pytest.mark.parametrize("suffix", PACKERS)
def test_what_shrinks_to_little_is_unpacked_in_parts(tmp_path: Path, suffix: str) -> None:
    """A block of 16 kB can hold gigabytes."""
    path = write(tmp_path / f"rows.{suffix}", PACKERS[suffix](b'{"text": "%s"}\n' % bytes(b"x" * 100_000) * 640))
    assert path.stat().st_size < 500_000
    next(rows(path))  # imports what reads it
    tracemalloc.start()
    count = sum(1 for _ in rows(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 640 and most < 8e6, f"of 64 MB, {most / 1e6:.1f} MB were in memory"


@pytest.mark.prove
@pytest.mark.parametrize("suffix", ["parquet", "arrow", *PACKERS])
def test_a_stream_does_not_grow_resident_memory(tmp_path: Path, suffix: str) -> None:
    """Of 48 MB of rows, twelve times what is tokenized at once: in the second half, memory is that of the first."""
    tokenizer, draw = chat_tokenizer(tmp_path / "tokenizer", "chatml_marked"), random.Random(0)
    vocabulary = [f"{draw.randrange(10**6):x}" for _ in range(5000)]
    files = []
    for number in range(8):
        found = [{"messages": [{"role": "user", "content": " ".join(draw.choices(vocabulary, k=1500))},
                               {"role": "assistant", "content": "It is sunny. " * 20}], "id": place} for place in range(700)]
        files.append(path := tmp_path / f"{number}.{suffix}")
        if suffix in PACKERS:
            path.write_bytes(PACKERS[suffix]("".join(json.dumps(row) + "\n" for row in found).encode()))
            continue
        table = pyarrow.Table.from_pylist(found)
        if suffix == "parquet":
            pyarrow.parquet.write_table(table, path, compression="zstd")
        else:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=100)
    done = subprocess.run([sys.executable, "-c", RESIDENT, tokenizer, tmp_path / "cache", *files], check=True,
                          stdout=subprocess.PIPE, text=True)
    count, half, most, times = map(int, done.stdout.split())
    print(f"{suffix}: {count:,} tokens, {half / 1e6:.0f} MB in the first half, {most / 1e6:.0f} MB at most, {times} times")
    assert count > 40_000_000 and times > 20 and most < half + 40e6  # half of the tokens are 50 MB in the cache
