"""Changed machines: a tree, what is done to it, and what must be said of it. ``faults.toml`` says what a row of a table means."""

import functools
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edits import P100, counted, dark, earlier, firewall, logged, pairs, process, resource_limit, smi, within
from machines.tree import HANGS, Edit, broken, tree

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor.checks.check import Said, run
from hpc_mp.doctor.checks.registry import GPU as CHECKS

SEVERITIES = ("ok", "warning", "error", "unknown")
# Keys of a row -> the edits that they stand for, made of the tree and the value.
MADE: Mapping[str, Callable[[str, Any], dict[str, Edit]]] = {
    "grown": lambda kind, _: earlier(kind),
    "limit": lambda _, value: resource_limit(*value),
    "process": lambda _, value: process(*value),
    "kernel": lambda kind, value: logged(*value, kind=kind),
    "firewall": lambda _, value: firewall(*value),
    "smi": lambda kind, value: smi(kind, value.get("gpu"), {name: value[name] or None for name in value if name != "gpu"}),
    "v100": lambda kind, value: counted(kind, **value),
    "p100": lambda kind, value: counted(kind, units=P100, **value),
    "within": lambda kind, value: within(kind, value),
    "dark": lambda kind, value: dark(kind, *value),
    "pairs": lambda _, value: pairs(value),
}


@dataclass(frozen=True)
class Case:
    """One change and its finding.

    Attributes:
        change: its edits of the tree, or a function that makes them: only the worker that runs a case pays for them.
        evidence, subject: parts of ``subject: evidence`` and of the subject.
        also: other checks that rightly notice it.
        many: the number of findings, if the check looks at it alone.
    """

    code: str
    kind: str
    change: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    outcome: str
    evidence: str
    subject: str = ""
    also: Collection[str] = ()
    many: int = 1

    @functools.cached_property
    def edits(self) -> Mapping[str, Any]:
        return self.change() if callable(self.change) else self.change

    def __str__(self) -> str:
        return f"{self.code}-{self.kind}-{self.evidence[:24]}"


@dataclass(frozen=True)
class FaultTable:
    """``names``: of folders and programs; ``sets``: edits by name; ``faults``: rows by check; ``drift``: rows by trait."""

    names: Mapping[str, str]
    sets: Mapping[str, Any]
    faults: Mapping[str, list[dict[str, Any]]]
    drift: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> "FaultTable":
        return cls(**tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")))

    def cases(self) -> tuple[Case, ...]:
        return tuple(self._case(code, row) for code, rows in self.faults.items() for row in rows)

    def edits(self, kind: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """What a row, or one of the sets, does to a tree: its sets first."""
        found: dict[str, Any] = {}
        for name in row.get("sets", ()):
            found |= self.edits(kind, self.sets[name])
        for name in MADE.keys() & row.keys():
            value = row[name]
            if isinstance(value, dict):
                value = {self._path(part): text for part, text in value.items()}
            found |= MADE[name](kind, value)
        for name, edit in row.get("edit", {}).items():
            path, pair = self._path(name), tuple(edit) if isinstance(edit, list) else edit
            found[path] = found[path].replace(*pair) if path in found and isinstance(pair, tuple) else pair
        for name in map(self._path, row.get("gone", ())):  # what a set has made is then not made at all
            if found.pop(name, None) is None:
                found[name] = None
        return found | {self._path(name): HANGS for name in row.get("hangs", ())}

    def _path(self, name: str) -> str:
        return re.sub(r"^[A-Z]+", lambda short: self.names[short[0]], name)

    def _case(self, code: str, row: Mapping[str, Any]) -> Case:
        kind = row.get("on", "ndv5")
        (outcome,) = row.keys() & {*SEVERITIES}
        rest = {name: row[name] for name in ("subject", "also", "many") if name in row}
        unknown = row.keys() - {*SEVERITIES, *MADE, "on", "sets", "edit", "gone", "hangs", *rest}
        assert not unknown, (code, unknown)
        return Case(code, kind, functools.partial(self.edits, kind, row), outcome, row[outcome], **rest)


def rows(path: Path, cells: int) -> list[tuple[str, ...]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(map(str.strip, line.split("|", cells - 1))) for line in lines if not line.startswith("#")]


def in_process(tasks: Mapping[str, Callable[[], Said]], seconds: float, left: Path | None) -> dict[str, Said | Unavailable]:
    def answer(task: Callable[[], Said]) -> Said | Unavailable:
        try:
            return task()
        except Unavailable as why:
            return why

    return {name: answer(task) for name, task in tasks.items()}


GPU_KINDS = ("ndv4", "ndv5", "ndh200v5", "p4d", "p5", "gb200")
CODES = tuple(check.code for check in CHECKS)


def holds(case: Case) -> None:
    """The check says it, of the right part; and no other check says anything new. Of what is well it says nothing else."""
    found = findings(broken(case.kind, case.edits))
    mine = of(found, case.code)
    right = [finding for finding in mine
             if case.evidence in f"{finding.subject}: {finding.message}" and case.subject in finding.subject]
    assert right and (case.outcome != "ok" or right == mine), f"{case.code} says {mine}"
    assert {finding.severity for finding in right} == {case.outcome}
    assert all(finding.fix for finding in right if finding.severity in ("warning", "error"))
    assert set(ills(found)) - set(healthy_ills(case.kind)) == {*case.also, *([case.code] if case.outcome != "ok" else [])}


@functools.cache
def healthy_ills(kind: str) -> dict[str, list[Finding]]:
    return ills(findings(tree(kind)))


def findings(source: NodeSource) -> list[Finding]:
    """What all checks say but the one that waits for counters to grow; it is tested by itself."""
    return run([check for check in CHECKS if check.code != "gpu-nvlink-errors"], source, answers=in_process)


def ills(found: list[Finding]) -> dict[str, list[Finding]]:
    """All that is not well, by code."""
    ill: dict[str, list[Finding]] = {}
    for finding in found:
        if finding.severity != "ok":
            ill.setdefault(finding.code, []).append(finding)
    return ill


def of(found: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]
