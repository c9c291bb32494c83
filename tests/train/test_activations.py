"""What running ranks keep for their backwards: chunks as the schedule says, bytes as the planner and the horizon say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engines import run_engine
from exact import LLAMA, ONE_STEP, Engine, cases
from layouts import RankState, job, layout
from planting import planted

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import read_shape, stage_layers
from hpc_mp.layout.schedule import peak_in_flight, schedule_of
from hpc_mp.planner.activations import chunk_counts, kept_inputs
from hpc_mp.rundir import read_json
from hpc_mp.train.engine.data_axis import Unit

OFFLOAD = 'parallel.offload=["activations"]'
SCHEDULES = {
    "1f1b": {}, "gpipe": {}, "zero_bubble": {}, "zero_bubble_v": {},
    "interleaved_1f1b": {"virtual_stages": 2}, "breadth_first": {"virtual_stages": 2},
}


def counted(place: Path, engine: Engine, overrides: list[str], steps: int = 1) -> tuple[JobSpec, Sequence[RankState]]:
    """Return a job and the state of every rank of its pipeline."""
    keys = [*overrides, f"train.steps={steps}"]
    return job(place, LLAMA, keys), engine(LLAMA, *keys).ranks


@pytest.mark.parametrize("schedule", cases(SCHEDULES, ("1f1b", "zero_bubble_v")))
def test_ranks_hold_as_many_chunks_as_their_schedule_says(place: Path, engine: Engine, schedule: str) -> None:
    spec, ranks = counted(place, engine, layout(pipeline=2, schedule=schedule, microbatches=6, **SCHEDULES[schedule]))
    assert [rank.chunks for rank in ranks] == [peak_in_flight(actions) for actions in schedule_of(spec).ranks]


MIDDLE = [*layout(pipeline=3, partition=[1, 3, 1], microbatches=4), 'parallel.schedule="gpipe"']


KEPT = [("every-2", []), ("full", [OFFLOAD, "parallel.offload_horizon=0"]), ("full", []), ("every-2", [OFFLOAD])]


@pytest.mark.parametrize(("recompute", "more"), cases(KEPT, KEPT[:2]))
def test_a_stage_keeps_the_inputs_of_its_blocks(place: Path, engine: Engine, recompute: str, more: list[str]) -> None:
    """Of the middle stage, which has neither embedding nor head, to the byte."""
    spec, ranks = counted(place, engine, [*MIDDLE, f'parallel.recompute="{recompute}"', *more])
    shape = read_shape(spec)
    each, chunks = kept_inputs(shape, spec, stage_layers(spec, shape)), chunk_counts(spec)[1]
    assert each == {"full": 3, "every-2": 2}[recompute] * 6 * 24 * 32 * 8
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
        for chunks, rank, each in zip(chunk_counts(spec), less, whole, strict=True):
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
