"""Seconds of a transformer's kernels on one GPU: matrix products, attention, and passes over device memory.

A product of m × k and k × n takes 2 m n k operations at the reachable rate, and those of half a wave of tiles, at whose end processors
idle; or the time of its operands' bytes, if that is longer. What is reachable was published for GPUs (stas00/ml-engineering, "maximum
achievable matmul FLOPS"; V100 is an estimate) and flash attention (arXiv:2307.08691). Tensor cores need multiples of 8: heads of 108 and
225 numbers were 13 times slower (bigscience, chronicles-prequel). Flash attention skips what is not visible; without it, a forward
also writes and reads the scores. Backwards take twice a forward's time, and 2.5 times its flash attention.
"""

from dataclasses import dataclass

from hpc_mp.catalogue import GpuModel
from hpc_mp.layout.flat import blocks_together
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.frameworks import Framework
from hpc_mp.planner.memory import BYTES

Parts = dict[str, float]  # what takes time → seconds
# beginning of a GPU's name → reachable share of its peak in products, in flash attention (version 2), and its processors
REACH = {"V100": (0.88, 0.35, 80), "A": (0.869, 0.60, 108), "H": (0.803, 0.42, 132), "GH": (0.837, 0.42, 132),
         "B": (0.776, 0.40, 148), "GB": (0.776, 0.40, 148), "MI300X": (0.60, 0.30, 304), "": (0.80, 0.42, 132)}
TILE = 128 * 256  # numbers of a product that a processor computes at once
STREAM = 0.85  # share of the memory's rate that a pass reaches
SCORE, LOGIT = 13, 18  # bytes that a forward moves for each score of unfused attention, and for each logit of the loss
UNALIGNED = 13.0  # times slower than on tensor cores
LAUNCH = 5e-6  # seconds between two kernels


@dataclass(frozen=True, slots=True)
class Rates:
    """A GPU under a framework: operations per second at most, in products and in flash attention; bytes per second; numbers of half
    a wave of tiles; bytes of a number."""

    peak: float
    products: float
    flash: float
    memory: float
    wave: float
    number: int


def rates_of(gpu: GpuModel, precision: str, framework: Framework) -> Rates:
    """Return the rates of a GPU. A precision without a peak counts as fp16."""
    peak = 1e12 * (gpu.peak_tflops.get(precision) or gpu.peak_tflops["fp16"])
    reach, flash, processors = next(REACH[name] for name in sorted(REACH, reverse=True) if gpu.name.startswith(name))
    assert gpu.memory_gbs is not None  # ``machine_named`` refuses others
    return Rates(peak, peak * reach * framework.products, peak * flash * framework.attention, gpu.memory_gbs * 1e9 * STREAM,
                 processors * TILE / 2, BYTES[precision][1])


def product(m: float, n: float, k: float, rates: Rates) -> float:
    """Return the seconds of a product of m × k and k × n numbers."""
    slower = UNALIGNED if n % 8 or k % 8 else 1.0
    moved = (m * k + k * n + m * n) * rates.number / rates.memory
    return max(2 * k * (m * n + rates.wave) / rates.products * slower, moved) + LAUNCH


def attention(shape: ModelShape, layer: int, sequence: int, queries: float, heads: int, rates: Rates, flash: bool) -> float:
    """Return the seconds of a forward of so many queries and heads, over samples of ``sequence`` tokens."""
    window, cross = min(sequence, shape.window_of(layer) or sequence), shape.prompt if 0 < shape.encoder <= layer else 0
    both, numbers = shape.bidirectional or layer < shape.encoder, queries * heads * shape.head_dim
    if flash:
        visible = min(2 * window - 1, sequence) if both else window * (1 - window / (2 * sequence))
        return 4 * numbers * (visible + cross) / rates.flash + LAUNCH
    slower = UNALIGNED if shape.head_dim % 8 else 1.0
    return (sequence + cross) * (4 * numbers / rates.products * slower + queries * heads * SCORE / rates.memory) + 4 * LAUNCH


def block(layout: Layout, shape: ModelShape, layer: int, rates: Rates, framework: Framework) -> tuple[Parts, Parts]:
    """Return the parts of a layer's forward and backward of a microbatch, without messages."""
    tensor, hidden, sequence = layout.degrees.tensor, shape.hidden, shape.tokens_of(layer, layout.sequence)
    tokens, heads = layout.samples * sequence / layout.degrees.context, -(-shape.heads // tensor)
    q, kv, entering = heads * shape.head_dim, -(-shape.kv_heads // tensor) * shape.head_dim, 2 if shape.gated_mlp else 1
    rows, count, inner = tokens, 1.0, -(-shape.intermediate // tensor)
    if experts := shape.experts_of(layer):  # each of a rank's experts gets an equal share of the rows
        inner, count = -(-shape.expert_intermediate // tensor), experts / layout.degrees.expert
        rows = tokens * shape.experts_per_token / count
    projections = product(tokens, q + 2 * kv, hidden, rates) + product(tokens, hidden, q, rates)
    mlp = count * (product(rows, entering * inner, hidden, rates) + product(rows, hidden, inner, rates))
    moved = 10 * tokens * hidden / (tensor if layout.sequence_parallel else 1)  # two norms and two sums
    moved += 2 * tokens * (q + 2 * kv) + rows * count * ((1 + entering) * inner + (4 * hidden if experts else 0))
    forward = {"products": projections * (2 if 0 < shape.encoder <= layer else 1) + mlp,
               "attention": attention(shape, layer, sequence, tokens, heads, rates, framework.flash),
               "passes": framework.passes * moved * rates.number / rates.memory}
    again = sum(forward.values()) if blocks_together(layout.recompute) else 0.0
    return forward, {"products": 2 * forward["products"], "passes": 2 * forward["passes"],
                     "attention": (2.5 if framework.flash else 2.0) * forward["attention"],
                     "recompute": forward["attention"] if layout.recompute == "selective" else again}
