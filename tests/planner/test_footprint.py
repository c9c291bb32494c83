"""Predicted memory of ranks: compared with dry runs of the engine, and what must hold between layouts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import layout
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import AnySpec, JobSpec, load_job, resolve_any
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.layout.placement.grid import normalize_order
from hpc_mp.layout.schedule.names import STAGES_PER_RANK
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner import footprint as predicting
from hpc_mp.planner.block_memory import QUERIES, SPLIT
from hpc_mp.planner.footprint import BUFFERS, CONTEXT, LOGITS, TILE, Footprint, footprint
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.memory import state_bytes
from hpc_mp.planner.question import Question
from hpc_mp.planner.search import search
from hpc_mp.train.dry_run import dry_run as dry
from hpc_mp.train.dry_run import host
from hpc_mp.train.model import vocabulary
from hpc_mp.train.parallel import ring_attention
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
    assert (LOGITS, TILE, QUERIES) == (vocabulary.CHUNK, vocabulary.TILE, ring_attention.QUERIES)
    schedules = {name: schedule_of(large(degrees=Degrees(pipeline=4), schedule=name, virtual_stages=stages or 2))
                 for name, stages in STAGES_PER_RANK.items()}
    assert [name for name, schedule in schedules.items() if any(action.kind == "W" for action in schedule.ranks[0])] == [*SPLIT]
    found, = footprint(large(zero=1), LARGE)
    assert found.total - found.counted == found.libraries > CONTEXT + 2 * BUFFERS


def llama(kind: str, layers: int, hidden: int, inner: int, words: int, kv: int = 8, heads: int = 0,
          **more: object) -> dict[str, object]:
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads or hidden // 128,
            "num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": words, "max_position_embeddings": 131072, **more}


def gpt2(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 8192}


NEOX = {"model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
        "intermediate_size": 24576, "vocab_size": 50432}
GPTJ = {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400}
EIGHT, SEVENTY = llama("llama", 32, 4096, 14336, 128256), llama("llama", 80, 8192, 28672, 128256)
MISTRAL = llama("mistral", 32, 4096, 14336, 32000, sliding_window=4096)
GEMMA_2B = llama("gemma2", 26, 2304, 9216, 256000, 4, 8, head_dim=256, sliding_window=4096)
GEMMA_27B = llama("gemma2", 46, 4608, 36864, 256000, 16, 32, head_dim=128, sliding_window=4096)
GEMMA_3 = llama("gemma3_text", 48, 3840, 15360, 262208, 8, 16, head_dim=256, sliding_window=1024)
SMALL, THIRTEEN = llama("llama", 16, 2048, 8192, 128256, tie_word_embeddings=True), llama("llama", 40, 5120, 13824, 32000, 40)
QWEN_SMALL = llama("qwen2", 24, 896, 4864, 151936, 2, 14, tie_word_embeddings=True)
MIXTRAL = llama("mixtral", 32, 4096, 14336, 32000, num_local_experts=8)
QWEN_MOE = llama("qwen3_moe", 48, 2048, 6144, 151936, 4, 32, head_dim=128, moe_intermediate_size=768, num_experts=128,
                 num_experts_per_tok=8, norm_topk_prob=True)
NAIVE = {  # configuration, machine, nodes, GPUs of each, samples of a batch, tokens of a sample, precision
    "GPT-2 on a V100": (gpt2(12, 768, 12), "V100", 1, 1, 64, 1024, "fp16"),
    "GPT-2 XL": (gpt2(48, 1600, 25), "V100", 1, 8, 64, 1024, "fp32"),
    "GPT-2 XL, a long sample": (gpt2(48, 1600, 25), "A100 40GB", 2, 8, 32, 8192, "bf16"),
    "a Llama of 1 B": (SMALL, "A100 40GB", 1, 1, 16, 4096, "bf16"),
    "the same in fp32": (SMALL, "A100 40GB", 1, 4, 16, 4096, "fp32"),
    "8 B": (EIGHT, "H100", 1, 8, 64, 8192, "bf16"),
    "8 B in fp32": (EIGHT, "H100", 2, 8, 32, 4096, "fp32"),
    "8 B on V100": (EIGHT, "V100", 4, 8, 64, 2048, "fp16"),
    "8 B, 128 Ki tokens": (EIGHT, "H100", 4, 8, 8, 131072, "bf16"),
    "13 B": (THIRTEEN, "A100 40GB", 4, 8, 64, 4096, "bf16"),
    "70 B": (SEVENTY, "H100", 16, 8, 128, 8192, "bf16"),
    "70 B on few": (SEVENTY, "B200", 2, 8, 32, 4096, "bf16"),
    "70 B on A100": (llama("llama", 80, 8192, 28672, 32000), "A100 80GB", 32, 8, 256, 4096, "bf16"),
    "Qwen2 of 7 B": (llama("qwen2", 28, 3584, 18944, 152064, 4, 28), "A100 80GB", 1, 8, 32, 4096, "bf16"),
    "Qwen2 of half a B": (QWEN_SMALL, "V100", 1, 4, 32, 2048, "fp16"),
    "Qwen3 of 32 B": (llama("qwen3", 64, 5120, 25600, 151936, 8, 64, head_dim=128), "H100", 8, 8, 64, 4096, "bf16"),
    "Mistral": (MISTRAL, "A100 40GB", 2, 8, 32, 16384, "bf16"),
    "Gemma 2 of 2 B": (GEMMA_2B, "A100 80GB", 1, 4, 16, 4096, "bf16"),
    "Gemma 2 of 27 B": (GEMMA_27B, "H100", 4, 8, 32, 4096, "bf16"),
    "Gemma 3 of 12 B": (GEMMA_3, "H100", 2, 8, 32, 8192, "bf16"),
    "OLMo 2 of 7 B": (llama("olmo2", 32, 4096, 11008, 100352, 32), "MI300X", 1, 8, 64, 4096, "bf16"),
    "GPT-NeoX of 20 B": (NEOX, "A100 80GB", 4, 8, 64, 2048, "bf16"),
    "GPT-J": (GPTJ, "A100 40GB", 2, 8, 32, 2048, "bf16"),
    "Mixtral 8 x 7 B": (MIXTRAL, "H100", 4, 8, 32, 4096, "bf16"),
    "Mixtral on A100": (MIXTRAL, "A100 80GB", 8, 8, 64, 4096, "bf16"),
    "Qwen3 of 30 B with 128 experts": (QWEN_MOE, "H100", 4, 8, 64, 4096, "bf16"),
    "the same on B200": (QWEN_MOE, "B200", 1, 8, 32, 4096, "bf16"),
    "an odd number of nodes": (THIRTEEN, "H100", 3, 8, 48, 4096, "bf16"),
    "an odd model": (llama("llama", 23, 3000, 7777, 50257, 5, 15), "A100 40GB", 5, 4, 20, 3072, "bf16"),
    "one node of four": (llama("llama", 32, 3072, 8192, 128256, 8, 24), "A100 40GB", 1, 4, 8, 8192, "bf16"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if place in (0, 3) else pytest.mark.prove)
                                  for place, name in enumerate(NAIVE)])
def test_a_plan_of_a_naive_job_fits_by_the_dry_runs_count(name: str) -> None:
    """A job with a model, data and nodes alone: the plan's footprint and the dry run agree that it fits, on the fullest rank."""
    config, machine, nodes, per_node, batch, tokens, precision = NAIVE[name]
    tree = {"job": {"nodes": nodes, "ranks_per_node": per_node, "device": "cuda"}, "model": {"config": config},
            "data": {"files": ["text"], "sequence_length": tokens},
            "train": {"steps": 1, "global_batch": batch, "precision": precision, "dropout": 0}}
    read: list[AnySpec] = []
    with suppress(HpcMpError):  # no file of text is there
        resolve_any(tree, Path(), read.append)
    spec = read[0]
    assert isinstance(spec, JobSpec)
    shape, of = read_shape(spec), machine_named(machine)
    plan = search(Question(spec, shape, of))
    assert plan is not None
    layout = plan.layout
    placed = place(layout.degrees, normalize_order(layout.order, layout.degrees.context), layout.ranks_per_node, layout.rank_map)
    fullest = max(range(layout.degrees.pipeline), key=lambda at: plan.footprints[at].total)
    for at in sorted({fullest, layout.degrees.pipeline - 1}):
        rank = next(one.rank for one in placed.ranks if one.pp == at and one.tp == one.dp == one.cp == 0)
        result = dry.dry_run(plan.job, shape, placed, rank)
        assert dry.needed(result) <= of.memory, layout
        assert plan.footprints[at].counted == pytest.approx(result.step.peak.bytes, rel=0.05), layout
