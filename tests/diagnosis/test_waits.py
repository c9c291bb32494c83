"""Who waits for whom: chains, loops, silence, messages that have been passed since; and the words of NCCL's watchdog."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from watchdog_words import said

from hpc_mp.diagnosis.cause import root_cause
from hpc_mp.diagnosis.waits import Awaited, awaited
from hpc_mp.diagnosis.watchdogs import collective_timeout, thrown
from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir import create_run
from hpc_mp.rundir.failures import RankFailure
from hpc_mp.rundir.standings import Standing, Wait, read_standings, standing_of, write_standing

NOW = 1000.0


def stands(rank: int, wait: Wait | None = None, passed: Mapping[str, int] | None = None, ago: float = 0.0, since: float = 10.0,
           period: float = 1.0) -> Standing:
    return Standing(rank, NOW - ago, NOW - since, period, 3, 0, "forward (stage.py:1)", wait, dict(passed or {}))


def collective(number: int, *ranks: int, group: str = "g") -> Wait:
    return Wait("all_reduce", ranks, group, number)


def receive(source: int, number: int = 1) -> Wait:
    return Wait("recv", (source,), f"from {source}", number)


def test_the_rank_at_the_end_of_a_chain() -> None:
    """0 waits in a receive for 1, 1 in an all-reduce for 2, 2 is stopped and has written nothing."""
    chain = [stands(0, receive(1)), stands(1, collective(5, 2), {"g": 5})]
    assert awaited(chain, range(3)) == Awaited(2, (0, 1))
    assert awaited([*chain, stands(2, None, {"g": 4})], range(3)) == Awaited(2, (0, 1)), "it writes: stuck in a data loader"


def test_of_ranks_that_all_stand_in_a_collective_the_one_behind_is_named() -> None:
    """Two groups: rank 2 stands in an earlier message of the group that the others wait in."""
    found = [stands(0, collective(7, 1, 2), {"g": 7}), stands(1, collective(7, 0, 2), {"g": 7}),
             stands(2, collective(3, 3, group="h"), {"g": 6, "h": 3}), stands(3, None, {"h": 2})]
    assert awaited(found, range(4)) == Awaited(3, (0, 1, 2)), "2 waits for 3 in an earlier message of another group"
    assert awaited([*found[:2], stands(2, None, {"g": 6})], range(3)) == Awaited(2, (0, 1))


def test_who_waits_for_nobody_in_vain_and_whose_message_has_been_passed_is_not_named() -> None:
    """A rank that was killed before it could write is awaited by nobody."""
    assert awaited([stands(0, receive(1)), stands(2, receive(1))], range(4)) == Awaited(1, (0, 2))
    sent = stands(1, None, {"from 1": 1})
    assert awaited([stands(0, receive(1)), sent], range(2)) is None
    assert awaited([stands(0, receive(1, 2)), sent], range(2)) == Awaited(1, (0,))


def test_old_news_of_a_rank_is_silence() -> None:
    """Rank 1 stood in this very message before, was stopped, and has not written since; a rank's last word never gets old."""
    both = {"g": 5}
    others = [stands(0, collective(5, 1, 2), both), stands(2, collective(5, 0, 1), both)]
    assert awaited([*others, stands(1, collective(5, 0, 2), both, ago=3)], range(3)) is None, "all are there: nobody is behind"
    assert awaited([*others, stands(1, collective(5, 0, 2), both, ago=4)], range(3)) == Awaited(1, (0, 2))
    assert awaited([*others, stands(1, collective(5, 0, 2), both, ago=60)], range(3)) == Awaited(1, (0, 2))
    assert awaited([*others, stands(1, collective(5, 0, 2), both, ago=60, period=0)], range(3)) is None


@pytest.mark.parametrize(("ago", "kind", "rank"), [(11.0, "silent", 1), (4.0, "hang", 0)])
def test_a_rank_that_was_stopped_in_a_message_which_all_had_reached(ago: float, kind: str, rank: int) -> None:
    """It had waited there for so long that its record exists. The rank that hung with it is awaited by a third one."""
    pair = {"tp": 5}
    last = stands(0, collective(5, 1, group="tp"), pair, period=0)
    hung = RankFailure(0, "n1", "hang", "no step was finished in 10 s", NOW, 1, standing=last)
    stood = [stands(1, collective(5, 0, group="tp"), pair, ago=ago, since=12, period=5), stands(2, receive(0), period=5)]
    cause = root_cause([hung], stood, [RankPlace(number, 0, number, number, 0, 0, 0) for number in range(3)], ["n1"])
    assert cause is not None and (cause.rank, cause.kind) == (rank, kind)


def test_ranks_that_wait_for_each_other_and_ranks_that_do_not_wait() -> None:
    """Of a deadlock the one that has stood longest."""
    loop = [stands(0, receive(1), since=5), stands(1, receive(0), since=9), stands(2, receive(0), since=20)]
    assert awaited(loop, range(3)) == Awaited(1, (0, 2))
    assert awaited([], range(4)) is None
    assert awaited([stands(0), stands(1)], range(4)) is None


@given(st.integers(2, 12), st.data())
def test_whoever_is_stopped_in_any_forest_of_waits(size: int, data: st.DataObject) -> None:
    """Every rank waits for one with a lower number, rank 0 for nobody: all chains end at it."""
    found = [stands(rank, receive(data.draw(st.integers(0, rank - 1))), since=rank) for rank in range(1, size)]
    assert awaited(data.draw(st.permutations(found)), range(size)) == Awaited(0, tuple(range(1, size)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    one, other = stands(0, collective(5, 1, 2), {"g": 5}), stands(3)
    for standing in (one, other):
        write_standing(run, 1, standing)
    run.standing(1, 7).write_text("{")
    assert read_standings(run, 1) == [one, other] and read_standings(run, 2) == []
    with pytest.raises(ValueError, match="not a record"):
        standing_of({"rank": 1})


def hung(rank: int, at: float, since: float, place: str, wait: Wait | None = None) -> RankFailure:
    standing = Standing(rank, at, since, 0.0, 3, 0, place, wait, {})
    return RankFailure(rank, f"n{rank // 2}", "hang", f"Hung: no step was finished in 10 s; the rank stands in {place}", at,
                       standing=standing)


def test_a_rank_that_lost_another_is_an_echo() -> None:
    """Rank 0 hangs in its data loader. Rank 1 waited for it, and lost it or another rank. As recorded on a Slurm of four."""
    places = [RankPlace(rank, rank // 2, rank % 2, 0, rank // 2, 0, rank % 2) for rank in range(4)]
    lost = replace(hung(1, 829.9, 819.71, "wait (pipeline.py:65)", receive(0)), kind="peer", message="connection closed")
    failures = [hung(0, 829.97, 819.73, "batch (trainer.py:302)"), lost,
                hung(2, 829.82, 819.7, "wait (pipeline.py:65)", receive(0)),
                hung(3, 829.72, 819.7, "wait (pipeline.py:65)", receive(1))]
    failure = root_cause(failures, (), places, ("n0", "n1"))
    assert failure is not None and failure.rank == 0


@pytest.mark.parametrize(("lines", "apart", "words"), table(__file__, "waits.toml", "watchdogs"))
def test_who_waited_for_whom(lines: dict[str, Any], apart: int | None, words: str) -> None:
    logs = {int(rank): line.splitlines() if isinstance(line, str) else said(*line) for rank, line in lines.items()}
    found = collective_timeout(logs, 4)
    assert found is not None and (found.apart, str(found)) == (apart, words)


def test_of_two_ranks() -> None:
    found = collective_timeout({0: said(0), 1: ["step 11"]}, 2)
    assert found is not None and found.apart == 1
    assert collective_timeout({0: ["step 1", "Watchdog is fine"], 1: []}, 2) is None


def test_what_a_cpp_exception_says() -> None:
    assert "Watchdog caught" in thrown(said(1))
    assert thrown(said(1)[:2]).startswith("Watchdog caught") and thrown(["step 11"]) == ""
    assert thrown(["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  bad_alloc"]) == "bad_alloc"
    assert thrown(["  what():  not ours", "terminate called without an active exception"]) == ""
