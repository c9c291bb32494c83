"""Linting of slurm.conf and the files beside it on disk, before a controller starts with them."""

import re
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.cluster.slurm.conf_file import ConfigLine, read_beside, read_conf
from hpc_mp.cluster.slurm.nodelist import expanded
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.cluster.topology import read_topologies
from hpc_mp.cluster.topology.readers import amiss
from hpc_mp.lint.slurm_conf import rules_files
from hpc_mp.lint.slurm_conf.conf_files import ConfFiles
from hpc_mp.lint.slurm_conf.config import SlurmFacts
from hpc_mp.lint.slurm_conf.rules_site import RULES

_SWITCHES = "Name each node under one switch, and each switch on a separate line."


def lint_slurm_conf(text: str, path: Path, release: Version | None = None) -> list[Finding]:
    """Return findings on values that Slurm refuses or that ``cluster describe`` reports. Missing settings are not judged."""
    gres, cgroup = (read_beside(path.parent / name) for name in ("gres.conf", "cgroup.conf"))
    files = ConfFiles(path, read_conf(text, path), gres, cgroup, release)
    facts = files.facts
    return [*(finding for rule in rules_files.RULES for finding in rule.apply(files, str(path))),
            *(_placed(finding, files) for rule in RULES for finding in rule.apply(facts, str(path)))]


def lint_topology(text: str, path: Path) -> list[Finding]:
    """Return findings on keys that Slurm refuses or interprets differently, on disconnected fabrics, and on the line that stops
    Slurm's reader."""
    refused = [Finding("topology-amiss", severity, "", f"{fault}.", _SWITCHES, str(line.file), line.number)
               for severity, fault, line in rules_files.topology_hits(read_conf(text, path))]
    try:
        topologies = read_topologies(text, path)
        notes = [note for topology in topologies if topology.tree for note in amiss(topology)]
    except HpcMpError as error:
        return [Finding("topology-unreadable", "error", error.value, f"{error.rule}.", error.remedy, str(path))]
    facts = SlurmFacts({}, topologies=topologies)
    apart = [finding for rule in RULES if rule.code == "topology-apart" for finding in rule.apply(facts, str(path))]
    wrong = [Finding("topology-amiss", "error" if "Slurm refuses" in note else "warning", "", f"{note}.", _SWITCHES, str(path))
             for note in notes if "both switches and nodes" not in note]
    return [*refused, *apart, *wrong]


def _placed(finding: Finding, files: ConfFiles) -> Finding:
    """Return the finding with the file and line of its setting, if the line can be located."""
    about, _, rest = finding.subject.partition(": ")
    if about in ("gres.conf", "cgroup.conf"):
        return replace(finding, file=str(files.path.parent / about), subject=rest)
    places: dict[str, ConfigLine] = {line.pairs[0][0].casefold(): line for line in files.lines if line.pairs}
    places |= {node: line for line, nodes, _ in files.node_lines for node in nodes}
    places |= {fields["PartitionName"]: line for line, fields in files.partition_lines}
    key = re.match(r"(\w+)=", finding.subject)
    first = next(iter(expanded(about.split(" ")[0])), "")
    line = places.get(key[1].casefold() if key else about) or places.get(first)
    return finding if line is None else replace(finding, file=str(line.file), line=line.number)
