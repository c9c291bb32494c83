"""Fit of the factors in ``hpc_mp/planner/frameworks.py`` to published results.

    python benchmarks/calibrate_planner.py --csv FILE

The defaults of the fields in ``SHARED`` are fitted to all rows of the file with core=1 that ran; the rows of frameworks have
them unless they state others. Each framework's share of the GPU's products is fitted too, and held near the default the more,
the fewer results there are. Seconds are linear in the fields (products: in its inverse) but for a few maxima, so that a search
by coordinates needs a few predictions of each row; it is repeated around its result.
"""

import argparse
import csv
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from planner_vs_published import Case, case_of, key_of, seconds_of, tokens_rate

from hpc_mp.planner.frameworks import FRAMEWORKS, Framework
from hpc_mp.planner.step import estimate

SHARED = ("products", "passes", "contention", "tensor")
STEPS = (1.2, 1.05, 1.01)  # factors of the search
HELD = 8.0  # weight of a framework's distance from the general row
FAR = 0.5  # error in logarithms beyond which a row counts no more
Rows = Mapping[str, Framework]


def term(field: str, framework: Framework) -> float:
    """Return the quantity that seconds are linear in."""
    value = float(getattr(framework, field))
    return 1 / value if field == "products" else value


@dataclass(frozen=True)
class Line:
    """A result: published seconds, predicted seconds with one framework, and their slopes in the fields."""

    name: str
    source: str
    published: float
    base: Framework
    seconds: float
    slopes: dict[str, float]

    def error(self, framework: Framework) -> float:
        moved = sum(slope * (term(field, framework) - term(field, self.base)) for field, slope in self.slopes.items())
        return min(FAR, abs(math.log(max(self.seconds + moved, 1e-9) / self.published)))


def line_of(case: Case, rows: Rows) -> Line:
    name = key_of(case.framework, rows)
    base = rows[name]
    seconds = seconds_of(case, base, estimate)
    slopes = {}
    for field in SHARED:
        other = replace(base, **{field: 1.1 * getattr(base, field)})
        slopes[field] = (seconds_of(case, other, estimate) - seconds) / (term(field, other) - term(field, base))
    assert case.published
    return Line(name, case.row["source"], tokens_rate(case, 1.0) / case.published, base, seconds, slopes)


def searched(value: float, loss: Callable[[float], float]) -> float:
    """Return the value of least loss near one, by factors."""
    best = loss(value)
    for step in STEPS:
        for factor in (step, 1 / step):
            while (now := loss(value * factor)) < best - 1e-9:
                best, value = now, value * factor
    return value


def fitted(lines: Sequence[Line], rows: Rows = FRAMEWORKS) -> dict[str, Framework]:
    """Return the rows with fitted factors."""
    start = Framework()
    stated = {name: [field for field in SHARED if field != "products" and getattr(row, field) != getattr(start, field)]
              for name, row in rows.items()}
    weights = {source: 1 / math.sqrt(count) for source, count in Counter(line.source for line in lines).items()}
    shared = {field: float(getattr(start, field)) for field in SHARED}
    ratios = dict.fromkeys(rows, 1.0)

    def row(name: str) -> Framework:
        own: dict[str, Any] = {field: value for field, value in shared.items() if field not in stated[name]}
        return replace(rows[name], **own | {"products": shared["products"] * ratios[name]})

    def loss(values: dict[str, float], key: str, value: float) -> float:
        kept, values[key] = values[key], value
        frameworks = {name: row(name) for name in rows}
        values[key] = kept
        return (sum(weights[line.source] * line.error(frameworks[line.name]) for line in lines)
                + HELD * sum(math.log(ratio if name != key else value) ** 2 for name, ratio in ratios.items()))

    for _ in range(6):
        for values, keys in ((shared, SHARED), (ratios, [name for name in rows if name])):
            for key in keys:
                values[key] = searched(values[key], partial(loss, values, key))
    return {name: row(name) for name in rows}


def calibrated(cases: Sequence[Case], turns: int = 2) -> dict[str, Framework]:
    """Return the rows fitted to the results of these cases."""
    rows: Rows = FRAMEWORKS
    for _ in range(turns):
        rows = fitted([line_of(case, rows) for case in cases if case.published], rows)
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.csv.open(newline="") as file:
        cases = [case_of(row) for row in csv.DictReader(file) if row["core"] == "1"]
    for name, row in calibrated(cases).items():
        own = {field.name: getattr(row, field.name) for field in fields(row)}
        print(f'"{name}":', ", ".join(f"{key}={value:.3g}" for key, value in own.items() if value != getattr(Framework(), key)))


if __name__ == "__main__":
    main()
