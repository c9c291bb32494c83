"""Seconds of a transformer's kernels on one GPU: matrix products, attention, and passes over device memory.

A product of m × k and k × n takes 2 m n k operations at the reachable rate, then its operands' bytes at the memory's, and a launch.
The reachable share of the peak is the best that was published for any size (``REACH``; stas00/ml-engineering, "maximum achievable
matmul FLOPS"), times the framework's share. Tensor cores need sizes that are multiples of 8 (NVIDIA, "Matrix multiplication
background"); BLOOM's heads of 225 and 108 numbers were thirteen times slower (bigscience, chronicles-prequel).

Flash attention computes half of the square where it is causal. Without it, a forward passes over the scores: it writes and reads
the product, the softmax and the dropout. Backwards take twice a forward's products, 2.5 times its flash attention (arXiv:2307.08691)
and twice its passes.
"""

from dataclasses import dataclass

from hpc_mp.catalogue import GpuModel
from hpc_mp.planner.frameworks import Framework
from hpc_mp.planner.memory import BYTES

# beginning of a GPU's name → reachable share of its peak in products, and in flash attention of version 2
REACH = {"V100": (0.75, 0.35), "A100": (0.869, 0.60), "H100": (0.803, 0.42), "H200": (0.803, 0.42), "GH200": (0.837, 0.42),
         "B200": (0.776, 0.40), "MI300X": (0.60, 0.30), "": (0.80, 0.45)}
STREAM = 0.85  # share of the memory's rate that a pass reaches
SCORE = 13  # bytes of each score that unfused attention writes and reads in a forward: 2 + 4 softmax + 5 dropout + 2
LOGIT = 18  # bytes of each logit: written, read as fp32, and the sum of exponentials
UNALIGNED = 13.0  # times slower than on tensor cores


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a GPU: operations per second of products and of flash attention, bytes per second; seconds of a launch on the
    GPU; bytes of a number."""

    products: float
    flash: float
    memory: float
    launch: float
    number: int


def rates_of(gpu: GpuModel, precision: str, framework: Framework) -> Rates:
    """Return the rates of a GPU under a framework. A precision without a peak of its own counts as fp16's."""
    peak = 1e12 * (gpu.peak_tflops.get(precision) or gpu.peak_tflops["fp16"])
    reach, flash = next(shares for name, shares in REACH.items() if gpu.name.startswith(name))
    assert gpu.memory_gbs is not None  # ``machine_named`` refuses others
    return Rates(peak * reach * framework.products, peak * flash * framework.attention, gpu.memory_gbs * 1e9 * STREAM, 5e-6,
                 BYTES[precision][1])


def product(m: float, n: float, k: float, rates: Rates) -> float:
    """Return the seconds of a product of m × k and k × n numbers."""
    slower = UNALIGNED if n % 8 or k % 8 else 1.0
    return 2 * m * n * k / rates.products * slower + passes(m * k + k * n + m * n, rates) + rates.launch


def passes(numbers: float, rates: Rates) -> float:
    """Return the seconds in which so many numbers are read or written."""
    return numbers * rates.number / rates.memory


def flash(queries: float, visible: float, width: float, rates: Rates) -> float:
    """Return the seconds of a forward: ``visible`` keys on average for each query, ``width``: numbers of all heads."""
    return 4 * queries * visible * width / rates.flash + rates.launch


def unfused(queries: float, keys: float, heads: int, head_dim: int, rates: Rates) -> float:
    """Return the seconds of a forward that stores the scores of all queries and keys."""
    scores = queries * keys * heads
    slower = UNALIGNED if head_dim % 8 else 1.0
    return 4 * scores * head_dim / rates.products * slower + scores * SCORE / rates.memory + 4 * rates.launch
