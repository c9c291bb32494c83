"""The rank program on real gloo ranks: right results are right, and every planted mistake in the data is seen."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from hpc_mp.doctor.bench.plan import split
from hpc_mp.doctor.bench.ranks import pattern
from hpc_mp.doctor.bench.ranks.program import introduce, measure_size
from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork, meet
from hpc_mp.doctor.bench.result import BenchRow, row
from hpc_mp.doctor.bench.spec import BenchSpec, dump_spec, load_spec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED

SIZE = 2**18


class Ear:
    """Keeps what a rank says."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def say(self, event: str, **facts: Any) -> None:
        self.heard.append({"event": event} | facts)


def measured(text: str, mistake: Callable[[], None] | None = None) -> list[dict[str, Any]]:
    """What this rank says; ``mistake`` is made on every rank before they measure."""
    spec, ear = load_spec(text), Ear()
    network = TorchNetwork(spec, *meet(spec, ear, os.environ, sys.stdin))  # type: ignore[arg-type]
    if mistake is not None:
        mistake()
    introduce(network, spec, ear)  # type: ignore[arg-type]
    for size in spec.sizes:
        measure_size(network, spec, size, ear)  # type: ignore[arg-type]
    network.close()
    return ear.heard


def rows(spec: BenchSpec, mistake: Callable[[], None] | None = None) -> list[BenchRow]:
    heard = run_ranks(spec.world, measured, dump_spec(spec), mistake)[0]
    return [row(spec, event["size"], event["ranks"]) for event in heard if event["event"] == "row"]


def spec_of(name: str, world: int = 4, how: str = "all", dtype: str = "float", sizes: tuple[int, ...] = (SIZE,)) -> BenchSpec:
    return BenchSpec(name, "gloo", 2, world // 2, split(world, world // 2, how), sizes, dtype, warmup=1, iterations=2, timeout=60)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_healthy_ranks_have_nothing_wrong(name: str) -> None:
    """At sizes that end in the middle of a pattern, and one of 16 bytes per rank."""
    found = rows(spec_of(name, sizes=(64, 4096, SIZE + 4 * 16 * 13)))
    assert [each.wrong for each in found] == [0, 0, 0]
    for each in found:
        for placed in PLACED:
            timing = each.worst.timings[placed]
            assert timing.seconds > 0 and len(timing.ranks) == 4 and all(len(own) == 2 for own in timing.ranks)
            assert (timing.wrong is None) == (placed not in COLLECTIVES[name].checked)


@pytest.mark.parametrize(("name", "more", "groups"), [
    *(("all_reduce", {"dtype": dtype}, 1) for dtype in ("double", "half", "bfloat16", "int32")),
    *(("all_gather", {"how": how}, 2) for how in ("rail", "node"))], ids=str)
def test_sums_are_exact_in_every_type_and_groups_do_not_mix(name: str, more: dict[str, str], groups: int) -> None:
    (found,) = rows(spec_of(name, **more))  # type: ignore[arg-type]
    assert found.wrong == 0 and len(found.groups) == groups


# --- mistakes --------------------------------------------------------------------------------------------------------

CALLS = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
         "all_to_all": "all_to_all_single", "broadcast": "broadcast"}


def patched(name: str, spoil: Callable[[torch.Tensor], None], at: int = 1, before: bool = False) -> None:
    """Spoil, on rank ``at``, what each such operation has received, or its input; short messages are those of the program."""
    real = getattr(dist, CALLS.get(name, name))

    def call(buffer: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        ours = dist.get_rank() == at and len(buffer) > 100
        if ours and before:
            spoil(buffer)
        done = real(buffer, *more, **keywords)
        if ours and not before:
            if name == "irecv":  # nobody can wait for it twice
                done.wait()
                done = SimpleNamespace(wait=lambda: None)
            spoil(buffer)
        return done

    setattr(dist, CALLS.get(name, name), call)


def one_element(receive: torch.Tensor) -> None:
    receive[len(receive) * 2 // 3] += 1


def swapped(receive: torch.Tensor) -> None:
    half = len(receive) // 2
    receive[:] = torch.cat([receive[half:], receive[:half]])


def stale(receive: torch.Tensor) -> None:
    receive[-len(receive) // 4:] = 0


def shifted(receive: torch.Tensor) -> None:
    receive[1:] = receive[:-1].clone()


def of_another(receive: torch.Tensor) -> None:
    pattern.write(receive, torch.from_numpy(pattern.numbers(1, 1, 251)).float())


@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_element_on_one_rank_is_counted(name: str) -> None:
    (found,) = rows(spec_of(name), lambda: patched(name, one_element))
    wrong = [found.worst.timings[placed].wrong for placed in COLLECTIVES[name].checked]
    assert wrong == [1] * len(wrong)


@pytest.mark.parametrize(("name", "mistake", "most"), [
    # at least half of what was spoilt differs
    ("all_reduce", lambda: patched("all_reduce", shifted, 3), 1 / 16),
    ("all_gather", lambda: patched("all_gather", swapped, 3), 1 / 16),
    ("all_to_all", lambda: patched("all_to_all", stale, 3), 1 / 16),
    ("all_reduce", lambda: patched("all_reduce", torch.Tensor.zero_, 2, before=True), 0.999),  # all ranks have wrong sums
    ("sendrecv", lambda: patched("irecv", of_another, 0), 0.9),
], ids=["shifted", "swapped", "stale", "adds nothing", "from another rank"])
def test_parts_in_the_wrong_place_or_missing_are_seen(name: str, mistake: Callable[[], None], most: float) -> None:
    (found,) = rows(spec_of(name), mistake)
    assert found.wrong > SIZE / 4 * most


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(2, 64), st.integers(0, 3))
def test_every_element_is_somebodys_and_sums_stay_exact(ranks: int, repetition: int) -> None:
    parts = [pattern.addend(rank, ranks, repetition) for rank in range(ranks)]
    summed = pattern.total(ranks, repetition)
    assert (sum(parts) == summed).all() and summed.min() >= 1 and summed.max() <= 256
    assert (summed.astype(np.float32) == torch.from_numpy(summed).to(torch.bfloat16).double().numpy()).all()


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, pattern.PERIOD - 1))
def test_other_ranks_and_places_have_other_numbers(one: int, other: int, shift: int) -> None:
    mine = pattern.numbers(one, 1, 251)
    assert (mine == pattern.shifted(mine, shift)).mean() < 0.03
    if one != other:
        assert (mine == pattern.numbers(other, 1, 251)).mean() < 0.03
    assert (mine == pattern.numbers(one, 2, 251)).mean() < 0.03


@given(st.integers(1, 3 * pattern.PERIOD), st.integers(0, 10**6))
def test_what_is_written_is_found_and_a_change_too(length: int, place: int) -> None:
    buffer = np.zeros(length)
    table = pattern.numbers(5, 0, 251)
    pattern.write(buffer, table)
    assert pattern.wrong(buffer, table) == 0 and buffer[-1] == table[(length - 1) % pattern.PERIOD]
    buffer[place % length] += 1
    assert pattern.wrong(buffer, table) == 1
