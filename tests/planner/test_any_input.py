"""Footprints and steps of any valid input: figures are finite and not negative, and go the way that physics says.

Plans of any job are those of ``test_search``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.checks import check_layout
from hpc_mp.layout.layout import Layout, Reduce
from hpc_mp.layout.models import FAMILIES, ModelShape
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.stages import Partition, cut_stages
from hpc_mp.planner.footprint import LOGITS, Footprint, footprint
from hpc_mp.planner.machine import NodeType, machine_named
from hpc_mp.planner.memory import BYTES
from hpc_mp.planner.step import StepTime, estimate, step_time

LLAMAS = ("llama", "qwen2", "gemma2", "mixtral", "qwen3_moe")
GPTS = ("gpt2", "gptj", "gpt_neox")
ENCODERS = ("bert", "modernbert", "t5")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "breadth_first", "zero_bubble", "zero_bubble_v")
REDUCE: tuple[Reduce, ...] = ("step", "microbatch")
MACHINES = ("V100", "A100 40GB", "A100 80GB", "H100", "H200", "B200", "MI300X")
quick, proof = settings(max_examples=20), settings(max_examples=1000, derandomize=True, deadline=None)


def pick(draw: st.DrawFn, *options: Any) -> Any:
    return draw(st.sampled_from(options))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Return a model of any family that has a table, with sizes that need not be round."""
    kind, layers, heads = pick(draw, *LLAMAS, *GPTS, *ENCODERS), draw(st.integers(1, 12)), pick(draw, 2, 8, 12, 15, 16, 32)
    size, words, inner = pick(draw, 16, 64, 80, 128), draw(st.integers(100, 160000)), draw(st.integers(1, 16384))
    hidden = heads * size
    usual = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    if kind == "gpt2" or kind == "gptj":
        usual = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": words, "n_positions": 65536}
    elif kind == "t5":
        usual = {"num_layers": layers, "num_decoder_layers": layers, "d_model": hidden, "num_heads": heads, "d_kv": size,
                 "d_ff": inner, "vocab_size": words, "feed_forward_proj": pick(draw, "relu", "gated-gelu")}
    else:
        usual |= {"intermediate_size": inner, "max_position_embeddings": 65536}
    if kind in LLAMAS:
        usual |= {"num_key_value_heads": pick(draw, *(count for count in (1, 2, 3, 4, 5, 8, heads) if heads % count == 0)),
                  "tie_word_embeddings": draw(st.booleans())}
    usual |= {"mixtral": {"num_local_experts": 6}, "modernbert": {"pad_token_id": 0}, "gptj": {"rotary_dim": 16},
              "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": inner}}.get(kind, {})
    shape = FAMILIES[kind].read({"model_type": kind, **usual})
    return shape.of_classes(3 if shape.bidirectional and kind != "t5" else 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, ModelShape]:
    """Return a layout that a launch accepts, and its model."""
    shape = draw(shapes())
    tensor, pipeline, data, context = pick(draw, 1, 2, 4), pick(draw, 1, 1, 2, 3, 4), pick(draw, 1, 2, 3, 8), pick(draw, 1, 1, 2)
    expert = pick(draw, *(size for size in (1, 2, 4) if data * context % size == 0)) if shape.experts else 1
    schedule = pick(draw, *SCHEDULES[:2 if pipeline == 1 else 6])
    microbatches, zero, both = draw(st.integers(1, 6)), draw(st.integers(0, 3)), data * context
    sequence = draw(st.integers(1, 40)) * 2 * tensor * context * pick(draw, 1, 8, 64)
    base = Layout(
        degrees=Degrees(tensor, pipeline, data, context, expert), samples=draw(st.integers(1, 4)), sequence=sequence,
        microbatches=microbatches * (pipeline if schedule == "interleaved_1f1b" else 1), schedule=schedule,
        virtual_stages=pick(draw, 2, 3) if schedule in ("interleaved_1f1b", "breadth_first") else 1,
        ranks_per_node=pick(draw, 1, 4, 8), order=pick(draw, "DPT", "PDT", "TPD") if context == 1 else "DPCT", zero=zero,
        shard_degree=pick(draw, *(size for size in range(1, both + 1) if both % size == 0)) if zero else 1,
        reduce=pick(draw, *REDUCE) if zero > 1 else "step", sequence_parallel=tensor > 1 and draw(st.booleans()),
        context_method="ulysses" if shape.bidirectional else pick(draw, "ring", "ulysses"),
        recompute=pick(draw, "none", "full", "every-2", *(() if shape.encoder else ("selective",))),
        offload=pick(draw, (), (), ("optimizer",), ("optimizer", "parameters")),
        precision=pick(draw, "fp64", "fp32", "bf16", "fp16"))
    try:
        check_layout(base, shape, Partition("parameters"))
    except HpcMpError:
        assume(False)
    if shape.encoder:
        shape = replace(shape, prompt=sequence // 2)
    return replace(base, layers=cut_stages(base, shape, Partition("parameters")).layers), shape


@st.composite
def machines(draw: st.DrawFn) -> NodeType:
    """Return a machine of the catalogue, with its own rates or others."""
    machine, factor = machine_named(pick(draw, *MACHINES)), partial(draw, st.floats(0.05, 20))
    gpu, fabric = machine.gpu, machine.fabric
    return replace(machine, gpu=replace(gpu, memory_gbs=(gpu.memory_gbs or 0) * factor(), peak_tflops={
        name: peak * share for share in [factor()] for name, peak in gpu.peak_tflops.items()}),
        fabric=replace(fabric, link=fabric.link * factor(), nic=fabric.nic * factor(), nics=max(1, fabric.nics)))


def faster(machine: NodeType, factor: float) -> dict[str, NodeType]:
    """Return machines with one rate that is higher."""
    gpu, fabric = machine.gpu, machine.fabric
    peaks = {name: factor * peak for name, peak in gpu.peak_tflops.items()}
    return {"memory": replace(machine, gpu=replace(gpu, memory_gbs=(gpu.memory_gbs or 0) * factor)),
            "peak": replace(machine, gpu=replace(gpu, peak_tflops=peaks)),
            "link": replace(machine, fabric=replace(fabric, link=factor * fabric.link, ll=factor * fabric.ll)),
            "nic": replace(machine, fabric=replace(fabric, nic=factor * fabric.nic))}


def state(rank: Footprint) -> int:
    return rank.parameters + rank.gradients + rank.optimizer + rank.host


def passing(rank: Footprint) -> int:
    """Return the bytes that come and go with a microbatch."""
    return rank.counted - rank.parameters - rank.gradients - rank.optimizer - rank.gathered


def more_of(measure: Callable[[Footprint], int], less: Layout, more: Layout, shape: ModelShape,
            room: int = 0) -> list[tuple[int, int]]:
    """Return what ranks have with two layouts, where the first one has more than the second and ``room`` bytes."""
    both = zip(footprint(less, shape), footprint(more, shape), strict=True)
    return [pair for ranks in both for pair in [(measure(ranks[0]), measure(ranks[1]))] if pair[0] > pair[1] + room]


def figures(plan: tuple[Layout, ModelShape], machine: NodeType) -> None:
    """Check that no figure is negative or no number, and that lines are all of a total."""
    for rank in footprint(*plan):
        assert all(type(line) is int and line >= 0 for line in astuple(rank)), rank
        assert 0 < rank.counted < rank.total and (rank.host > 0) == bool(plan[0].offload)
    for step in (step_time(*plan, machine), estimate(*plan, machine)):
        numbers = [step.seconds, step.tokens_per_s, step.mfu, *step.parts.values()]
        assert all(math.isfinite(number) and number >= 0 for number in numbers) and step.seconds > 0, step
        assert sum(step.parts.values()) == pytest.approx(step.seconds)


def more_tokens(plan: tuple[Layout, ModelShape]) -> None:
    """More tokens of a microbatch need no less; but it keeps only the last chunk of its logits, which may be shorter."""
    layout, shape = plan
    logits = layout.samples * layout.sequence // layout.degrees.context * -(-shape.vocabulary // layout.degrees.tensor)
    room = layout.microbatches * LOGITS * BYTES[layout.precision][1] * (2 * logits > LOGITS and not shape.classes)
    assert not more_of(passing, layout, replace(layout, samples=2 * layout.samples), shape, room)
    if not shape.encoder and 2 * layout.sequence <= shape.positions:
        assert not more_of(passing, layout, replace(layout, sequence=2 * layout.sequence), shape, room)


def recomputation(plan: tuple[Layout, ModelShape]) -> None:
    """Ranks keep no more with ``full`` than without."""
    layout, shape = plan
    full, none = replace(layout, recompute="full"), replace(layout, recompute="none")
    assert not more_of(lambda rank: rank.activations, full, none, shape)


def sharing(plan: tuple[Layout, ModelShape]) -> None:
    """State on the device and the host is never more with a higher stage of ZeRO, but for padding."""
    layout, shape = plan
    shards = layout.degrees.data * layout.degrees.context
    padding = 8 * shards * (2 * shape.layers + 4) * 2 * 8  # elements of a unit, units, formats, bytes
    stages = [replace(layout, zero=zero, shard_degree=shards if zero else 1, reduce=REDUCE[layout.samples % 2 * (zero > 1)])
              for zero in range(4)]
    for low, high in pairwise(stages):
        assert not more_of(state, high, low, shape, padding), (low.zero, high.zero)


def speed(plan: tuple[Layout, ModelShape], machine: NodeType, factor: float) -> None:
    layout, shape = plan
    for time in (step_time, estimate):
        usual = time(layout, shape, machine).seconds
        for name, better in faster(machine, factor).items():
            assert time(layout, shape, better).seconds <= usual * (1 + 1e-9), name


CHECKS: dict[str, Callable[..., None]] = {
    "figures": figures, "more tokens": more_tokens, "recomputation": recomputation, "sharing": sharing, "speed": speed}
INPUTS: dict[str, Sequence[st.SearchStrategy[Any]]] = {
    "figures": (layouts(), machines()), "speed": (layouts(), machines(), st.floats(1.01, 4))}


@pytest.mark.parametrize("limits", [pytest.param(quick, id="quick"), pytest.param(proof, id="1000", marks=pytest.mark.prove)])
@pytest.mark.parametrize("check", CHECKS)
def test_of_any_input(check: str, limits: settings) -> None:
    limits(given(*INPUTS.get(check, (layouts(),)))(CHECKS[check]))()


@pytest.mark.parametrize("check", CHECKS)
def test_wrong_figures_would_be_seen(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: lines and times with the opposite sign."""
    def opposite(*plan: Any) -> tuple[Footprint, ...]:
        return tuple(replace(rank, activations=-99 * rank.activations, optimizer=-99 * rank.optimizer, host=-99 * rank.host)
                     for rank in footprint(*plan))

    def backwards(*plan: Any) -> StepTime:
        return replace(step_time(*plan), seconds=-step_time(*plan).seconds)

    footprint, step_time = globals()["footprint"], globals()["step_time"]
    for name, wrong in (("footprint", opposite), ("step_time", backwards)):
        monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises(AssertionError):
        settings(max_examples=10, phases=[Phase.generate])(given(*INPUTS.get(check, (layouts(),)))(CHECKS[check]))()
