"""Which activations leave the device, and when they come back: a pure function of a rank's actions and a horizon."""

from __future__ import annotations

from itertools import product

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.schedule import Action, Residency, build, check_schedule, peak_away, peak_in_flight, peak_resident, residency
from hpc_mp.layout.schedule.residency import distances

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("breadth_first", 2), ("zero_bubble", 1), ("zero_bubble_v", 1)]


def test_by_hand() -> None:
    actions, = build("gpipe", 1, 4).ranks  # F0 F1 F2 F3 B0 B1 B2 B3
    plan = residency(actions, 1)
    assert plan.away == {(0, m) for m in range(4)}
    assert plan.returns == {Action("F", 0, 3): ((0, 0),), Action("B", 0, 0): ((0, 1),), Action("B", 0, 1): ((0, 2),),
                            Action("B", 0, 2): ((0, 3),)}
    assert (peak_in_flight(actions), peak_resident(actions, plan), peak_away(actions, plan)) == (4, 2, 3)
    assert peak_resident(actions, residency(actions, 0)) == 1, "only the chunk that computes"
    assert residency(actions, 3) == Residency(), "none has more than three computations between"


def test_the_steady_state_of_1f1b_keeps_as_many_as_its_horizon_needs() -> None:
    """However many stages: with the default horizon the first rank holds three chunks instead of one for each stage."""
    for stages in (8, 16, 32):
        first = build("1f1b", stages, 64).ranks[0]
        assert peak_in_flight(first) == stages
        assert peak_resident(first, residency(first, 2)) == 3


def test_an_offload_that_would_do_nothing_is_refused() -> None:
    def job(**parallel: object) -> JobSpec:
        return JobSpec.model_validate({
            "job": {"ranks_per_node": 2}, "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["text"], "sequence_length": 8}, "train": {"steps": 1, "global_batch": 8},
            "parallel": {"pipeline": 2, "microbatches": 8, "offload": ["activations"], **parallel}})

    check_schedule(job(offload_horizon=1))
    check_schedule(job(schedule="gpipe"))
    with pytest.raises(HpcMpError, match=r"horizon = 2: leaves all .* at most 2 other .* lie .* Set it to 1 or less"):
        check_schedule(job())
    with pytest.raises(HpcMpError, match=r"horizon = 0: leaves all .* at most 0 .* use more microbatches"):
        check_schedule(job(microbatches=1, pipeline=1, offload_horizon=0))


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_every_chunk_is_back_in_time_and_no_earlier(name: str, virtual: int) -> None:
    for stages, microbatches, horizon in product((1, 2, 4), (4, 8), (0, 1, 2, 5)):
        for actions in build(name, stages, microbatches, virtual).ranks:
            plan, between = residency(actions, horizon), distances(actions)
            assert plan.away == {chunk for chunk, count in between.items() if count > horizon}
            assert sorted(chunk for chunks in plan.returns.values() for chunk in chunks) == sorted(plan.away)
            computed = [action for action in actions if action.kind in "FBIW"]
            for action, chunks in plan.returns.items():
                later = computed[computed.index(action):][horizon]
                assert later.kind in ("B", "I") and chunks == ((later.stage, later.microbatch),)
                assert computed.index(Action("F", later.stage, later.microbatch)) < computed.index(action)


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_a_shorter_horizon_never_keeps_more(name: str, virtual: int) -> None:
    for stages, microbatches in product((1, 2, 4), (4, 8)):
        for actions in build(name, stages, microbatches, virtual).ranks:
            resident = [peak_resident(actions, residency(actions, horizon)) for horizon in range(0, 40, 3)]
            assert resident == sorted(resident) and resident[-1] == peak_resident(actions, Residency()) == peak_in_flight(actions)
            for horizon, here in zip(range(0, 40, 3), resident, strict=True):
                assert here + peak_away(actions, residency(actions, horizon)) >= peak_in_flight(actions)
