"""What was measured between the nodes of a cluster: ``cluster.json``, written by the doctor, read by planner and placement.

One file per cluster, ``$XDG_STATE_HOME/hpc-mp/clusters/CLUSTER.json`` (``~/.local/state`` by default): a user's own knowledge.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpc_mp.base.text import duration

COUNTS_DAYS = 30
"""For so long a measurement counts: cables are changed, and nodes and switches are mended."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates between nodes.

    Attributes:
        time: unix seconds.
        nodes: names.
        pairs: two indices into ``nodes``, the smaller first, and the GB/s of one direction over all rails together, the slower
            one of the two; only pairs that were measured.
        latency_s: the median half round trip of small messages.
        platform: what kind of machines they are, if known.
    """

    cluster: str
    time: float
    nodes: tuple[str, ...]
    pairs: tuple[tuple[int, int, float], ...]
    latency_s: float | None = None
    platform: str | None = None

    @property
    def usual(self) -> float | None:
        """GB/s of the median pair."""
        return median(rate for _, _, rate in self.pairs) if self.pairs else None

    def when(self, now: float | None = None) -> str:
        """``3 d 4 h ago``."""
        return f"{duration(self._age(now))} ago"

    def recent(self, now: float | None = None) -> bool:
        """Whether it counts still."""
        return self._age(now) <= COUNTS_DAYS * 86400

    def _age(self, now: float | None) -> float:
        return (time.time() if now is None else now) - self.time

    def between(self, a: str, b: str) -> float | None:
        """GB/s between two nodes; None where it was not measured."""
        return next((rate for i, j, rate in self.pairs if {self.nodes[i], self.nodes[j]} == {a, b}), None)


def where(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of a cluster."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hpc-mp" / "clusters" / f"{cluster}.json"


def write_measured(path: Path, measured: Measured) -> None:
    """Replace the file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(asdict(measured)) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_measured(path: Path) -> Measured | None:
    """None where nothing was measured; a file of another form is passed over with a warning."""
    try:
        return of_document(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        warnings.warn(f"measured bandwidths are not known: {path} cannot be read ({error})", stacklevel=2)
        return None


def of_document(document: Any) -> Measured:
    """What a file holds. Raises ValueError, LookupError or TypeError: another form."""
    nodes = tuple(map(str, document["nodes"]))
    pairs = tuple((int(a), int(b), float(rate)) for a, b, rate in document["pairs"])
    if not all(0 <= a < b < len(nodes) for a, b, _ in pairs):
        raise ValueError("a pair is none of its nodes")
    if not all(0 < rate < math.inf for _, _, rate in pairs):
        raise ValueError("a rate is not above 0")
    return Measured(**{**document, "time": float(document["time"]), "nodes": nodes, "pairs": pairs})


def noted(cluster: str | None, environ: Mapping[str, str] = os.environ) -> Measured | None:
    """What the doctor has noted of a cluster; None where it has none, or the cluster has no name."""
    return read_measured(where(cluster, environ)) if cluster is not None else None
