"""First values: normal, the same whatever slice is drawn, and drawn in little memory."""

import math
import resource

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from hpc_mp.layout.models import Weight
from hpc_mp.train.model import initial
from hpc_mp.train.model.counter_random import LINE, LONG, key_of, normal
from hpc_mp.train.parallel import fill
from hpc_mp.train.parallel.fill import fill_part

MANY = 1 << 22


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape of one to three dimensions, and a part of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 3 * LINE), min_size=1, max_size=3)))[:3]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(slice(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))


@given(boxes(), st.integers(0, 2**64))
def test_a_part_is_what_the_whole_has_there(case: tuple[tuple[int, ...], tuple[slice, ...]], seed: int) -> None:
    shape, box = case
    if math.prod(shape) > MANY:
        shape, box = shape[:2], box[:2]
    key = key_of(seed, "a")
    assert np.array_equal(normal(key, shape, box), normal(key, shape, whole(shape))[box])


def test_a_long_part_that_begins_anywhere_is_what_the_whole_has_there() -> None:
    shape = (3 * LONG + 5,)
    everything = normal(1, shape, whole(shape))
    for start, stop in ((1, 2), (LONG - 1, LONG + 1), (LONG + 3, 3 * LONG + 5), (77, 2 * LONG + 78)):
        assert np.array_equal(normal(1, shape, (slice(start, stop),)), everything[start:stop])


def test_the_numbers_are_normal_and_independent() -> None:
    values = normal(key_of(7, "weight"), (MANY,), (slice(0, MANY),)).astype(np.float64)
    error = 5 / math.sqrt(MANY)  # five standard errors of a mean of squares or less
    assert abs(values.mean()) < error and abs(values.var() - 1) < 2 * error
    assert abs((values**3).mean()) < 4 * error and abs((values**4).mean() - 3) < 10 * error
    for z in (-4.0, -2.0, -0.5, 0.0, 1.0, 3.0):  # the share below z, as the error function says
        share = (1 + math.erf(z / math.sqrt(2))) / 2
        assert abs((values < z).mean() - share) < 5 * math.sqrt(share * (1 - share) / MANY)
    for other in (values[1:], values[2:], normal(key_of(7, "weigh"), (MANY,), (slice(0, MANY),))[1:]):
        assert abs((values[:len(other)] * other).mean()) < error
    assert 4.8 < np.abs(values).max() < 6.8


def test_seed_and_name_make_other_numbers() -> None:
    pairs = ((7, "a"), (8, "a"), (7, "b"), (71, ""))
    first = [float(normal(key_of(seed, name), (8,), (slice(0, 1),))[0]) for seed, name in pairs]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("chunk", [1, 7, 30, 100, 10_000])
def test_a_part_is_filled_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts one matrix at a time, of a matrix some rows, never fewer than one."""
    monkeypatch.setattr(fill, "CHUNK", chunk)
    weight, box = Weight("w", (3, 2, 10, 6), cut=2), (slice(1, 3), slice(0, 2), slice(3, 8), slice(0, 6))
    everything = torch.arange(360.0).view(weight.shape)
    asked: list[int] = []

    def source(_: Weight, there: tuple[slice, ...]) -> torch.Tensor:
        asked.append(everything[there].numel())
        return everything[there]

    part = torch.full((2, 2, 5, 6), float("nan"))
    fill_part(part, weight, box, source)
    assert torch.equal(part, everything[box])
    assert max(asked) <= max(chunk, 6) and sum(asked) == part.numel()


def grown(gibibytes: float) -> float:
    """By how many times its size this process grows when it makes a tensor of a part's size."""
    rows, columns = int(gibibytes * 2**18), 1024
    weight = Weight("w", (4 * rows, columns), cut=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    part = torch.empty(rows, columns)
    fill_part(part, weight, (slice(rows, 2 * rows), slice(0, columns)), initial.drawn(7, 5, 0.02, {}))
    assert float(part[-1, -1]) != 0.0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / part.nbytes


@pytest.mark.parametrize("gibibytes", [1 / 4, pytest.param(1, marks=pytest.mark.prove)])
def test_values_of_a_part_need_little_beside_it(gibibytes: float) -> None:
    assert 1.0 < run_ranks(1, grown, gibibytes)[0] < 1.2
