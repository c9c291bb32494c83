"""Execution of a benchmark: follow the ranks and convert their events to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_mp.base.errors import RunFailed
from hpc_mp.doctor.bench.result import BenchRow, row
from hpc_mp.doctor.bench.spec import BenchSpec, Event


@dataclass(frozen=True, slots=True)
class Measured:
    """The whole measurement: ``ranks`` and ``versions`` as reported by the ranks, and a row for each size."""

    ranks: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    rows: tuple[BenchRow, ...]


class Watcher(Protocol):
    """An observer of the progress: all ranks have met, a size begins, its result, a message of Slurm."""

    def met(self, ranks: list[dict[str, Any]], versions: dict[str, str]) -> None: ...
    def begins(self, size: int) -> None: ...
    def row(self, row: BenchRow) -> None: ...
    def note(self, text: str) -> None: ...


def follow(spec: BenchSpec, events: Iterable[Event], watcher: Watcher) -> Measured:
    """Collect the results. Raises RunFailed if ranks fail or end early, HpcMpError if a rank refuses the input."""
    ranks: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    rows: list[BenchRow] = []
    ended = False

    def met(event: Event) -> None:
        ranks.extend(sorted(event["ranks"], key=lambda rank: rank["rank"]))
        versions.update(event["versions"])
        _check_hosts(spec, ranks)
        watcher.met(ranks, versions)

    def measured(event: Event) -> None:
        rows.append(row(spec, event["size"], event["ranks"]))
        watcher.row(rows[-1])

    reader: dict[str, Callable[[Event], None]] = {
        "ranks": met, "size": lambda event: watcher.begins(event["size"]), "row": measured,
        "note": lambda event: watcher.note(event["text"]),
    }
    for event in events:
        if event["event"] in reader:
            reader[event["event"]](event)
        ended = ended or event["event"] == "end"
    if not ended:
        raise RunFailed("the ranks ended before all sizes were measured")
    return Measured(tuple(ranks), versions, tuple(rows))


def _check_hosts(spec: BenchSpec, ranks: list[dict[str, Any]]) -> None:
    """Check that ranks fill host after host, as groups by node and rail require."""
    hosts = [rank["host"] for rank in ranks]
    for node in range(spec.nodes):
        node_hosts = set(hosts[node * spec.ranks_per_node:(node + 1) * spec.ranks_per_node])
        if len(node_hosts) > 1:
            raise RunFailed(f"ranks {node * spec.ranks_per_node} to {(node + 1) * spec.ranks_per_node - 1} should share a node "
                            f"and run on {', '.join(sorted(node_hosts))}: --ranks-per-node is not what the launcher did")
