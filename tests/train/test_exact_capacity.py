"""Experts with a capacity: every layout drops what one process drops, in fp64 to 1e-12, and says how much that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import run_engine
from exact import EXACT, LAYOUTS, MIXTRAL, ONE_STEP, WRONG, Engine, Plain, cases
from hypothesis import given
from hypothesis import strategies as st
from layouts import job, layout
from planting import planted, wrapped

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import check_layout, expert_capacity, read_shape
from hpc_mp.train.engine import capacity
from hpc_mp.train.engine.collectives import Running

WHOLE = "mixtral without groups or window"
MANY = "mixtral with one choice of many experts"
SMALL = ["train.expert_capacity=0.75"]  # 0.75 × 24 × 2 / 5 = 7.2: 8 of each sample
LOSSES = ["train.router_balance=0.5", "train.router_z=0.05"]
LIMITED: dict[str, tuple[str, list[str]]] = {
    "one": (MIXTRAL, []),
    "one M6": (MIXTRAL, layout(microbatches=6)),
    "losses of routers": (MIXTRAL, [*LOSSES, *layout(data=2, expert=2, microbatches=2)]),
    "tp2": (MIXTRAL, layout(2, microbatches=2)),
    "tp2 attention": (MIXTRAL, layout(2, tensor_modules=["*.self_attn"], microbatches=2)),
    "sp2": (MIXTRAL, LAYOUTS["sp2"]),
    "sp2 ep2 experts whole": (MIXTRAL, [*LAYOUTS["sp2 ep2 experts whole"], "parallel.microbatches=3"]),
    "dp2 zero1": (MIXTRAL, LAYOUTS["dp2 zero1"]), "dp2 zero3": (MIXTRAL, LAYOUTS["dp2 zero3"]),
    **{name: (MIXTRAL, LAYOUTS[name]) for name in (
        "ep2 zero2", "ep3 zero1", "ep2 dp4 zero3 shard2", "tp2 ep2 zero2", "pp2 ep2 1f1b", "pp2 ep2 zero_bubble",
        "pp2 ep2 zero3 zero_bubble_v", "tp2 pp2 ep2 zero3", "ep2 zero3 full", "pp2 ep2 every-2 zero_bubble", "ep2 offload")},
    "activations on the host": (MIXTRAL, layout(pipeline=2, microbatches=4, offload=["activations"], offload_horizon=0)),
    "tp2 pp2 full": (MIXTRAL, layout(2, 2, microbatches=3, recompute="full")),
    **{f"cp2 {method} ep2 {recompute}": (WHOLE, layout(
        context=2, expert=2, context_method=f'"{method}"', microbatches=2, recompute=f'"{recompute}"'))
       for method in ("ring", "ulysses") for recompute in ("none", "full")},
    "sp2 cp2 experts whole": (WHOLE, layout(2, context=2, sequence="true", tensor_modules=["*.self_attn"], microbatches=2)),
    "ep4 dp4 zero3": (MANY, layout(data=4, expert=4, zero=3, microbatches=2)),
}
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


# --- negative controls -----------------------------------------------------------------------------------------------


CONTROLS: dict[str, tuple[Callable[[], None], str]] = {
    "counted over the microbatch": (wrapped(capacity, "kept", lambda kept: lambda index, most: kept(
        index.flatten(0, 1)[None], len(index) * most).view_as(index)), "one M6"),
    "the last positions first": (wrapped(capacity, "kept", lambda kept: lambda index, most: kept(
        index.flip(1), most).flip(1)), "one M6"),
    "own tokens alone": (wrapped(capacity, "all_reduce", lambda reduce: lambda values, axis: Running()), "cp2 ring ep2 none"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_capacity_is_seen(place: Path, plain: Plain, control: str) -> None:
    sabotage, name = CONTROLS[control]
    model, overrides = LIMITED[name]
    broken = run_engine(job(place, model, [*SMALL, *overrides, ONE_STEP]), before=sabotage)
    assert broken.distance(plain(job(place, model, [*SMALL, ONE_STEP]))) > WRONG


def test_drops_that_one_rank_alone_reports_are_seen(place: Path, plain: Plain) -> None:
    @planted(capacity.Capacity, "begin")
    def counted(begin: Any, limit: Any) -> None:
        begin(limit)
        limit.total = limit.total + torch.tensor([dist.get_rank(), 0.0])

    model, overrides = LIMITED["tp2 ep2 zero2"]
    result = run_engine(job(place, model, [*SMALL, *overrides, ONE_STEP]), before=counted)
    assert result.dropped != pytest.approx(plain(job(place, model, [*SMALL, ONE_STEP])).dropped, rel=1e-6)


# --- which choices are taken -----------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(0, 7), st.integers(1, 3), st.integers(1, 5), st.data())
def test_an_expert_takes_the_earliest_of_each_sample(
    samples: int, tokens: int, choices: int, most: int, data: st.DataObject,
) -> None:
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


@pytest.mark.parametrize(("factor", "sequence", "most"), [
    (None, 24, None), (0.75, 24, 8), (1.0, 24, 10), (2.5, 24, 24), (0.01, 24, 1),
    (0.55, 100, 22),  # in binary the product is a bit more than 22
])
def test_how_many_choices_an_expert_takes(place: Path, factor: float | None, sequence: int, most: int | None) -> None:
    assert expert_capacity(factor, sequence, read_shape(job(place, MIXTRAL))) == most


def test_the_factor_counts_as_its_decimals_say() -> None:
    assert math.ceil(0.55 * 100 * 2 / 5) == 23


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "value", "words"), [
    ("llama", "1.0", "train.expert_capacity = 1: has no effect: llama has no experts"),
    (MIXTRAL, "0.0", "train.expert_capacity"), (MIXTRAL, "-1.0", "train.expert_capacity")])
def test_what_is_no_capacity_is_refused(place: Path, model: str, value: str, words: str) -> None:
    with pytest.raises(HpcMpError) as refusal:
        spec = job(place, model, [f"train.expert_capacity={value}"])
        check_layout(read_shape(spec), spec)
    assert words in str(refusal.value)
