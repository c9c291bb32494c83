"""Published all-reduce bandwidths, with which the model of ``hpc_mp.planner.collectives`` is compared, read from a TOML file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Row:
    """One figure; ``said``: "floor", "plain", "fitted" or nothing."""

    fabric: str
    collective: str
    nodes: int
    ranks_per_node: int
    mib: int
    busbw: float
    source: str
    said: str = ""


PUBLISHED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CURVES = [Curve(**curve) for curve in PUBLISHED["curves"]]
ROWS = [Row(*row[:6], PUBLISHED["sources"].get(row[6], row[6]), *row[7:]) for row in PUBLISHED["rows"]]
