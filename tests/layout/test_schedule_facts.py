"""What follows from a schedule: proved arrivals of messages, activations that leave the device, and layers of its stages."""

from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import Request, requests

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.layout import schedule as schedules
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Action, Residency, build, partition, peak_in_flight, peaks, residency
from hpc_mp.layout.schedule.actions import consumed, produced
from hpc_mp.layout.schedule.residency import distances
from hpc_mp.layout.schedule.simulate import Times
from hpc_mp.layout.schedule_of import check_schedule

# --- arrivals: what a schedule says to have arrived has arrived, at whatever speed its ranks compute -----------------


@st.composite
def speeds(draw: st.DrawFn) -> Times:
    """Every kind of computation on every stage takes a time of its own."""
    stages = range(24)
    return {kind: dict.fromkeys(stages, 1.0) | draw(st.dictionaries(st.sampled_from(stages), st.floats(0.01, 100), max_size=8))
            for kind in ("F", "B", "I", "W")}


def early(schedule: schedules.Schedule, times: Times, steps: int = 0) -> list[tuple[Action, Action]]:
    """(computation, send) of all proofs that do not hold at these speeds: what was sent is not yet being consumed when the
    computation begins, or the one that stands ``steps`` computations before it."""
    slots = schedules.simulate(schedule, times).ranks
    begins = {slot.action: slot.start for rank in slots for slot in rank}
    uses = {consumed(action, schedule.stages): begin for action, begin in begins.items()}
    found = []
    for rank, computations in enumerate(slots):
        order = [slot.action for slot in computations]
        for action, sends in schedules.arrivals(schedule, rank).items():
            moment = begins[order[max(0, order.index(action) - steps)]]
            found += [(action, send) for send in sends if uses[produced(send, schedule.stages)] > moment]
    return found


@given(requests(), speeds())
def test_what_is_said_to_have_arrived_has_arrived(request: Request, times: Times) -> None:
    assert early(build(*request), times) == []


def test_a_computation_sooner_it_may_not_have() -> None:
    """The negative control: the same proofs, given one computation too soon."""
    assert early(build("1f1b", 3, 6), {"F": {0: 1, 1: 50, 2: 1}, "B": 1}, steps=1)


@given(requests())
def test_each_message_is_proved_once_and_outputs_with_their_gradients(request: Request) -> None:
    schedule = build(*request)
    for rank, actions in enumerate(schedule.ranks):
        proved = schedules.arrivals(schedule, rank)
        sends = [send for computation in actions for send in proved.get(computation, ())]
        assert len(sends) == len(set(sends)) and set(sends) <= set(actions)
        assert {action for action in actions if action.kind == "SEND_F"} <= set(sends)
        for computation, known in proved.items():
            assert all(actions.index(send) < actions.index(computation) for send in known)


def most_kept(schedule: schedules.Schedule, rank: int) -> int:
    """The largest number of sent messages whose arrival nothing has proved yet."""
    proved, kept, most = schedules.arrivals(schedule, rank), 0, 0
    for action in schedule.ranks[rank]:
        kept += action.kind.startswith("SEND") - len(proved.get(action, ()))
        most = max(most, kept)
    return most


@pytest.mark.parametrize(("name", "virtual", "wanted"), [
    ("1f1b", 1, [4, 4, 3, 2]), ("zero_bubble", 1, [4, 4, 3, 2]), ("zero_bubble_v", 1, [7, 6, 6, 4]),
    ("interleaved_1f1b", 2, [11, 11, 9, 7])])
def test_what_is_kept_does_not_grow_with_the_microbatches(name: str, virtual: int, wanted: list[int]) -> None:
    for microbatches in (16, 64):
        schedule = build(name, 4, microbatches, virtual)
        assert [most_kept(schedule, rank) for rank in range(4)] == wanted
    assert all(kept <= peak_in_flight(actions) + 2 for kept, actions in zip(wanted, schedule.ranks, strict=True))


def test_under_gpipe_as_many_as_chunks() -> None:
    schedule = build("gpipe", 4, 16)
    assert [most_kept(schedule, rank) for rank in range(4)] == [peak_in_flight(actions) for actions in schedule.ranks]


# --- residency: which activations leave the device, and when they come back ------------------------------------------


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("breadth_first", 2), ("zero_bubble", 1), ("zero_bubble_v", 1)]


def test_by_hand() -> None:
    actions, = build("gpipe", 1, 4).ranks  # F0 F1 F2 F3 B0 B1 B2 B3
    plan = residency(actions, 1)
    assert plan.away == {(0, m) for m in range(4)}
    assert plan.returns == {Action("F", 0, 3): ((0, 0),), Action("B", 0, 0): ((0, 1),), Action("B", 0, 1): ((0, 2),),
                            Action("B", 0, 2): ((0, 3),)}
    assert (peak_in_flight(actions), *peaks(actions, plan)) == (4, 2, 3)
    assert peaks(actions, residency(actions, 0))[0] == 1, "only the chunk that computes"
    assert residency(actions, 3) == Residency(), "none has more than three computations between"


def test_the_steady_state_of_1f1b_keeps_as_many_as_its_horizon_needs() -> None:
    """However many stages: with the default horizon the first rank holds three chunks instead of one for each stage."""
    for stages in (8, 16, 32):
        first = build("1f1b", stages, 64).ranks[0]
        assert peak_in_flight(first) == stages
        assert peaks(first, residency(first, 2))[0] == 3


def test_an_offload_that_would_do_nothing_is_refused() -> None:
    def job(**parallel: object) -> Layout:
        return undivided(JobSpec.model_validate({
            "job": {"ranks_per_node": 2}, "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["text"], "sequence_length": 8}, "train": {"steps": 1, "global_batch": 8},
            "parallel": {"pipeline": 2, "microbatches": 8, "offload": ["activations"], **parallel}}))

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
            resident = [peaks(actions, residency(actions, horizon))[0] for horizon in range(0, 40, 3)]
            assert resident == sorted(resident) and resident[-1] == peaks(actions, Residency())[0] == peak_in_flight(actions)
            for horizon, here in zip(range(0, 40, 3), resident, strict=True):
                assert here + peaks(actions, residency(actions, horizon))[1] >= peak_in_flight(actions)


# --- layers to stages: the exact partition against brute force -------------------------------------------------------


def stage_costs(costs: list[float], counts: tuple[int, ...], first: float, last: float) -> list[Fraction]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    found = [sum(map(Fraction, costs[begin:end]), Fraction(0)) for begin, end in pairwise(ends)]
    found[0] += Fraction(first)
    found[-1] += Fraction(last)
    return found


def brute_force(costs: list[float], stages: int, first: float, last: float) -> tuple[int, ...]:
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(len(costs) + 1), stages - 1)]
    counts = [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]

    def key(candidate: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        each = stage_costs(costs, candidate, first, last)
        return max(each), sum((cost * cost for cost in each), Fraction(0)), candidate

    return min(counts, key=key)


costs_of_layers = st.one_of(st.integers(0, 4).map(float), st.floats(0, 100, allow_nan=False))


@given(st.data(), st.lists(costs_of_layers, min_size=1, max_size=9), costs_of_layers, costs_of_layers)
def test_equals_brute_force(data: st.DataObject, costs: list[float], first: float, last: float) -> None:
    stages = data.draw(st.integers(1, len(costs) + 2))
    assert partition(costs, stages, first, last) == brute_force(costs, stages, first, last)


@pytest.mark.parametrize(("layers", "stages", "counts"), [
    (8, 4, (2, 2, 2, 2)), (7, 3, (2, 2, 3)), (3, 3, (1, 1, 1)), (5, 1, (5,)), (10, 4, (2, 2, 3, 3))])
def test_equal_layers(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert partition([0.1] * layers, stages) == counts  # 0.1: sums of floats must not break ties


@pytest.mark.parametrize("stages", [0, 7])
def test_more_stages_than_layers_and_ends_are_refused(stages: int) -> None:
    with pytest.raises(HpcMpError, match=f"{stages} pipeline stages for 4 layers"):
        partition([1.0] * 4, stages)
