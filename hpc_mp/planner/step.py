"""The time of an optimizer step, predicted from a layout, a model's shape and a machine; no torch.

A product takes its operations at the reachable rate, and half a wave of tiles, at whose end processors idle; or as long as its
bytes. Reachable shares are near published ones: of products in stas00/ml-engineering ("maximum achievable matmul FLOPS"), of flash
attention in arXiv:2307.08691. Without it, a forward writes and reads all scores. A backward is two forwards, of flash 2.5.

Stages have their layers' kernels, and what these do not hide of messages; layers of a kind count once. The pipeline is simulated
action by action, up to ``MOST`` forwards; it is steady after 4 P microbatches, and longer steps are extrapolated. In the end
gradients are summed, beside the last backward as far as the framework does that, and the optimizer passes over its state. Modules
that ``tensor_modules`` leaves whole count as cut, adapters as all weights, and offloaded activations as hidden.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from hpc_mp.layout.flat import StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement.grid import NODE_OF, normalize_order
from hpc_mp.layout.schedule.simulate import Times, simulate
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.collectives import expect
from hpc_mp.planner.frameworks import OURS, Framework, held, stages_of, weights_of
from hpc_mp.planner.machine import Machine
from hpc_mp.planner.memory import BYTES

# beginning of a GPU's name → reachable share of its peak in products, in flash attention (version 2), and its processors
REACH = {"V100": (0.88, 0.35, 80), "A": (0.869, 0.60, 108), "H": (0.75, 0.42, 132), "GH": (0.78, 0.42, 132),
         "B": (0.72, 0.40, 148), "GB": (0.72, 0.40, 148), "MI300X": (0.60, 0.30, 304), "": (0.75, 0.42, 132)}
TILE, STREAM = 128 * 256, 0.85  # numbers of a product that a processor computes at once; reachable share of the memory's rate
SCORE, LOGIT, UPDATE = 13, 18, 40  # bytes that move for each score and logit of a forward, for a parameter in the optimizer
UNALIGNED, COARSE = 13.0, 1.2  # times slower for sizes that are not multiples of 8, and of 64 (bigscience, chronicles-prequel)
LAUNCH, SKEW = 5e-6, 0.002  # seconds between kernels; share of a step that ranks wait, for each doubling of their number
MOST, STEADY = 512, 4  # forwards that are simulated; × P microbatches
BUBBLES = {"zero_bubble": 1 / 3, "zero_bubble_v": 1 / 6}  # relative to 1F1B's with as many stages
Parts = dict[str, float]  # what takes time → seconds
Makespan = Callable[[Layout, list[float], list[float], float], float]
_expected = lru_cache(4096)(expect)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the sum of ``parts`` of the slowest rank; tokens per second of all ranks; model FLOPs relative to the
    peak: for a token 6 (W + V h) + 12 L h s, with W weights in its layers, and attention over the whole square, as usual."""

    seconds: float
    parts: Parts
    tokens_per_s: float
    mfu: float


def simulated(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the makespan of the layout's schedule, from the seconds of its stages and of a message between them."""
    p, m = layout.degrees.pipeline, layout.microbatches
    some = min(m, STEADY * p + m % p)
    if p == 1 or some * len(forwards) > MOST:
        return closed(layout, forwards, backwards, latency)
    forth, back, split = map(dict, map(enumerate, (forwards, backwards, [seconds / 2 for seconds in backwards])))
    times: Times = {"F": forth, "B": back, "I": split, "W": split}
    whole, less = (simulate(schedule_of(replace(layout, microbatches=count)), times, latency).makespan if count else 0.0
                   for count in (some, some - p if some < m else 0))
    return whole + (m - some) * (whole - less) / p


def closed(layout: Layout, forwards: list[float], backwards: list[float], latency: float) -> float:
    """Return the same in closed form. Under 1F1B, P − r microbatches are in flight on rank r, whose trips limit the period."""
    p = layout.degrees.pipeline
    ranks = [sum(forwards[stage] + backwards[stage] for stage in stages_of(layout, rank)) for rank in range(p)]
    trips = ((sum(ranks[r:]) + 2 * (p - 1 - r) * latency) / (p - r) for r in range(p)) if layout.schedule == "1f1b" else ()
    share = BUBBLES.get(layout.schedule, 1.0) * p / len(forwards)
    return layout.microbatches * max(*ranks, *trips, 0.0) + share * (sum(ranks) - max(ranks)) + 2 * latency * (p - 1)


def step_time(layout: Layout, shape: ModelShape, machine: Machine, framework: Framework = OURS,
              pipeline: Makespan = simulated) -> StepTime:
    """Return the time of a step of stages that are cut. Raises HpcMpError if ranks span nodes without a network."""
    return _Step(layout, shape, machine, framework).time(pipeline)


estimate = partial(step_time, pipeline=closed)  # within a millisecond, for searches


def _total(terms: Iterable[tuple[float, Parts]]) -> Parts:
    """Return a weighted sum of parts."""
    total: Parts = {}
    for weight, parts in terms:
        total |= {name: total.get(name, 0.0) + weight * seconds for name, seconds in parts.items()}
    return total


@dataclass(frozen=True, slots=True)
class _Step:
    layout: Layout
    shape: ModelShape
    machine: Machine
    framework: Framework

    @property
    def peak(self) -> float:
        """Operations per second at most; of a precision without a peak, those of fp16."""
        peaks = self.machine.gpu.peak_tflops
        return 1e12 * (peaks.get(self.layout.precision) or peaks["fp16"])

    @property
    def reach(self) -> tuple[float, float, float, float]:
        """Operations per second of products and of flash attention, numbers of half a wave of tiles, and bytes per second."""
        gpu = self.machine.gpu
        shares = next(REACH[name] for name in sorted(REACH, reverse=True) if gpu.name.startswith(name))
        products, flash = self.peak * shares[0] * self.framework.products, self.peak * shares[1] * self.framework.attention
        return products, flash, shares[2] * TILE / 2, (gpu.memory_gbs or 0) * 1e9 * STREAM

    def product(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product of m × k and k × n numbers."""
        rate, _, wave, memory = self.reach
        slower = UNALIGNED if n % 8 or k % 8 else COARSE if n % 64 or k % 64 else 1.0
        return max(2 * k * (m * n + wave) / rate * slower, (m * k + k * n + m * n) * BYTES[self.layout.precision][1] / memory) + LAUNCH
