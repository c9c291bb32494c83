"""The predicted time of a step: properties that any machine has, published results, and the bytes of other frameworks."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.schedule.simulate import simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.frameworks import FRAMEWORKS, OURS, Framework, footprint_elsewhere, framework_named
from hpc_mp.planner.machine import NodeType, machine_named
from hpc_mp.planner.step import closed, estimate, simulated, step_time

A100, H100, V100 = machine_named("A100-SXM4-80GB"), machine_named("H100"), machine_named("V100-SXM2-32GB")


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200, sequence: int = 2048) -> ModelShape:
    return ModelShape("gpt2", layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocabulary, sequence, True, True, True,
                      False)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int = 32000) -> ModelShape:
    return ModelShape("llama", layers, hidden, heads, kv_heads, hidden // heads, inner, vocabulary, 4096, False, False, False,
                      True)


MIXTRAL = replace(llama(32, 4096, 32, 8, 14336), model_type="mixtral", experts=8, experts_per_token=2, expert_intermediate=14336)


def laid_out(shape: ModelShape, degrees: Degrees, **own: object) -> Layout:
    virtual = int(own.get("virtual_stages", 1))  # type: ignore[call-overload]
    stages = degrees.pipeline * virtual
    even = [shape.layers // stages + (stage < shape.layers % stages) for stage in range(stages)]
    usual = {"samples": 1, "sequence": 2048, "microbatches": 8, "layers": tuple(even), "ranks_per_node": 8, "precision": "bf16",
             "schedule": "1f1b" if virtual == 1 else "interleaved_1f1b", "shard_degree": degrees.data * degrees.context}
    return Layout(degrees=degrees, **usual | own)  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Layout, ModelShape, NodeType, Framework]:
    shape = draw(st.sampled_from([gpt(24, 2048, 16), gpt(48, 8192, 64), llama(80, 8192, 64, 8, 28672), MIXTRAL]))
    data = draw(st.sampled_from([1, 2, 16]))
    degrees = Degrees(draw(st.sampled_from([1, 2, 8, 16])), draw(st.sampled_from([1, 2, 4])), data, draw(st.sampled_from([1, 2])),
                      data if shape.experts else 1)
    zero = draw(st.sampled_from([0, 1, 3]))
    layout = laid_out(
        shape, degrees, samples=draw(st.sampled_from([1, 4])), microbatches=draw(st.sampled_from([1, 4, 8])), zero=zero,
        recompute=draw(st.sampled_from(["none", "selective", "full"])), sequence_parallel=draw(st.booleans()),
        shard_degree=degrees.data * degrees.context if zero else 1, reduce="microbatch" if zero == 3 else "step")
    return layout, shape, draw(st.sampled_from([A100, H100])), draw(st.sampled_from([OURS, *FRAMEWORKS.values()]))


@settings(max_examples=30, deadline=None)
@given(plans())
def test_parts_and_monotony(plan: tuple[Layout, ModelShape, NodeType, Framework]) -> None:
    """Parts sum up; nothing faster makes a step slower, and nothing more makes it faster; the control: a faster GPU counts."""
    layout, shape, machine, framework = plan
    usual = estimate(layout, shape, machine, framework)
    assert sum(usual.parts.values()) == pytest.approx(usual.seconds, rel=1e-9)
    assert all(seconds >= 0 for seconds in usual.parts.values())
    assert 0 < usual.mfu < 1
    gpu, fabric = machine.gpu, machine.fabric
    assert gpu.memory_gbs
    faster = [replace(machine, gpu=replace(gpu, memory_gbs=2 * gpu.memory_gbs)),
              replace(machine, gpu=replace(gpu, peak_tflops={name: 2 * peak for name, peak in gpu.peak_tflops.items()})),
              replace(machine, fabric=replace(fabric, link=2 * fabric.link, ll=2 * fabric.ll)),
              replace(machine, fabric=replace(fabric, nic=2 * fabric.nic))]
    for better in faster:
        assert estimate(layout, shape, better, framework).seconds <= usual.seconds * (1 + 1e-9)
    assert estimate(layout, shape, faster[1], framework).seconds < usual.seconds
    for more in (replace(layout, samples=2 * layout.samples), replace(layout, microbatches=2 * layout.microbatches)):
        assert usual.seconds < estimate(more, shape, machine, framework).seconds
    assert estimate(replace(layout, recompute="full"), shape, machine, framework).seconds >= usual.seconds


@pytest.mark.parametrize(("pipeline", "microbatches", "virtual"), [(2, 2, 1), (4, 8, 1), (4, 64, 1), (4, 8, 2), (2, 40, 3)])
def test_bubble_is_that_of_the_formula(pipeline: int, microbatches: int, virtual: int) -> None:
    """(P − 1) / (V M + P − 1) of the step is idle (arXiv:2104.04473, section 2.2), also if most of it is extrapolated."""
    layout = laid_out(gpt(24, 1024, 16), Degrees(pipeline=pipeline), microbatches=microbatches, virtual_stages=virtual)
    stages = [1.0] * pipeline * virtual, [2.0] * pipeline * virtual
    for makespan in (simulated(layout, *stages, 0.0), closed(layout, *stages, 0.0)):
        idle = 1 - 3 * virtual * microbatches / makespan
        assert idle == pytest.approx((pipeline - 1) / (virtual * microbatches + pipeline - 1))


def test_closed_form_is_the_simulation() -> None:
    """Of uneven stages with messages, under 1F1B: the whole schedule, the extrapolated one and the closed form agree, and the
    control without the messages' time does not."""
    layout = laid_out(gpt(24, 1024, 16), Degrees(pipeline=6), microbatches=60)
    forwards, backwards, latency = [1.0, 1.0, 1.2, 1.0, 1.0, 1.1], [2.0, 2.0, 2.5, 2.0, 2.0, 2.2], 0.4
    times = {"F": dict(enumerate(forwards)), "B": dict(enumerate(backwards))}
    exact = simulate(schedule_of(layout), times, latency).makespan  # type: ignore[arg-type]
    assert simulated(layout, forwards, backwards, latency) == pytest.approx(exact, rel=0.005)
    assert closed(layout, forwards, backwards, latency) == pytest.approx(exact, rel=0.01)
    assert closed(layout, forwards, backwards, 0.0) < 0.95 * exact


def test_messages_inside_nodes_are_cheaper() -> None:
    """Tensor groups across nodes, and the letters that put them there, take longer."""
    shape = gpt(48, 8192, 64)
    inside = laid_out(shape, Degrees(8, 2, 4))
    across = replace(inside, order="TPD")
    assert step_time(across, shape, A100).parts["tensor"] > 3 * step_time(inside, shape, A100).parts["tensor"]


def test_heads_that_tensor_cores_cannot_compute() -> None:
    """BLOOM with heads of 108 numbers ran 33 % slower than with 144 (bigscience, chronicles-prequel: 69.6 and 92.5 tokens/s)."""
    unflashed = replace(FRAMEWORKS["Megatron-DeepSpeed"], flash=False)
    rates = {heads: step_time(laid_out(shape, Degrees(8, 6, 8), samples=4, microbatches=64, recompute="full"), shape, A100,
                              unflashed).tokens_per_s for heads in (96, 128) for shape in [gpt(78, 13824, heads, 250880)]}
    assert 1.1 < rates[96] / rates[128] < 1.5


PUBLISHED = [  # framework, machine, shape, layout, flash, tokens per second and GPU
    ("Megatron-LM", A100, gpt(80, 12288, 96), {"samples": 2, "microbatches": 48, "recompute": "full", "virtual_stages": 2,
     "zero": 0, "shard_degree": 1}, Degrees(8, 8, 24), False, 123.8),  # arXiv:2104.04473, table 1
    ("Megatron-LM", V100, gpt(36, 3072, 24), {"samples": 8, "sequence": 1024, "microbatches": 1, "recompute": "full", "zero": 0,
     "shard_degree": 1, "precision": "fp16"}, Degrees(4), False, 1654.0),  # arXiv:1909.08053
    ("PyTorch FSDP", A100, llama(32, 4096, 32, 32, 11008), {"samples": 2, "sequence": 4096, "microbatches": 1, "zero": 3,
     "reduce": "microbatch"}, Degrees(data=128), True, 3700.0),  # PyTorch's blog, 2024-03-13
    ("NeMo", H100, llama(32, 4096, 32, 8, 14336, 128256), {"sequence": 8192, "microbatches": 32, "zero": 1}, Degrees(
        data=4, context=2), True, 10153.0),  # NVIDIA's DGX Cloud benchmarking
]


@pytest.mark.parametrize(("name", "machine", "shape", "own", "degrees", "flash", "published"), PUBLISHED)
def test_published_results(name: str, machine: NodeType, shape: ModelShape, own: dict[str, object], degrees: Degrees, flash: bool,
                           published: float) -> None:
    """Within 15 %; twice the GPU's peak, the control, is farther away."""
    framework = replace(next(row for key, row in FRAMEWORKS.items() if key and name.startswith(key)), flash=flash)
    layout = laid_out(shape, degrees, **own)

    def rate(on: NodeType) -> float:
        return step_time(layout, shape, on, framework).tokens_per_s / layout.ranks

    assert rate(machine) == pytest.approx(published, rel=0.15)
    peaks = {name: 2 * peak for name, peak in machine.gpu.peak_tflops.items()}
    assert rate(replace(machine, gpu=replace(machine.gpu, peak_tflops=peaks))) > 1.15 * published


def test_bytes_of_offloaded_state_of_wide_numbers_and_of_whole_gradients() -> None:
    """12 bytes of masters and Adam leave the GPU; in fp32 there are no masters, and all else is twice as wide; microbatches whose
    gradients are summed at the end add up in whole ones."""
    shape, framework = llama(8, 1024, 8, 8, 4096), framework_named("PyTorch FSDP")
    layout = laid_out(shape, Degrees(data=4), zero=3, microbatches=2, reduce="microbatch")
    (rank,), numbers = footprint_elsewhere(layout, shape, framework), 8 * (4 * 1024**2 + 3 * 4096 * 1024) + 2 * 32000 * 1024
    assert (rank.parameters, rank.gradients, rank.optimizer) == (2 * numbers / 4, 2 * numbers / 4, 12 * numbers / 4)
    assert rank.host == 0
    (away,) = footprint_elsewhere(replace(layout, offload=("optimizer", "parameters")), shape, framework)
    assert (away.parameters, away.optimizer, away.host) == (0, 0, rank.parameters + rank.optimizer) and away.total < rank.total
    (wide,) = footprint_elsewhere(replace(layout, precision="fp32"), shape, framework)
    assert (wide.parameters, wide.gradients, wide.optimizer) == (2 * rank.parameters, 2 * rank.gradients, 8 * numbers / 4)
    assert wide.activations == 2 * rank.activations and wide.gathered == 2 * rank.gathered
    (late,) = footprint_elsewhere(replace(layout, reduce="step"), shape, framework)
    assert late.gradients == 4 * rank.gradients
    (once,) = footprint_elsewhere(replace(layout, reduce="step", microbatches=1), shape, framework)
    assert once.gradients == rank.gradients


def test_names_of_frameworks() -> None:
    """The longest row that begins a name counts."""
    assert framework_named("Megatron-LM") is FRAMEWORKS["Megatron"] is not framework_named("Megatron-Core 0.12")
    assert framework_named("DeepSpeed") is FRAMEWORKS[""] and framework_named("PyTorch FSDP") is FRAMEWORKS["PyTorch"]


def test_unknown_gpus_experts_and_long_samples() -> None:
    """Any GPU of the catalogue has rates; experts cost their share of tokens; the MFU of long samples stays below 1."""
    for name in ("H200", "B200", "MI300X"):
        machine = machine_named(name)
        assert 0.1 < step_time(laid_out(MIXTRAL, Degrees(data=8, expert=8), samples=4), MIXTRAL, machine).mfu < 0.7
    dense = replace(MIXTRAL, experts=0)
    layout = laid_out(dense, Degrees(data=8), samples=4)
    experts = step_time(layout, MIXTRAL, H100).parts["products"] / step_time(layout, dense, H100).parts["products"]
    assert 1.6 < experts < 2.2  # two of eight MLPs for each token
    shape = llama(32, 4096, 32, 8, 14336)
    short, long = (step_time(laid_out(shape, Degrees(data=1, context=8), sequence=s), shape, H100) for s in (8192, 131072))
    assert long.seconds > 16 * short.seconds  # attention grows with the square
    assert long.mfu < 0.95


def test_a_step_of_eighty_layers_is_predicted_quickly() -> None:
    shape = llama(80, 8192, 64, 8, 28672)
    layout = laid_out(shape, Degrees(8, 4, 2), microbatches=64)
    estimate(layout, shape, H100)
    begin = time.process_time()
    for _ in range(20):
        estimate(layout, shape, H100)
    assert (time.process_time() - begin) / 20 < 0.02  # seconds; about 0.001 on an idle machine


def test_bytes_of_other_frameworks() -> None:
    """The formulas of arXiv:2205.05198: 34 s b h / t of a layer with sequence parallelism, and 10 + 24 / t without; ZeRO-1's 16
    bytes, of which 12 are shared out; and the layouts of BLOOM's 181 B that ran out of memory, and one that did not."""
    shape, base = gpt(24, 4096, 32), Framework()
    layout = laid_out(shape, Degrees(8, 1, 4), samples=2, sequence_parallel=True)
    stage, = footprint_elsewhere(layout, shape, base)
    assert stage.activations == pytest.approx(24 * 34 * 2048 * 2 * 4096 / 8)
    assert (stage.gradients + stage.parameters) * 3 / 4 == pytest.approx(stage.optimizer, rel=1e-6)
    stage, = footprint_elsewhere(replace(layout, sequence_parallel=False), shape, base)
    assert stage.activations == pytest.approx(24 * (10 + 24 / 8) * 2048 * 2 * 4096)
    bloom, framework = gpt(72, 14336, 64, 250880), replace(FRAMEWORKS["Megatron-DeepSpeed"], flash=False)
    for degrees, samples, fits in ((Degrees(2, 6, 32), 1, False), (Degrees(8, 1, 48), 1, False), (Degrees(2, 12, 16), 2, True)):
        layout = laid_out(bloom, degrees, samples=samples, microbatches=42, recompute="full", precision="fp16")
        assert (max(stage.total for stage in footprint_elsewhere(layout, bloom, framework)) <= A100.memory) is fits


def test_broadcasts_of_whole_tensors_cost_more_the_more_ranks_there_are() -> None:
    """InternLM-7B on 1024 GPUs ran 2271 tokens/s with parameters published by all ranks, 3625 by those of a node (InternLM's
    train_performance.md); gathers of shards, the control, differ by less than a tenth."""
    shape = llama(32, 4096, 32, 32, 11008, 103168)
    layouts = [laid_out(shape, Degrees(data=1024), samples=2, microbatches=4, zero=1, order="PDT", shard_degree=shards)
               for shards in (8, 1024)]
    for framework, least in ((FRAMEWORKS["InternEvo"], 0.08), (replace(FRAMEWORKS["InternEvo"], broadcasts=0), -0.1)):
        inside, across = (estimate(layout, shape, A100, framework).seconds for layout in layouts)
        assert least < across / inside - 1 < least + 0.7
    assert across / inside < 1.1


def test_sums_of_gradients_cost_their_bytes_for_each_microbatch() -> None:
    """Reading a gradient of 2 bytes, and reading and writing its sum of 2, at 85 % of 2039 GB/s: 6 bytes of each parameter."""
    shape = gpt(24, 4096, 32)
    layout, framework = laid_out(shape, Degrees(), microbatches=8), FRAMEWORKS["OneFlow"]
    added, fused = (estimate(layout, shape, A100, replace(framework, sums=sums)).parts["passes"] for sums in (True, False))
    parameters = 24 * 12 * 4096**2 + 51200 * 4096
    assert A100.gpu.memory_gbs
    assert added - fused == pytest.approx(8 * 6 * parameters / (0.85e9 * A100.gpu.memory_gbs), rel=0.01)
