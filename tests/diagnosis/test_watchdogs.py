"""Words of NCCL's watchdog, as torch writes them: who waited, in what, and for whom."""

from __future__ import annotations

import pytest
from watchdog_words import said

from hpc_mp.diagnosis.watchdogs import collective_timeout, thrown


@pytest.mark.parametrize(("lines", "apart", "words"), [
    ({0: said(0), 1: said(1), 2: ["step 11"], 3: said(3)}, 2,
     "ranks 0, 1, 3 waited for it 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ({0: said(0), 1: said(1), 2: said(2, 12, "BROADCAST"), 3: said(3)}, 2,
     "ranks 0, 1, 3 waited for it 600 s in ALLREDUCE (12), while it was in BROADCAST (12) (NCCL's watchdog)"),
    ({0: said(0), 1: said(1), 2: said(2), 3: said(3)}, None, "ranks 0-3 waited 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ({0: said(0), 1: said(1), 2: [], 3: []}, None, "ranks 0, 1 waited 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ({0: said(0, 5), 1: said(1, 7, "ALLGATHER"), 3: said(3, 9)}, 2,
     "ranks 0, 1, 3 waited for it 600 s in ALLREDUCE (5), ALLGATHER (7), ALLREDUCE (9) (NCCL's watchdog)"),
    ({0: said(0, 5), 1: said(1, 7), 2: said(2, 9), 3: said(3, 9)}, None,
     "ranks 0-3 waited 600 s in ALLREDUCE (5), ALLREDUCE (7), ALLREDUCE (9) (NCCL's watchdog)"),
    ({0: said(0)}, None, "rank 0 waited 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
])
def test_who_waited_for_whom(lines: dict[int, list[str]], apart: int | None, words: str) -> None:
    found = collective_timeout(lines, 4)
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
