"""The shuffle and the sampler."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.data import IGNORE, Samples, TokenSet, load_tokens, positions
from hpc_mp.train.data.sampler import permuted

Order = Callable[[int, int, int], int]  # (place, size, epoch) → item


def feistel(place: int, size: int, epoch: int) -> int:
    return permuted(place, size, seed=5, epoch=epoch)


# --- the shuffle -----------------------------------------------------------------------------------------------------

@given(size=st.integers(1, 700), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**32))
def test_every_item_stands_at_one_place(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(place, size, seed=seed, epoch=epoch) for place in range(size)) == list(range(size))


@given(size=st.integers(1 << 30, 1 << 60), data=st.data())
def test_large_sizes_neither_collide_nor_leave_the_range(size: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=50))
    items = {permuted(place, size, seed=0, epoch=0) for place in places}
    assert len(items) == len(places) and all(0 <= item < size for item in items)


@pytest.mark.parametrize(("seed", "epoch", "order"), table(__file__, "sampler.toml", "orders"))
def test_the_order_is_written_down(seed: int, epoch: int, order: list[int]) -> None:
    """Golden: with another order, a run that goes on would see some samples twice and others never."""
    assert [permuted(place, 10, seed=seed, epoch=epoch) for place in range(10)] == order
    assert permuted(123456789, 10**12, seed=42, epoch=7) == 408056684968


def excess(order: Order, size: int, epochs: int = 400) -> float:
    """By how many standard deviations the worst chi-square of an order exceeds that of fair shuffles.

    Three views: which item stands at each place over the epochs, which item follows which, and how far an item moves
    from one epoch to the next.
    """
    items = np.array([[order(place, size, epoch) for place in range(size)] for epoch in range(epochs)])
    shifts = items[:, np.argsort(items[0])]  # by the item of the first epoch
    views = (
        np.stack([np.bincount(items[:, place], minlength=size) for place in range(size)]).ravel(),
        np.bincount((np.diff(items, axis=1) % size).ravel(), minlength=size)[1:],
        np.bincount((np.diff(shifts, axis=0) % size).ravel(), minlength=size))
    scores = []
    for counts in views:
        expected = counts.sum() / counts.size
        scores.append((((counts - expected) ** 2 / expected).sum() - counts.size) / np.sqrt(2 * counts.size))
    return float(max(scores))


@pytest.mark.parametrize("size", [3, 16, 17, 100, 257])
def test_the_order_looks_random(size: int) -> None:
    assert excess(feistel, size) < 5


@pytest.mark.parametrize("order", [
    lambda place, size, epoch: place,
    lambda place, size, epoch: (place + epoch) % size,
    lambda place, size, epoch: (place * 7 + epoch * 31) % size,
    lambda place, size, epoch: permuted(place, size, seed=5, epoch=0),
], ids=["identity", "rotation", "affine", "same in every epoch"])
def test_orders_that_are_not_random_are_seen(order: Order) -> None:
    assert excess(order, 100) > 100


# --- which replica trains what ---------------------------------------------------------------------------------------

@given(data_degree=st.integers(1, 8), microbatches=st.integers(1, 6), size=st.integers(1, 4), step=st.integers(0, 1000))
def test_each_position_of_a_step_is_trained_once(data_degree: int, microbatches: int, size: int, step: int) -> None:
    batch = data_degree * microbatches * size
    blocks = [positions(step * batch, global_batch=batch, data_degree=data_degree, data_rank=rank, microbatches=microbatches)
              for rank in range(data_degree)]
    assert all(len(block) == microbatches and {len(part) for part in block} == {size} for block in blocks)
    # in order of rank and microbatch the blocks are the step's positions, whatever the layout
    assert [p for block in blocks for part in block for p in part] == list(range(step * batch, (step + 1) * batch))


def tokens(directory: Path, count: int, loss: list[int] | None = None) -> TokenSet:
    """A token set whose token i is i."""
    directory.mkdir()
    np.arange(count, dtype="<u2").tofile(directory / "tokens.bin")
    if loss is not None:
        np.array(loss, np.uint8).tofile(directory / "loss.bin")
    np.array([0], "<i8").tofile(directory / "documents.bin")
    (directory / "meta.json").write_text(json.dumps({
        "count": count, "counted": count if loss is None else sum(loss), "documents": 1, "dtype": "uint16",
        "tokenizer": "tokenizer", "tokenizer_sha256": ""}))
    return load_tokens(directory)


# --- samples ---------------------------------------------------------------------------------------------------------

def test_a_sample_is_a_window_and_its_labels_are_shifted(tmp_path: Path) -> None:
    samples = Samples(tokens(tmp_path / "t", 42), sequence_length=8, seed=3)
    assert len(samples) == 5  # (42 - 1) // 8
    firsts = set()
    for position in range(5):
        inputs, labels = samples.at(position)
        assert inputs.dtype == labels.dtype == np.int64 and inputs.shape == labels.shape == (8,)
        np.testing.assert_array_equal(inputs, np.arange(inputs[0], inputs[0] + 8))
        np.testing.assert_array_equal(labels, inputs + 1)
        firsts.add(int(inputs[0]))
    assert firsts == {0, 8, 16, 24, 32}


def test_labels_that_do_not_count(tmp_path: Path) -> None:
    samples = Samples(tokens(tmp_path / "t", 9, loss=[1, 1, 0, 0, 1, 1, 0, 1, 1]), sequence_length=8, seed=0)
    inputs, labels = samples.at(0)
    np.testing.assert_array_equal(inputs, np.arange(8))
    np.testing.assert_array_equal(labels, [1, IGNORE, IGNORE, 4, 5, IGNORE, 7, 8])


def test_a_batch_is_its_samples_stacked(tmp_path: Path) -> None:
    samples = Samples(tokens(tmp_path / "t", 100), sequence_length=4, seed=0)
    inputs, labels = samples.batch(range(20, 30))  # over the end of an epoch
    assert inputs.shape == labels.shape == (10, 4) and inputs.dtype == labels.dtype == np.int64
    for row, position in enumerate(range(20, 30)):
        np.testing.assert_array_equal(inputs[row], samples.at(position)[0])
        np.testing.assert_array_equal(labels[row], samples.at(position)[1])


LAYOUTS = st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])  # (data degree, microbatches)


@given(before=LAYOUTS, after=LAYOUTS, stop=st.integers(0, 12))
def test_a_resume_on_another_layout_sees_each_sample_once(tmp_path_factory: pytest.TempPathFactory,
                                                          before: tuple[int, int], after: tuple[int, int],
                                                          stop: int) -> None:
    samples = Samples(tokens(tmp_path_factory.mktemp("tokens") / "t", 4 * 48 + 1), sequence_length=4, seed=11)
    assert len(samples) == 48  # 6 steps of 8
    seen: list[int] = []
    for step in range(12):  # two epochs
        degree, microbatches = before if step < stop else after
        for rank in range(degree):
            for part in positions(step * 8, global_batch=8, data_degree=degree, data_rank=rank, microbatches=microbatches):
                seen += samples.batch(part)[0][:, 0].tolist()
    first, second = seen[:48], seen[48:]
    assert sorted(first) == sorted(second) == list(range(0, 192, 4))
    assert first != second


def test_seeds_and_epochs_give_other_orders(tmp_path: Path) -> None:
    token_set = tokens(tmp_path / "t", 401)
    orders = {tuple(Samples(token_set, 4, seed).batch(range(epoch * 100, epoch * 100 + 100))[0][:, 0].tolist())
              for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("count", [1, 8])
def test_text_shorter_than_a_sequence(tmp_path: Path, count: int) -> None:
    with pytest.raises(HpcMpError) as caught:
        Samples(tokens(tmp_path / "t", count), sequence_length=8, seed=0)
    assert caught.value.value == "data.sequence_length = 8"
    assert f"has {count} tokens" in caught.value.rule and "8 + 1 = 9" in caught.value.rule
    assert len(Samples(tokens(tmp_path / "enough", 9), sequence_length=8, seed=0)) == 1
