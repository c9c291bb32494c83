"""Nodes that have failed, by cluster, with the evidence and the time until which they are avoided.

One JSON line per finding in ``$XDG_STATE_HOME/hpc-mp/nodes/CLUSTER.jsonl`` (``~/.local/state`` by default): a user's own
knowledge, shared by all runs. Keyed by cluster because node names repeat: another cluster's ``--exclude`` would make
sbatch fail.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hpc_mp.base.files import read_lines


@dataclass(frozen=True, slots=True)
class BadNode:
    """Why a node is avoided.

    Attributes:
        code: what kind of fault, one word.
        evidence: one sentence.
        run: the run that suffered.
        time, until: unix seconds.
    """

    node: str
    code: str
    evidence: str
    run: str
    time: float
    until: float


FIELDS = {field.name for field in fields(BadNode)}


def ledger(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the findings of a cluster lie."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hpc-mp" / "nodes" / f"{cluster}.jsonl"


def record(path: Path, findings: Sequence[BadNode]) -> None:
    """Add findings. Raises OSError when it cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(finding)) + "\n" for finding in findings))


def bad_nodes(path: Path, now: float | None = None) -> dict[str, BadNode]:
    """The latest finding of every node that is to be avoided still, by node; lines of another form are passed over."""
    moment = time.time() if now is None else now
    try:
        lines = read_lines(path)
    except OSError as error:
        warnings.warn(f"bad nodes are not known: {path} cannot be read ({error.strerror})", stacklevel=2)
        return {}
    findings = [BadNode(**line) for line in lines if isinstance(line, dict) and line.keys() == FIELDS]
    return {finding.node: finding for finding in findings if finding.until > moment}
