"""Seconds of a transformer's kernels on one GPU: matrix products, attention, and passes over device memory.

A product takes its operations at the reachable rate, and half a wave of tiles, at whose end processors idle; or as long as its
bytes. Reachable shares are near published ones: of products in stas00/ml-engineering ("maximum achievable matmul FLOPS"), of
flash attention in arXiv:2307.08691. Without it, a forward writes and reads all scores. A backward is two forwards, of flash 2.5.
"""

from typing import NamedTuple

from hpc_mp.catalogue import GpuModel
from hpc_mp.layout.flat import blocks_together
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.frameworks import Framework
from hpc_mp.planner.memory import BYTES

Parts = dict[str, float]  # what takes time → seconds
# beginning of a GPU's name → reachable share of its peak in products, in flash attention (version 2), and its processors
REACH = {"V100": (0.88, 0.35, 80), "A": (0.869, 0.60, 108), "H": (0.75, 0.42, 132), "GH": (0.78, 0.42, 132),
         "B": (0.72, 0.40, 148), "GB": (0.72, 0.40, 148), "MI300X": (0.60, 0.30, 304), "": (0.75, 0.42, 132)}
TILE = 128 * 256  # numbers of a product that a processor computes at once
STREAM = 0.85  # share of the memory's rate that a pass reaches
SCORE, LOGIT = 13, 18  # bytes that a forward moves for each score of unfused attention, and for each logit of the loss
UNALIGNED, COARSE = 13.0, 1.2  # times slower for sizes that are not multiples of 8, and of 64 (bigscience, chronicles-prequel)
LAUNCH = 5e-6  # seconds between two kernels


class Rates(NamedTuple):
    """A GPU's operations per second at its peak, in products and in flash attention, bytes per second, numbers of half a wave of
    tiles, and bytes of a number."""

    peak: float
    products: float
    flash: float
    memory: float
    wave: float
    number: int

    def product(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product of m × k and k × n numbers."""
        slower = UNALIGNED if n % 8 or k % 8 else COARSE if n % 64 or k % 64 else 1.0
        moved = (m * k + k * n + m * n) * self.number / self.memory
        return max(2 * k * (m * n + self.wave) / self.products * slower, moved) + LAUNCH


def rates_of(gpu: GpuModel, precision: str, framework: Framework) -> Rates:
    """Return the rates of a GPU. A precision without a peak counts as fp16."""
    peak, memory = 1e12 * (gpu.peak_tflops.get(precision) or gpu.peak_tflops["fp16"]), 1e9 * (gpu.memory_gbs or 0) * STREAM
    reach, flash, processors = next(REACH[name] for name in sorted(REACH, reverse=True) if gpu.name.startswith(name))
    return Rates(peak, peak * reach * framework.products, peak * flash * framework.attention, memory, processors * TILE / 2,
                 BYTES[precision][1])


def block(layout: Layout, shape: ModelShape, layer: int, rates: Rates, framework: Framework) -> tuple[Parts, Parts]:
    """Return the parts of a layer's forward and backward of a microbatch, without messages."""
    tensor, h, sequence = layout.degrees.tensor, shape.hidden, shape.tokens_of(layer, layout.sequence)
    tokens, heads, entering = layout.samples * sequence / layout.degrees.context, -(-shape.heads // tensor), 1 + shape.gated_mlp
    q, kv = heads * shape.head_dim, -(-shape.kv_heads // tensor) * shape.head_dim
    rows, count, inner = tokens, 1.0, -(-shape.intermediate // tensor)
    if experts := shape.experts_of(layer):  # each of a rank's experts gets an equal share of the rows
        inner, count = -(-shape.expert_intermediate // tensor), experts / layout.degrees.expert
        rows = tokens * shape.experts_per_token / count
    window, decodes = min(sequence, shape.window_of(layer) or sequence), 0 < shape.encoder <= layer
    cross, both = shape.prompt if decodes else 0, shape.bidirectional or layer < shape.encoder
    visible = cross + (min(2 * window - 1, sequence) if both else window * (1 - window / (2 * sequence)))
    slower, scores = UNALIGNED if shape.head_dim % 8 else 1.0, tokens * heads * (sequence + cross)
    moved = 10 * tokens * h / (tensor if layout.sequence_parallel else 1)  # two norms and two sums
    moved += 2 * tokens * (q + 2 * kv) + rows * count * ((1 + entering) * inner + (4 * h if experts else 0))
    forward = {"products": (1 + decodes) * (rates.product(tokens, q + 2 * kv, h) + rates.product(tokens, h, q))
               + count * (rates.product(rows, entering * inner, h) + rates.product(rows, h, inner)),
               "attention": 4 * tokens * q * visible / rates.flash + LAUNCH if framework.flash
               else scores * (4 * shape.head_dim / rates.products * slower + SCORE / rates.memory) + 4 * LAUNCH,
               "passes": framework.passes * moved * rates.number / rates.memory}
    core, whole = forward["attention"], sum(forward.values())
    return forward, {name: 2 * seconds for name, seconds in forward.items()} | {
        "attention": (2.5 if framework.flash else 2.0) * core,
        "recompute": whole if blocks_together(layout.recompute) else core * (layout.recompute == "selective")}
