"""Measured bandwidth between the nodes of a cluster: ``cluster.json``, written by the doctor, read by planner and placement.

One file per cluster, ``$XDG_STATE_HOME/hpc-mp/clusters/CLUSTER.json`` (``~/.local/state`` by default), private to the user.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_high
from typing import Any

from hpc_mp.base.assets import state_folder
from hpc_mp.base.files import write_text
from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import ago

COUNTS_DAYS = 30  # days for which a measurement counts: cables are changed, and nodes and switches are repaired


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Rates between nodes."""

    cluster: str
    time: float  # unix time in seconds
    nodes: tuple[str, ...]  # names
    # two indices into ``nodes``, the smaller first, and the GB/s of one direction over all rails together, in the slower of both
    # directions; only measured pairs
    pairs: tuple[tuple[int, int, float], ...]
    platform: str | None = None  # the kind of machines, if known

    @property
    def usual(self) -> float | None:
        """GB/s of the median pair; None without pairs."""
        return median(rate for _, _, rate in self.pairs) if self.pairs else None

    def when(self) -> str:
        """Return the age of the measurement: ``3 d ago``."""
        return ago(time.time() - self.time)

    def recent(self) -> bool:
        """Return True if the measurement is still valid."""
        return time.time() - self.time <= COUNTS_DAYS * 86400

    def between(self, a: str, b: str) -> float | None:
        """Return the GB/s between two nodes; None if they were not measured."""
        return next((rate for i, j, rate in self.pairs if {self.nodes[i], self.nodes[j]} == {a, b}), None)


def where(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a cluster."""
    return state_folder(environ) / "clusters" / f"{cluster}.json"


def write_measured(path: Path, measured: LinkRates) -> None:
    """Replace the file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(measured)) + "\n")


def read_measured(path: Path) -> LinkRates | None:
    """Read a file; None if nothing was measured. A malformed file is skipped with a warning."""
    try:
        return of_document(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        warnings.warn(f"measured bandwidths are unknown: {path} cannot be read ({error})", stacklevel=2)
        return None


def of_document(document: Any) -> LinkRates:
    """Parse a file's content. Raises ValueError, LookupError or TypeError if it is malformed."""
    nodes = tuple(map(str, document["nodes"]))
    pairs = tuple((int(a), int(b), float(rate)) for a, b, rate in document["pairs"])
    if not all(0 <= a < b < len(nodes) for a, b, _ in pairs):
        raise ValueError("a pair has a node that the file does not list")
    if not all(0 < rate < math.inf for _, _, rate in pairs):
        raise ValueError("a rate is not above 0")
    return LinkRates(str(document["cluster"]), float(document["time"]), nodes, pairs, document.get("platform"))


def noted(cluster: str | None, environ: Mapping[str, str] = os.environ) -> LinkRates | None:
    """Return the doctor's measurement of a cluster; None if there is none, or the cluster has no name."""
    return read_measured(where(cluster, environ)) if cluster is not None else None


ALIKE = 0.85  # minimum ratio of two rates that count as equal: rates of healthy pairs vary by some per cent


@dataclass(frozen=True, slots=True)
class TieredRates:
    """Rates in GB/s of one direction."""

    usual: float  # rate of the median pair
    pairs: Mapping[tuple[str, str], float]  # rate of every measured pair, under (a, b) and under (b, a)
    # host → its best measured rate, if it was measured with two others or more: a single pair does not show which of its hosts is
    # worse
    ends: Mapping[str, float]

    def between(self, a: str, b: str) -> float:
        """Return the rate of a pair. An unmeasured pair has the usual rate, or the rate of its worse end if that is less."""
        rate = self.pairs.get((a, b))
        return rate if rate is not None else min(self.usual, self.end(a), self.end(b))

    def end(self, host: str) -> float:
        return self.ends.get(host, self.usual)

    def uneven(self, hosts: Collection[str]) -> frozenset[str]:
        """Return the hosts whose rate differs from the usual one, in general or with another of these hosts."""
        names = {*hosts}
        apart = (pair for pair, rate in self.pairs.items() if rate != self.usual and names.issuperset(pair))
        return frozenset(host for host in names if self.end(host) != self.usual).union(*apart)

    def slow(self, hosts: Collection[str]) -> dict[tuple[str, ...], float]:
        """Return shares of the usual rate, slowest first: by (host,), or by (a, b) if the pair is slower than both its ends."""
        names = {*hosts}
        speeds: dict[tuple[str, ...], float] = {(host,): self.end(host) for host in hosts}
        speeds |= {pair: rate for pair, rate in self.pairs.items()
                   if pair[0] < pair[1] and names.issuperset(pair) and rate < min(map(self.end, pair))}
        return {members: rate / self.usual for members, rate in sorted(speeds.items(), key=lambda item: item[1])
                if rate < self.usual}

    def chained(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return an order in which each host is followed by the nearest remaining one: hosts with fast links are adjacent."""
        order, remaining = [*hosts[:1]], [*hosts[1:]]
        while remaining:
            order.append(max(remaining, key=lambda host: self.between(order[-1], host)))
            remaining.remove(order[-1])
        return tuple(order)


def rates(measured: LinkRates) -> TieredRates | None:
    """Return tiered rates; None if nothing was measured.

    Rates are grouped into tiers, each with the rate of its median pair. The first tier has the rates within ``ALIKE`` of the
    overall median, the next the rates within ``ALIKE`` of the median of the rest, and so on.
    """
    if not measured.pairs:
        return None
    tier = _tiers(rate for _, _, rate in measured.pairs)
    pairs = {way: tier[rate] for i, j, rate in measured.pairs for a, b in [(measured.nodes[i], measured.nodes[j])]
             for way in ((a, b), (b, a))}
    host_rates = grouped((a, rate) for (a, _), rate in pairs.items())
    ends = {host: max(values) for host, values in host_rates.items() if len(values) > 1}
    return TieredRates(tier[median_high(rate for _, _, rate in measured.pairs)], pairs, ends)


def _tiers(values: Iterable[float]) -> dict[float, float]:
    """Map each rate to the median of its tier, the higher one of an even number: one slow host of four has half of the pairs."""
    remaining, tier = sorted(values), dict[float, float]()
    while remaining:
        middle = median_high(remaining)
        tier |= {rate: middle for rate in remaining if ALIKE * middle <= rate <= middle / ALIKE}
        remaining = [rate for rate in remaining if rate not in tier]
    return tier
