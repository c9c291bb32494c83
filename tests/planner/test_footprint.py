"""Predicted memory of ranks: compared with dry runs of the engine, and what must hold between layouts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import layout
from tables import table

from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Degrees
from hpc_mp.planner import footprint as predicting
from hpc_mp.planner.footprint import BUFFERS, CONTEXT, LOGITS, TILE, Footprint, footprint
from hpc_mp.planner.memory import state_bytes
from hpc_mp.train.dry_run import dry_run as dry
from hpc_mp.train.dry_run import host
from hpc_mp.train.model import vocabulary
from hpc_mp.train.rank.bootstrap import lay_out

MODELS: dict[str, str] = table(__file__, "footprint.toml", "models")
JOB: str = table(__file__, "footprint.toml", "job")
MORE: dict[str, str] = table(__file__, "footprint.toml", "more")
LARGE = ModelShape(
    model_type="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=128256,
    positions=8192, tied=False, attention_bias=False, mlp_bias=False, gated_mlp=True)


def spec_of(directory: Path, model: str, overrides: Sequence[str]) -> JobSpec:
    path = directory / "job.toml"
    path.write_text(JOB.format(model=MODELS[model], more=MORE.get(model, "[train]")))
    return load_job(path, overrides)


def compared(spec: JobSpec, rank: int) -> tuple[Footprint, int]:
    """Return the prediction for a rank, and the bytes that a dry run counts."""
    shape = read_shape(spec)
    check_job(spec, shape)
    result = dry.dry_run(spec, shape, lay_out(spec), rank)
    return footprint(layout_of(spec, shape), shape)[result.place.pp], result.step.peak.bytes


@pytest.mark.parametrize(("model", "overrides", "rank"), [
    pytest.param(model, [*own, *layout(**parallel)], rank, id=name, marks=() if quick else pytest.mark.prove)
    for name, (quick, model, own, parallel, rank) in table(__file__, "footprint.toml", "cases").items()])
def test_a_dry_run_counts_what_is_predicted(tmp_path: Path, model: str, overrides: list[str], rank: int) -> None:
    predicted, counted = compared(spec_of(tmp_path, model, overrides), rank)
    assert predicted.counted == pytest.approx(counted, rel=0.03)


def test_chunks_in_flight_are_what_a_pipeline_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a prediction without the other chunks in flight is far from what a dry run counts."""
    model, own, parallel = "llama", ["data.sequence_length=1024", "train.global_batch=4"], {"pipeline": 2, "microbatches": 4}
    spec = spec_of(tmp_path, model, [*own, *layout(**parallel, schedule='"gpipe"')])
    predicted, counted = compared(spec, 0)
    assert predicted.counted == pytest.approx(counted, rel=0.03)
    alone = {(kind, stage): 0.0 for kind in "FB" for stage in range(2)}
    monkeypatch.setattr(predicting, "_others", lambda *_: alone)
    shape = read_shape(spec)
    assert footprint(layout_of(spec, shape), shape)[0].counted < 0.8 * counted


def large(**more: object) -> Layout:
    """Return a layout of the large model on 8 ranks, over which ZeRO-1 and higher shard."""
    zero = more.get("zero", 1)
    base = Layout(degrees=Degrees(data=8), samples=1, sequence=4096, microbatches=4, layers=(32,), precision="bf16",
                  shard_degree=8 if zero else 1, reduce="microbatch" if zero in (2, 3) else "step")
    return replace(base, **more)  # type: ignore[arg-type]


def most(divided: Layout) -> int:
    return max(rank.counted for rank in footprint(divided, LARGE))


def test_more_of_a_microbatch_never_needs_less() -> None:
    for recompute in ("none", "selective", "full", "every-4"):
        for sequence in (1024, 8192):
            sizes = [most(large(samples=samples, sequence=sequence, recompute=recompute)) for samples in (1, 2, 3, 8)]
            assert sizes == sorted({*sizes}), recompute


def test_what_saves_memory_needs_less() -> None:
    for samples in (1, 4):
        zero = [most(large(zero=zero, samples=samples)) for zero in (0, 1, 2, 3)]
        assert zero == sorted({*zero}, reverse=True)
        again = [most(large(recompute=recompute, samples=samples)) for recompute in ("none", "every-4", "full")]
        assert again == sorted({*again}, reverse=True)
        sequence = [most(large(degrees=Degrees(tensor=8), shard_degree=1, samples=samples, sequence_parallel=sequence))
                    for sequence in (False, True)]
        assert sequence == sorted({*sequence}, reverse=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v"])
def test_many_microbatches_need_no_more_than_some(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are those of the first microbatches of a schedule, and of all its actions; not those of fewer."""
    stages = {"interleaved_1f1b": 8, "zero_bubble_v": 8}.get(schedule, 4)

    def ranks(microbatches: int) -> tuple[Footprint, ...]:
        return footprint(large(degrees=Degrees(pipeline=4, data=2), shard_degree=2, microbatches=microbatches, schedule=schedule,
                               layers=(32 // stages,) * stages, virtual_stages=stages // 4), LARGE)

    first = ranks(64)
    assert first != ranks(4 if schedule == "interleaved_1f1b" else 2)
    monkeypatch.setattr(predicting, "STEADY", ())
    assert first == ranks(64)


def test_state_is_that_of_the_plan() -> None:
    """Of ZeRO-0 and 1 to the byte; of ZeRO-3 without the parameters that are gathered."""
    for zero in (0, 1):
        state, = state_bytes(large(zero=zero), LARGE).values()
        found, = footprint(large(zero=zero), LARGE)
        assert (found.parameters, found.gradients, found.optimizer) == (state.parameters, state.gradients, state.optimizer)
        assert found.gathered == 0
    found, = footprint(large(zero=3), LARGE)
    masters = sum(4 * number for number in (2 * 128256 * 4096 + 4096, 32 * (218103808 + 8192))) // 8  # of all parameters
    assert found.parameters == pytest.approx(masters, rel=1e-5) and found.gathered == 2 * (128256 * 4096 + 4096)


def test_constants_are_those_of_the_engine() -> None:
    assert (CONTEXT, BUFFERS) == (dry.CONTEXT, host.CONNECTIONS * host.COLLECTIVE_CTAS * host.CONNECTION_BYTES)
    assert (LOGITS, TILE) == (vocabulary.CHUNK, vocabulary.TILE)
    found, = footprint(large(zero=1), LARGE)
    assert found.total - found.counted == found.libraries > CONTEXT + 2 * BUFFERS
