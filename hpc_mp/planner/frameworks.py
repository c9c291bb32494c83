"""Frameworks that train transformers: what they reach of a GPU's rates, and the bytes that they hold.

The factors were fitted to published results by ``benchmarks/calibrate_planner.py``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's factors.

    Attributes:
        products: share of the reachable rate of products; attention: the same of flash attention, relative to version 2.
        passes: bytes of element-wise passes relative to fused ones. flash: True if attention is flash attention.
        overlap: share of a backward in which the data axis' reductions cost nothing; publish: share of the all-gather of updated
            parameters that is hidden; tensor: share of the tensor axis' collectives that is hidden.
        host: seconds in which the host launches a layer's forward.
        gradient: bytes of a gradient when ranks sum it. states: bytes per parameter of masters and optimizer.
        kept: bytes that a layer keeps for its backward, relative to arXiv:2205.05198. logit: bytes for each logit.
        overhead: bytes of the CUDA context, of communicators and of the allocator's slack.
    """

    name: str
    products: float = 0.85
    attention: float = 1.0
    passes: float = 1.3
    flash: bool = True
    overlap: float = 0.8
    publish: float = 0.0
    tensor: float = 0.0
    scattered: bool = True
    host: float = 300e-6
    gradient: int = 4
    states: int = 12
    kept: float = 1.0
    logit: int = 10
    overhead: float = 6e9


OURS = Framework("hpc-mp", scattered=False)
GENERAL = Framework("")
FRAMEWORKS: dict[str, Framework] = {}


def footprint_elsewhere(layout, shape, framework):
    return ()
