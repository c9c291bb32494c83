"""Experts that ranks share out, the losses of routers, and experts with a capacity: every layout equals one process, in fp64 to
1e-12, and drops what one process drops."""

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import run_engine
from exact import EXACT, LAYOUTS, MIXTRAL, ONE_STEP, WRONG, Engine, Plain, Reference, cases, check_state, keyed, keys_of
from hypothesis import given
from hypothesis import strategies as st
from layouts import job, layout, relaunch, trained_run
from planting import planted, wrapped
from ranks import run_ranks
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.layout import check_job, read_shape, undivided
from hpc_mp.layout.models import expert_capacity
from hpc_mp.planner.memory import units_of
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.parallel import capacity, expert_axis, gradients, groups, router_loss
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous

MANY = "mixtral with one choice of many experts"
WHOLE = "mixtral without groups or window"
MORE = keyed(table(__file__, "exact_experts.toml", "more"))


@pytest.mark.parametrize("name", cases(MORE, ("ep2 cp2",)))
def test_one_choice_of_many_and_cut_sequences(engine: Engine, reference: Reference, name: str) -> None:
    model, overrides = MORE[name]
    assert engine(model, *overrides).distance(reference(model)) < EXACT


# --- losses of routers -----------------------------------------------------------------------------------------------

LOSSES = ["train.router_balance=0.5", "train.router_z=0.05"]
ROUTED = {name: keys_of(*row) for name, row in table(__file__, "exact_experts.toml", "routed").items()}


@pytest.mark.parametrize("name", cases(ROUTED, ("ep2 zero3", "sp2 whole")))
def test_losses_of_routers_equal_those_of_plain_transformers(place: Path, engine: Engine, plain: Plain, name: str) -> None:
    model = WHOLE if name.startswith("cp") else MIXTRAL
    result, expected = engine(model, *LOSSES, *ROUTED[name]), plain(job(place, model, LOSSES))
    assert result.distance(expected) < EXACT
    assert result.routers == pytest.approx(expected.routers, rel=1e-12)
    assert result.distance(engine(model)) > WRONG, "they must change what is trained"


def test_an_even_choice_has_a_balance_of_one_in_each_layer(engine: Engine) -> None:
    first = engine(MIXTRAL, "train.router_balance=1.0").routers[0] / 5
    assert 1.0 < first < 1.05, "small random weights choose almost evenly"


def test_fp16_scales_the_losses_of_routers_too(place: Path, engine: Engine) -> None:
    """With another loss scale the same is trained, up to rounding."""
    common = ['train.precision="fp16"', *LOSSES, "train.eps=1.0"]
    small, large = (engine(MIXTRAL, *common, f"train.loss_scale={{ initial = {scale}, window = 0 }}") for scale in (1, 1024))
    assert abs(small.norms[0] - large.norms[0]) < 1e-2 * small.norms[0]


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases(
    ("ep2 zero0", "ep2 dp4 zero1", "ep2 zero1", "ep2 dp4 zero1 shard2", "ep2 dp4 zero3 shard2"), ("ep2 zero0",)))
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, name: str) -> None:
    check_state(job(place, MIXTRAL, LAYOUTS[name]), engine(MIXTRAL, *LAYOUTS[name]))


@pytest.mark.parametrize(("overrides", "sizes", "shards"), [
    (layout(data=4, expert=2), [3, 2], 2), (layout(data=4, expert=2, shard_degree=2), [3, 2], 2),
    (layout(data=6, expert=2, shard_degree=2), [3, 2], 1), (layout(data=6, expert=3, zero=0), [2, 2, 1], 1),
    (layout(data=2, expert=2), [3, 2], 1)])
def test_who_holds_which_experts(place: Path, overrides: list[str], sizes: list[int], shards: int) -> None:
    spec = job(place, MIXTRAL, overrides)
    division = replace(undivided(spec), layers=(5,))
    cuts = [division.expert_cut(rank) for rank in range(spec.parallel.expert)]
    assert [cut.part(5).stop - cut.part(5).start for cut in cuts] == sizes and cuts[0].shards == shards
    units = units_of(division, read_shape(spec), 0, 0)
    assert {unit.shards for unit in units.values() if unit.of_experts} == {shards}
    assert sum(unit.of_experts for unit in units.values()) == 5


CHANGES = {
    "ep2 to tp2 pp2": (LAYOUTS["ep2 dp4 zero3"], layout(2, 2, microbatches=3)),
    "tp2 pp2 to ep2": (layout(2, 2, microbatches=3), LAYOUTS["ep2 dp4 zero1"]),
    "ep2 to ep3": (LAYOUTS["ep2 zero0"], LAYOUTS["ep3 zero1"]),
}


@pytest.mark.parametrize("change", cases(CHANGES, ("ep2 to tp2 pp2", "tp2 pp2 to ep2")))
def test_a_checkpoint_goes_on_on_another_layout(place: Path, engine: Engine, change: str) -> None:
    before, after = CHANGES[change]
    run = trained_run(job(place, MIXTRAL, before))
    assert relaunch(run, place, MIXTRAL, [*after, "train.steps=5"]).distance(engine(MIXTRAL, "train.steps=5")) < EXACT


# --- the journey by itself -------------------------------------------------------------------------------------------


def there_and_back(counts: list[list[int]]) -> tuple[list[float], list[int], list[float], list[float]]:
    """One rank's rows, numbered by rank, expert and row, at their experts and back; and the gradient of a sum."""
    host = connect(identity(os.environ), meet(identity(os.environ), rendezvous(None))[0], "gloo")
    rank, axis = host.rank, host.block
    mine = counts[rank]
    rows = torch.tensor([[100.0 * rank + 10 * expert + row] for expert, count in enumerate(mine) for row in range(count)],
                        dtype=torch.bfloat16).reshape(-1, 1).requires_grad_()
    journey = expert_axis.ExpertAxis(axis, 3).journey(torch.tensor(mine).cumsum(0).int(), sum(mine))
    there = journey.out(rows)
    back = journey.back(2 * there)
    back.backward(torch.arange(len(back), dtype=torch.bfloat16).unsqueeze(1))
    assert rows.grad is not None
    return there.flatten().tolist(), journey.ends.tolist(), back.flatten().tolist(), rows.grad.flatten().tolist()


@pytest.mark.parametrize(("counts", "there"), table(__file__, "exact_experts.toml", "journeys"))
def test_rows_lie_by_expert_there_and_come_back_to_their_places(counts: list[list[int]], there: list[list[float]]) -> None:
    for rank, found in enumerate(run_ranks(2, there_and_back, counts)):
        own = [100.0 * rank + 10 * expert + row for expert, count in enumerate(counts[rank]) for row in range(count)]
        assert found[0] == there[rank] and found[1][-1] == len(there[rank])
        assert found[2] == [2 * value for value in own]
        assert found[3] == [2.0 * place for place in range(len(own))]


# --- experts with a capacity -----------------------------------------------------------------------------------------


SMALL = ["train.expert_capacity=0.75"]  # 0.75 × 24 × 2 / 5 = 7.2: 8 of each sample
LIMITED = keyed(table(__file__, "exact_experts.toml", "limited"))
QUICK = ("one M6", "sp2 ep2 experts whole", "pp2 ep2 zero_bubble", "ep2 zero3 full", "cp2 ring ep2 none")


@pytest.mark.parametrize("name", cases(LIMITED, QUICK))
def test_a_capacity_equals_one_process_with_the_same(place: Path, engine: Engine, plain: Plain, name: str) -> None:
    model, overrides = LIMITED[name]
    losses = LOSSES if name == "losses of routers" else []
    result = engine(model, *SMALL, *overrides)
    expected = plain(job(place, model, [*SMALL, *losses]))
    assert result.distance(expected) < EXACT
    assert result.dropped == pytest.approx(expected.dropped, rel=1e-12) and min(expected.dropped) > 0.05
    assert result.distance(engine(model, *losses)) > WRONG, "what is dropped must change what is trained"


def test_a_capacity_of_all_drops_nothing(engine: Engine) -> None:
    """Five experts, two choices: 2.5 times the even share is every token. The same to the last bit."""
    result = engine(MIXTRAL, "train.expert_capacity=2.5", *LAYOUTS["ep2 zero2"])
    without = engine(MIXTRAL, *LAYOUTS["ep2 zero2"])
    assert result.dropped == (0.0, 0.0, 0.0) and without.dropped == (None, None, None)
    assert result.distance(without) == 0.0


def test_one_choice_of_each_expert_drops_most(place: Path, engine: Engine, plain: Plain) -> None:
    """5 of 48 choices at most are taken, and many tokens have lost both."""
    overrides = ["train.expert_capacity=0.01"]
    result = engine(MIXTRAL, *overrides, *LAYOUTS["pp2 ep2 1f1b"])
    expected = plain(job(place, MIXTRAL, overrides))
    assert result.distance(expected) < EXACT and result.dropped == pytest.approx(expected.dropped, rel=1e-12)
    assert min(result.dropped) >= 1 - 5 / 48


# --- which choices are taken -----------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(0, 7), st.integers(1, 3), st.integers(1, 5), st.data())
def test_an_expert_takes_the_earliest_of_each_sample(samples: int, tokens: int, choices: int, most: int,
                                                     data: st.DataObject) -> None:
    size = samples * tokens * choices
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    index = torch.tensor(chosen, dtype=torch.int32).view(samples, tokens, choices)
    taken = capacity.kept(index, most)
    for sample in range(samples):
        seen: Counter[int] = Counter()
        for expert, found in zip(index[sample].flatten().tolist(), taken[sample].flatten().tolist(), strict=True):
            assert found == (seen[expert] < most)
            seen[expert] += 1
    before = tokens // 2  # a model remains causal: later tokens are of no account
    assert torch.equal(capacity.kept(index[:, :before], most), taken[:, :before])


@pytest.mark.parametrize(("factor", "sequence", "most"), table(__file__, "exact_experts.toml", "capacities"))
def test_how_many_choices_an_expert_takes(place: Path, factor: float | None, sequence: int, most: int | None) -> None:
    assert expert_capacity(factor, sequence, read_shape(job(place, MIXTRAL))) == most


def test_the_factor_counts_as_its_decimals_say() -> None:
    assert math.ceil(0.55 * 100 * 2 / 5) == 23


# --- negative controls -----------------------------------------------------------------------------------------------


def summed_over(other: Callable[[groups.Groups], groups.Axis]) -> Callable[[], None]:
    """Gradients of experts are summed over other ranks than those with the same ones."""
    seen: list[groups.Groups] = []
    noted = wrapped(groups.Groups, "holders", lambda holders: lambda self, of_experts: (
        seen.append(self), holders(self, of_experts))[1])

    @planted(gradients.UnitGradient, "_reduce")
    def wrong(reduce: Any, gradient: gradients.UnitGradient) -> None:
        own = gradient.replicate
        gradient.replicate = other(seen[0]) if gradient.layout.of_experts else own
        reduce(gradient)
        gradient.replicate = own

    return lambda: (noted(), wrong())


to_another_place = wrapped(expert_axis.Journey, "to_tokens", lambda back: lambda self, rows: back(self, rows).roll(1, 0))
# Rows of other ranks are computed by whichever expert is next.
unsorted_rows = wrapped(expert_axis.Journey, "to_experts", lambda there: lambda self, rows: expert_axis.all_to_all(
    rows, self.axis, self.sent, self.come))
loss_on_every_tensor_rank = wrapped(router_loss.RouterLoss, "of", lambda loss: lambda self, *given: 2 * loss(self, *given))
# Each rank balances its own tokens of a sample.
own_tokens_alone = wrapped(router_loss.RouterLoss, "of", lambda loss: lambda self, logits, chosen, experts, sharers: loss(
    self, logits, chosen, experts, ()))


# control: (the fault, the model, the layout, what is trained)
CONTROLS: dict[str, tuple[Callable[[], None], str, list[str], list[str]]] = {
    "gradients are summed over ranks with other experts": (
        summed_over(lambda made: made.replicate), MANY, LAYOUTS["ep2 zero0"], []),  # as many on each
    "gradients of experts are not summed": (summed_over(lambda made: groups.Axis()), MANY, LAYOUTS["ep2 dp4 zero0"], []),
    "tokens come back to another place": (to_another_place, MIXTRAL, LAYOUTS["ep2 zero0"], []),
    "rows are not sorted by expert": (unsorted_rows, MIXTRAL, LAYOUTS["ep2 zero0"], []),
    "routers' losses on every tensor rank": (loss_on_every_tensor_rank, MIXTRAL, ROUTED["tp2"], LOSSES),
    "routers' losses of own tokens alone": (own_tokens_alone, MIXTRAL, ROUTED["sp2 whole"], LOSSES),
    "capacity: counted over the microbatch": (wrapped(capacity, "kept", lambda kept: lambda index, most: kept(
        index.flatten(0, 1)[None], len(index) * most).view_as(index)), *LIMITED["one M6"], SMALL),
    "capacity: the last positions first": (wrapped(capacity, "kept", lambda kept: lambda index, most: kept(
        index.flip(1), most).flip(1)), *LIMITED["one M6"], SMALL),
    "capacity: own tokens alone": (
        wrapped(capacity, "sum_over", lambda total: lambda values, axes: values), *LIMITED["cp2 ring ep2 none"], SMALL),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_broken_is_seen(place: Path, plain: Plain, control: str) -> None:
    sabotage, model, overrides, training = CONTROLS[control]
    broken = run_engine(job(place, model, [*training, *overrides, ONE_STEP]), before=sabotage)
    assert broken.distance(plain(job(place, model, [*training, ONE_STEP]))) > WRONG


def test_drops_that_one_rank_alone_reports_are_seen(place: Path, plain: Plain) -> None:
    @planted(capacity.Capacity, "begin")
    def counted(begin: Any, limit: Any) -> None:
        begin(limit)
        limit.total = limit.total + torch.tensor([dist.get_rank(), 0.0])

    model, overrides = LIMITED["tp2 ep2 zero2"]
    result = run_engine(job(place, model, [*SMALL, *overrides, ONE_STEP]), before=counted)
    assert result.dropped != pytest.approx(plain(job(place, model, [*SMALL, ONE_STEP])).dropped, rel=1e-6)


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, list[str], str]] = {
    name: (model, keys_of(also, how), words)
    for name, (model, also, how, words) in table(__file__, "exact_experts.toml", "refused").items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(place: Path, name: str) -> None:
    model, overrides, words = REFUSED[name]
    with pytest.raises(HpcMpError) as refusal:
        spec: Any = job(place, model, overrides)
        check_job(spec, read_shape(spec))
    assert words in str(refusal.value)
