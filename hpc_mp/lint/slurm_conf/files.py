"""slurm.conf and the files beside it, read from disk: what is wrong is found before a controller starts with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.topology import read_topologies
from hpc_mp.cluster.topology.readers import amiss
from hpc_mp.lint.slurm_conf.config import SlurmFacts
from hpc_mp.lint.slurm_conf.report import RULES

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|\S+)")
_NAMES = {"CPUs": "CPUTot"}  # a node's field, as scontrol shows it
_BESIDE = ("gres.conf", "cgroup.conf")


def lint_slurm_conf(text: str, path: Path) -> list[Finding]:
    """What ``cluster describe`` finds wrong, as far as the files say it: what they leave out is not held against them."""
    folder = path.parent
    facts = _facts(text, folder)
    return [_at(finding, text, path) for rule in RULES for finding in rule.apply(facts, str(path))]


def lint_topology(text: str, path: Path) -> list[Finding]:
    """The faults at which a reader of topology.conf stops; else what Slurm does not take, or takes otherwise than it is written,
    and fabrics that are apart."""
    try:
        topologies = read_topologies(text)
        notes = [note for topology in topologies if topology.tree for note in amiss(topology)]
    except HpcMpError as error:
        return [Finding("topology-unreadable", "error", error.value, f"{error.rule}.", error.remedy, str(path))]
    facts = SlurmFacts({}, topologies=topologies)
    apart = [found for rule in RULES if rule.code == "topology-apart" for found in rule.apply(facts, str(path))]
    wrong = [Finding("topology-amiss", "error" if "Slurm refuses" in note else "warning", "", f"{note}.",
                     "Name each node under one switch, and each switch in a line of its own.", str(path)) for note in notes]
    return [*apart, *wrong]


def _facts(text: str, folder: Path) -> SlurmFacts:
    config: dict[str, str] = {}
    defaults: dict[str, str] = {}  # of the partitions that follow
    nodes: list[Words] = []
    partitions: list[Words] = []
    for line in _lines(text):
        words = {key: value.strip('"') for key, value in _PAIR.findall(line)}
        first = next(iter(words), "")
        if first.casefold() == "nodename":
            nodes += [{**{_NAMES.get(key, key): value for key, value in words.items()}, "NodeName": name}
                      for name in _expanded(words[first]) if name != "DEFAULT"]
        elif first.casefold() == "partitionname" and words[first] == "DEFAULT":
            defaults |= words
        elif first.casefold() == "partitionname":
            partitions.append({**defaults, **words})
        else:
            config |= words
    beside = {name: _text(folder / name) for name in _BESIDE}
    cgroup = beside["cgroup.conf"]
    fences = None if cgroup is None else dict(_PAIR.findall("\n".join(_lines(cgroup))))
    return SlurmFacts(config, fences, tuple(partitions), tuple(nodes), gres_conf=beside["gres.conf"])


def _lines(text: str) -> Iterator[str]:
    """Without comments; a backslash at its end continues a line."""
    joined = re.sub(r"\\\n", " ", text)
    return (plain for line in joined.splitlines() if (plain := line.partition("#")[0].strip()))


def _expanded(nodelist: str) -> tuple[str, ...]:
    try:
        return expand(nodelist)
    except HpcMpError:
        return (nodelist,)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _at(finding: Finding, text: str, path: Path) -> Finding:
    """With the line that sets what the finding is about, where it can be found."""
    beside, _, rest = finding.subject.partition(": ")
    if beside in _BESIDE:
        return replace(finding, file=str(path.parent / beside), subject=rest)
    key = re.match(r"\w+(?==)", finding.subject)
    wanted = rf"\s*{key[0]}\s*=" if key else rf"\s*PartitionName\s*=\s*{re.escape(beside)}\b"
    number = next((at for at, line in enumerate(text.splitlines(), 1) if re.match(wanted, line, re.IGNORECASE)), None)
    return replace(finding, line=number)
