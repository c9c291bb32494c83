"""Published all-reduce bandwidths, with which the model of ``hpc_mp.planner.collectives`` is compared; GB/s busbw.

They are other people's measurements. The model's parameters were fitted to ``CURVES`` and to those ``ROWS`` that say so.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Curve:
    """busbw of all sizes from 32 KiB on, each twice the last. ``software``: µs that the program adds to each operation."""

    fabric: str
    nodes: int
    software: float
    source: str
    busbw: tuple[float, ...]

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(2 ** (15 + index), value) for index, value in enumerate(self.busbw)]


CURVES = (
    Curve("ndv4", 1, 25.0, "ml-engineering, network/README.md (nccl-tests, 8 A100)", (
        1.31, 2.45, 4.43, 7.47, 11.41, 18, 36.18, 72.33, 109.93, 106.16, 138.49, 171.54, 176.92, 194.07, 222.72,
        229.04, 231.41, 233.88, 234.61, 234.89,
    )),
    Curve("p5", 1, 0.0, "awsome-distributed-training, micro-benchmarks/nccl-tests/aws-batch/README.md (in place)", (
        3.17, 6.28, 12.35, 22.79, 43.77, 64.68, 84.58, 133.46, 176.4, 237.93, 296.12, 359.7, 396.69, 418.98, 433.68,
        441.57, 443.88, 476.52, 480.36, 483.36,
    )),
    Curve("p5en", 1, 20.0, "ml-engineering, network/README.md (all_reduce_bench.py, NCCL 2.27.7)", (
        1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29,
        463.58, 469.17, 473.1, 477.45, 482.26,
    )),
    Curve("p6-b200", 1, 20.0, "ml-engineering, network/README.md (all_reduce_bench.py, NCCL 2.27.7, AWS' tuner)", (
        1.2, 2.17, 4.86, 9.54, 18.71, 36.06, 63.09, 76.48, 126.49, 254.96, 325.97, 400.6, 568.38, 646.11, 688.99,
        723.34, 734.97, 740.64, 839.07, 845.67,
    )),
    Curve("p4d", 2, 0.0, "awsome-distributed-training, micro-benchmarks/nccl-tests/README.md (2 p4de, in place)", (
        0.27, 0.54, 1.08, 2.09, 3.78, 6.4, 9.89, 14.83, 20.68, 26.43, 40.84, 47.53, 63.99, 69.64, 74.3, 76.86, 78.33,
    )),
    Curve("p5", 2, 0.0, "awsome-distributed-training, micro-benchmarks/nccl-tests/README.md (2 p5, in place)", (
        0.68, 1.18, 2.55, 4.69, 8.68, 16.21, 26.73, 46.9, 78.21, 105.46, 150.62, 208.26, 287.02, 346.47, 394, 440.96,
        442.06, 464.34, 478.95, 487.26,
    )),
    Curve("p6-b200", 4, 20.0, "ml-engineering, network/README.md (4 p6-b200)", (
        0.01, 0.04, 0.45, 1.33, 2.84, 5.37, 10.38, 18.9, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.9, 361.99,
        372.42, 377.34, 380.39, 381.8,
    )),
)


@dataclass(frozen=True)
class Row:
    """One figure; ``floor``: what healthy nodes must reach at least, not what they reach. ``nvls`` off: without NVLS.
    ``fitted``: it, or a curve that ends in it, had a part in fitting the model."""

    fabric: str
    collective: str
    nodes: int
    ranks_per_node: int
    size: int
    busbw: float
    source: str
    floor: bool = False
    nvls: bool = True
    fitted: bool = False


AZURE = "azurehpc-health-checks, conf/*.conf"
ML = "ml-engineering, network/README.md"
AWS = "awsome-distributed-training, micro-benchmarks/nccl-tests/README.md"
ROWS = (
    Row("ndv4", "all_reduce", 1, 8, 8 * GIB, 228, AZURE, floor=True),
    Row("ndv4", "all_reduce", 1, 8, 16 * GIB, 228, AZURE, floor=True),
    Row("ndv5", "all_reduce", 1, 8, 16 * GIB, 460, AZURE, floor=True),
    Row("ndv5", "all_reduce", 1, 8, 16 * GIB, 477.9, "azurehpc-health-checks, a log of a healthy node"),
    Row("ndh200v5", "all_reduce", 1, 8, 16 * GIB, 431, AZURE, floor=True),
    Row("ndmi300xv5", "all_reduce", 1, 8, 16 * GIB, 314, AZURE, floor=True),
    Row("ndmi300xv5", "all_reduce", 1, 8, 4 * GIB, 312.9, ML),
    Row("ndmi300xv5", "all_reduce", 1, 2, 4 * GIB, 47.67, ML, fitted=True),
    Row("nc80h100v5", "all_reduce", 1, 2, 8 * GIB, 208, AZURE, floor=True),
    Row("nc96a100v4", "all_reduce", 1, 4, 8 * GIB, 25, AZURE, floor=True),
    Row("ndv2", "all_reduce", 1, 8, 8 * GIB, 110, AZURE, floor=True),
    Row("p5en", "all_reduce", 1, 8, 16 * GIB, 367.6, ML, nvls=False),
    Row("p5en", "all_reduce", 1, 8, 16 * GIB, 482.3, ML, fitted=True),
    Row("p5en", "all_gather", 1, 8, 16 * GIB, 361.4, ML),
    Row("p5en", "reduce_scatter", 1, 8, 16 * GIB, 362.9, ML),
    Row("p5en", "all_reduce", 1, 4, 8 * GIB, 363.3, ML),
    Row("p5en", "all_reduce", 1, 5, 8 * GIB, 414.2, ML, fitted=True),
    Row("p5en", "all_reduce", 1, 6, 8 * GIB, 435.6, ML, fitted=True),
    Row("p5en", "all_reduce", 1, 7, 8 * GIB, 460.0, ML, fitted=True),
    Row("p5en", "all_reduce", 1, 8, 8 * GIB, 473.1, ML, fitted=True),
    Row("p6-b200", "all_reduce", 1, 8, 8 * GIB, 838.0, ML, fitted=True),
    Row("p6-b200", "all_reduce", 1, 8, 16 * GIB, 845.7, ML, fitted=True),
    Row("p6-b200", "all_reduce", 1, 8, 8 * GIB, 682.2, ML, nvls=False),
    Row("p6-b200", "all_reduce", 1, 4, 8 * GIB, 673.2, ML),
    Row("p6-b200", "all_reduce", 1, 6, 8 * GIB, 778.2, ML, fitted=True),
    Row("p6-b200", "all_reduce", 1, 7, 8 * GIB, 811.2, ML, fitted=True),
    Row("p4d", "all_reduce", 2, 8, 2 * GIB, 78.3, AWS, fitted=True),
    Row("p5", "all_reduce", 2, 8, 128 * MIB, 289.2, AWS, fitted=True),
    Row("p5", "all_reduce", 2, 8, 2 * GIB, 443.7, AWS, fitted=True),
    Row("p5", "all_reduce", 2, 8, 16 * GIB, 487.1, AWS, fitted=True),
    Row("ndh200v5", "all_reduce", 2, 8, 1 * GIB, 456, "CoreWeave, 2 nodes of 8 H200"),
    Row("ndv5", "all_reduce", 2, 8, 1 * GIB, 445, "Together, 2 nodes of 8 H100"),
    Row("a3-mega", "all_reduce", 2, 8, 8 * GIB, 90, "Google cluster health scanner", floor=True),
    Row("a3-ultra", "all_reduce", 2, 8, 8 * GIB, 250, "Google cluster health scanner", floor=True),
    Row("a4", "all_reduce", 2, 8, 8 * GIB, 250, "Google cluster health scanner", floor=True),
    Row("p5en", "all_reduce", 4, 8, 4 * GIB, 364.9, "ml-engineering, todo.md (Ring)"),
    Row("p5en", "all_reduce", 4, 8, 16 * GIB, 369.1, "ml-engineering, todo.md (Ring)"),
    Row("p5en", "all_reduce", 4, 8, 16 * GIB, 369.9, "awsome-distributed-training, …/topology-aware-nccl-tests/README.md"),
    Row("p6-b200", "all_reduce", 4, 8, 16 * GIB, 381.8, ML, fitted=True),
    Row("gb200", "all_reduce", 18, 4, 16 * GIB, 850, "NVIDIA GTC 2025, S72583: all-reduce of 72 GPUs", fitted=True),
)
