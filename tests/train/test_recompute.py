"""Recomputation and activation offload change no result: with dropout, under every schedule, ZeRO stage and tensor degree. Ranks
keep for their backwards the chunks that the schedule says, and the bytes that planner and horizon say."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, ONE_STEP, WRONG, Engine, Reference, cases
from layouts import RankState, job, layout
from planting import planted

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.layout.schedule import peak_in_flight
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.activations import chunk_counts
from hpc_mp.rundir import read_json
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.pipeline import activations, pipeline

RECOMPUTE = ("full", "selective", "every-2")
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b", "breadth_first", "zero_bubble_v")
SEVERAL = ("interleaved_1f1b", "breadth_first")
DROPOUT = "train.dropout=0.2"
OFFLOAD = 'parallel.offload=["activations"]'


def degrees(schedule: str, zero: int) -> list[str]:
    """Four ranks: two tensor ranks without ZeRO, else two replicas; two stages of two and three layers, or four."""
    virtual = {"virtual_stages": 2} if schedule in SEVERAL else {}
    tensor, data = (1, 2) if zero else (2, 1)
    return layout(tensor, 2, data, schedule=schedule, zero=zero, microbatches=4, **virtual)


CASES: dict[str, tuple[str, list[str]]] = {}
for at, (mode, schedule) in enumerate(product(RECOMPUTE, SCHEDULES)):  # every mode meets every schedule and every ZeRO stage
    dropout = [DROPOUT] if at % 3 == 0 or mode == "selective" else []
    CASES[f"{mode} {schedule} zero{at % 4}"] = (
        (GPT2, LLAMA)[at // 2 % 2], [*degrees(schedule, at % 4), f'parallel.recompute="{mode}"', *dropout])
for at, (schedule, horizon) in enumerate(product(SCHEDULES, (0, 1, 2))):
    if (schedule, horizon) != ("1f1b", 2):  # two stages of it have no more than two computations between
        CASES[f"offload {schedule} horizon {horizon}"] = ((LLAMA, GPT2)[at % 2], [
            *degrees(schedule, (3, 0, 2, 1)[at % 4]), OFFLOAD, f"parallel.offload_horizon={horizon}",
            f'parallel.recompute="{("none", *RECOMPUTE)[(at + at // 4) % 4]}"', *([DROPOUT] if at % 2 else [])])
QUICK = {"full zero_bubble zero2", "selective gpipe zero3", "every-2 interleaved_1f1b zero3", "offload gpipe horizon 1",
         "offload zero_bubble_v horizon 0"}
assert CASES.keys() >= QUICK


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_memory_savers_change_nothing(engine: Engine, reference: Reference, name: str) -> None:
    model, overrides = CASES[name]
    expected = engine(model, DROPOUT) if DROPOUT in overrides else reference(model)
    assert engine(model, *overrides).distance(expected) < EXACT


def test_what_is_computed_again_is_the_same_to_the_last_bit(engine: Engine) -> None:
    plain = ["train.dropout=0.2", *LAYOUTS["pp2 gpipe M3"]]
    for more in (['parallel.recompute="full"'], [OFFLOAD, "parallel.offload_horizon=1"]):
        assert engine(LLAMA, *plain, *more).distance(engine(LLAMA, *plain)) == 0.0


# --- negative controls: each breaks one thing, and the same comparison must see it -----------------------------------


@planted(pipeline.Pipeline, "_differentiate")
def clock_stands_still(differentiate: Any, line: pipeline.Pipeline, *args: object) -> None:
    """A backward does not set the clock: what is computed again is dropped as in the last forward."""
    set_clock, line.clock.set = line.clock.set, lambda moment: None  # type: ignore[method-assign]
    differentiate(line, *args)
    line.clock.set = set_clock  # type: ignore[method-assign]


@planted(activations.SavedStorage, "come_back")
def nothing_comes_back(come_back: Any, storage: activations.SavedStorage, here: torch.Tensor) -> None:
    """What returns from the host is not what left."""
    come_back(storage, here)
    here.zero_()


CONTROLS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "full: the clock stands still": (clock_stands_still, [DROPOUT, 'parallel.recompute="full"']),
    "selective: the clock stands still": (clock_stands_still, [DROPOUT, 'parallel.recompute="selective"']),
    "offload: nothing comes back": (nothing_comes_back, [OFFLOAD, "parallel.offload_horizon=1"]),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_memory_saver_is_seen(place: Path, engine: Engine, control: str) -> None:
    sabotage, more = CONTROLS[control]
    right = engine(LLAMA, ONE_STEP, *([DROPOUT] if DROPOUT in more else []))
    broken = run_engine(job(place, LLAMA, [*layout(microbatches=3, schedule="gpipe"), *more, ONE_STEP]), before=sabotage)
    assert broken.distance(right) > WRONG


# --- what ranks keep for their backwards -----------------------------------------------------------------------------


def counted(place: Path, engine: Engine, overrides: list[str], steps: int = 1) -> tuple[JobSpec, Sequence[RankState]]:
    """Return a job and the state of every rank of its pipeline."""
    keys = [*overrides, f"train.steps={steps}"]
    return job(place, LLAMA, keys), engine(LLAMA, *keys).ranks


@pytest.mark.parametrize("schedule", cases(SCHEDULES, ("1f1b", "zero_bubble_v")))
def test_ranks_hold_as_many_chunks_as_their_schedule_says(place: Path, engine: Engine, schedule: str) -> None:
    stages = {"virtual_stages": 2} if schedule in SEVERAL else {}
    spec, ranks = counted(place, engine, layout(pipeline=2, schedule=schedule, microbatches=6, **stages))
    assert [rank.chunks for rank in ranks] == [peak_in_flight(actions) for actions in schedule_of(undivided(spec)).ranks]


MIDDLE = [*layout(pipeline=3, partition=[1, 3, 1], microbatches=4), 'parallel.schedule="gpipe"']


KEPT = [("every-2", []), ("full", [OFFLOAD, "parallel.offload_horizon=0"]), ("full", []), ("every-2", [OFFLOAD])]


@pytest.mark.parametrize(("recompute", "more"), cases(KEPT, KEPT[:2]))
def test_a_stage_keeps_the_inputs_of_its_blocks(place: Path, engine: Engine, recompute: str, more: list[str]) -> None:
    """Of the middle stage, which has neither embedding nor head, to the byte."""
    spec, ranks = counted(place, engine, [*MIDDLE, f'parallel.recompute="{recompute}"', *more])
    each, chunks = {"full": 3, "every-2": 2}[recompute] * 6 * 24 * 32 * 8, chunk_counts(undivided(spec))[1]
    assert ranks[1].memory["activations"] == chunks.here * each
    assert ranks[1].memory["away"] == chunks.away * each


def test_offload_lowers_the_bytes_on_the_device_as_the_horizon_says(place: Path, engine: Engine) -> None:
    """Without recomputation, on all stages; a step before lets the tables of rotary positions be known. The first stage keeps
    token ids too, and the last one logits."""
    _, ranks = counted(place, engine, MIDDLE, steps=2)
    whole = [rank.memory["activations"] / 4 for rank in ranks]  # of each of the four microbatches that gpipe holds
    assert whole[1] > 3 * 10 * 6 * 24 * 32 * 8, "three blocks keep far more than their inputs"
    for horizon in (0, 2):
        spec, less = counted(place, engine, [*MIDDLE, OFFLOAD, f"parallel.offload_horizon={horizon}"], steps=2)
        for chunks, rank, each in zip(chunk_counts(undivided(spec)), less, whole, strict=True):
            assert rank.memory["activations"] == chunks.here * each
            assert rank.memory["away"] == chunks.away * each
        assert less[1].memory["activations"] == (1 + horizon) * whole[1]


def test_selective_keeps_what_the_attention_core_needs_alone(place: Path, engine: Engine) -> None:
    """With dropout the core makes weights of every head, row and column, and a mask of them."""
    (_, plain), (_, less) = (counted(place, engine, [*MIDDLE, "train.dropout=0.1", f'parallel.recompute="{mode}"'])
                             for mode in ("none", "selective"))
    core = 4 * 3 * 6 * 8 * 24 * 24 * 8  # microbatches, blocks, samples, heads, rows, columns, bytes
    assert plain[1].memory["activations"] - less[1].memory["activations"] > 2 * core


@pytest.mark.parametrize(("recompute", "most"), cases((("full", 2), ("every-2", 3)), (("every-2", 3),)))
def test_zero_3_gathers_a_group_and_one_block(place: Path, tmp_path: Path, recompute: str, most: int) -> None:
    """The blocks that are computed again together, and the first one of the next group, which is asked for ahead."""
    spec = job(place, LLAMA, [*layout(data=2, zero=3, microbatches=2), f'parallel.recompute="{recompute}"', ONE_STEP])

    gathered: dict[str, Unit] = {}
    peaks = [0]

    @planted(Unit, "_fill")
    def noting(fill: Any, unit: Unit) -> None:
        gathered[unit.layout.unit] = unit
        peaks.append(sum("layers" in name and each.whole.untyped_storage().nbytes() > 0 for name, each in gathered.items()))
        (tmp_path / f"gathered-{dist.get_rank()}.json").write_text(json.dumps(max(peaks)))
        fill(unit)

    run_engine(spec, before=noting)
    assert [read_json(tmp_path / f"gathered-{rank}.json") for rank in range(2)] == [most, most]


def test_what_w_waits_for_is_counted(place: Path, engine: Engine) -> None:
    """The inputs of products stay from I to W: a schedule with W keeps more than the inputs of its blocks."""
    overrides = [*layout(pipeline=2, microbatches=4), 'parallel.recompute="full"']
    whole, split = (counted(place, engine, [*overrides, f'parallel.schedule="{schedule}"'])[1][1].memory["activations"]
                    for schedule in ("1f1b", "zero_bubble"))
    assert split > 2 * whole
