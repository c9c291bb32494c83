"""Mixtures by ``data.weights``, and the share of the documents that is held out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import prepared, words, write

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.inputs import find_groups
from hpc_mp.train.data import HeldOut, Samples, TokenSet
from hpc_mp.train.data.documents import DocumentReading
from hpc_mp.train.data.sampler import BLOCK, block_order, slots

S = 4


def of_parts(tmp_path: Path, *sizes: int) -> TokenSet:
    """A token set of files, one for each part, whose tokens are the number of their part."""
    tokenizer = tmp_path / "words"
    if not tokenizer.exists():
        words(tokenizer, ["?", *"abc"])
    files = [write(tmp_path / f"{part}.txt", f"{'abc'[part]} " * size) for part, size in enumerate(sizes)]
    return prepared(tmp_path / "cache", *files, given=tokenizer, groups=[1] * len(files))


def sources(samples: Samples, count: int) -> list[int]:
    """The part that each sample comes from; a sample is of one part."""
    inputs, labels = zip(*(samples.at(position) for position in range(count)), strict=True)
    assert all(len({*row, *label}) == 1 for row, label in zip(inputs, labels, strict=True)), "no sample runs into another part"
    return [int(row[0]) - 1 for row in inputs]


def test_samples_come_in_the_shares_of_the_weights(tmp_path: Path) -> None:
    token_set = of_parts(tmp_path, 4 * 50 + 1, 4 * 400 + 3, 4 * 90 + 1)
    assert token_set.parts == (201, 1603, 361)
    samples = Samples(token_set, S, 7, weights=[0.7, 0.2, 0.1])
    found = sources(samples, 3 * BLOCK)
    assert Counter(found) == {0: 2100, 1: 600, 2: 300}
    for first in range(0, 3 * BLOCK, 200):  # a short stretch too: 140 ± 7 of one block without replacement
        assert abs(found[first:first + 200].count(0) - 140) < 30
    assert len(samples) == 50 + 400 + 90 and not samples.masked
    assert found != sources(Samples(token_set, S, 8, weights=[0.7, 0.2, 0.1]), 3 * BLOCK), "another seed, another order"
    assert found == sources(Samples(token_set, S, 7, weights=[7, 2, 1]), 3 * BLOCK), "in any unit"


def test_a_part_that_ends_is_passed_again(tmp_path: Path) -> None:
    """Every sample of a part comes once before one comes twice, and the next pass has another order."""
    samples = Samples(of_parts(tmp_path, 4 * 50 + 1, 4 * 300 + 1), S, 7, weights=[1, 1])
    firsts = [samples.first_token(position) for position in range(2 * BLOCK)]
    first = [token for token in firsts if token < 201]
    assert len(first) == BLOCK
    passes = [first[begin:begin + 50] for begin in range(0, BLOCK, 50)]
    assert all(sorted(one) == [4 * number for number in range(50)] for one in passes) and passes[0] != passes[1]
    second = [token - 201 for token in firsts if token >= 201]
    assert sorted(second[:300]) == [4 * number for number in range(300)]


def test_without_weights_all_is_as_before(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.txt", f"{name} " * 100) for name in "ab"]
    tokenizer = words(tmp_path / "words", ["?", *"abc"])
    one, grouped = (prepared(tmp_path / "cache", *files, given=tokenizer, groups=groups) for groups in ((), (2,)))
    assert one.directory == grouped.directory and one.parts == (200,)
    apart = prepared(tmp_path / "cache", *files, given=tokenizer, groups=(1, 1))
    assert apart.directory != one.directory and apart.parts == (100, 100)
    ours, theirs = Samples(one, S, 3), Samples(apart, S, 3)
    assert [ours.first_token(place) for place in range(99)] == [theirs.first_token(place) for place in range(99)]


@given(weights=st.lists(st.floats(1, 100), min_size=1, max_size=6))
def test_slots(weights: list[float]) -> None:
    whole = slots(weights)
    assert sum(whole) == BLOCK
    assert all(abs(size - BLOCK * weight / sum(weights)) < 1 for size, weight in zip(whole, weights, strict=True))
    order = block_order(whole, 3, 1)
    for part, size in enumerate(whole):
        assert [number for other, number in order if other == part] == [*range(size)], "each sample of a part once, in order"


@pytest.mark.parametrize(("sizes", "weights", "words"), [
    ((100, 3), [1, 1], r"the files of data.weights\[1\] have 3 tokens"),
    ((100, 100), [1, 0.0001], r"data.weights\[1\] = 0.0001: is less than a thousandth of all weights")])
def test_parts_that_give_no_sample(tmp_path: Path, sizes: tuple[int, ...], weights: list[float], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        Samples(of_parts(tmp_path, *sizes), S, 0, weights=weights)


def test_a_file_has_one_weight(tmp_path: Path) -> None:
    files = [write(tmp_path / name) for name in ("a.txt", "b.txt", "c.md")]
    patterns = [f"{tmp_path}/*.txt", f"{tmp_path}/c.*"]
    assert find_groups(patterns, [1, 2]) == ((files[0], files[1]), (files[2],))
    assert find_groups(patterns, []) == (tuple(files),)
    with pytest.raises(HpcMpError, match="has two weights"):
        find_groups([f"{tmp_path}/*.txt", f"{tmp_path}/b*"], [1, 2])


# --- the held-out share ----------------------------------------------------------------------------------------------

def split(tmp_path: Path, rows: list[dict[str, Any]], share: float, name: str = "rows.jsonl") -> list[TokenSet]:
    """The tokens to train on, and those held out."""
    tokenizer = tmp_path / "words"
    if not tokenizer.exists():
        words(tokenizer, ["?", *map(str, range(400)), "</s>"], eos_token="</s>")
    path = write(tmp_path / name, "".join(json.dumps(row) + "\n" for row in rows))
    return [prepared(tmp_path / "cache", path, given=tokenizer, vocabulary=500,
                     reading=DocumentReading(share=share, held_out=held_out)) for held_out in (False, True)]


def documents_of(token_set: TokenSet) -> list[tuple[int, ...]]:
    return [tuple(map(int, part)) for part in np.split(token_set.tokens(), token_set.documents()[1:])]


def test_a_share_of_the_documents_is_held_out(tmp_path: Path) -> None:
    rows = [{"text": f"{number} {number}"} for number in range(400)]
    training, held_out = split(tmp_path, rows, 0.1)
    kept, out = documents_of(training), documents_of(held_out)
    assert sorted(kept + out) == [(number + 1, number + 1, 401) for number in range(400)], "each on one side, as it is"
    assert 20 <= len(out) <= 60
    longer = split(tmp_path, [{"text": "7"}, *rows[::-1], *rows[:9]], 0.1, "longer.jsonl")
    assert {*out} <= {*documents_of(longer[1])}, "the same ones of a larger corpus, in any order"
    assert not {*documents_of(longer[0])} & {*documents_of(longer[1])}, "equal documents are on one side"
    assert {*out} <= {*documents_of(split(tmp_path, rows, 0.3)[1])}
    assert len(HeldOut(held_out, S)) > 10


def test_a_share_without_documents(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=r"evaluate.share = 0.001: leaves no document to evaluate: a row, or a text file"):
        split(tmp_path, [{"text": "1"}, {"text": "2"}], 0.001)
