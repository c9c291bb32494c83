"""The ledger of nodes that have failed or are suspected, by cluster, with the evidence and an expiry time; and the choice of the
nodes that a job is kept off.

One JSON line per finding in ``$XDG_STATE_HOME/hpc-mp/nodes/CLUSTER.jsonl`` (``~/.local/state`` by default): private to the user,
shared by all runs. The key includes the cluster because node names repeat, and another cluster's ``--exclude`` would make sbatch
fail. Lines are only appended, because jobs on many nodes write at once. The last line of a node and a kind of fault counts. A
node is taken back by a line that has expired.

Slurm's list of excluded nodes is hard: a job with too long a list waits forever beside idle nodes. So our exclusions are taken
back if the other nodes are too few, the least certain and oldest first. Exclusions by the user are never taken back.
"""

import json
import os
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from hpc_mp.base.assets import state_folder
from hpc_mp.base.files import read_json, read_lines, write_json
from hpc_mp.cluster.slurm.nodes import NodeState

Certainty = Literal["suspected", "likely", "certain"]
CERTAINTIES: tuple[Certainty, ...] = ("suspected", "likely", "certain")  # in ascending order
AVOIDED_S = 24 * 3600.0  # how long a finding is valid


@dataclass(frozen=True, slots=True)
class BadNode:
    """The reason why a node is avoided."""

    node: str
    code: str  # kind of fault, one word
    evidence: str  # one sentence
    run: str  # the run that suffered, or another source of the finding
    # time, until: unix time in seconds
    time: float
    until: float
    # "suspected": one of several candidates, not excluded; "likely": a run lost it, and it may be well when it is back;
    # "certain": measured, or stated by its own hardware, or by a person
    certainty: Certainty = "likely"

    @property
    def weight(self) -> tuple[int, float]:
        """Sort key for taking back: the least certain first, and of equal certainty the oldest."""
        return CERTAINTIES.index(self.certainty), self.time


KEYS = {field.name for field in fields(BadNode)}


def ledger(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a cluster's findings."""
    return state_folder(environ) / "nodes" / f"{cluster}.jsonl"


def record(path: Path, findings: Sequence[BadNode]) -> None:
    """Add findings. Raises OSError if the file cannot be written."""
    if not findings:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(finding)) + "\n" for finding in findings))


def findings(path: Path, now: float | None = None) -> tuple[BadNode, ...]:
    """Return all valid findings, including suspicions, oldest first. Malformed lines are skipped."""
    moment = time.time() if now is None else now
    try:
        lines = read_lines(path)
    except OSError as error:
        warnings.warn(f"bad nodes are unknown: {path} cannot be read ({error.strerror})", stacklevel=2)
        return ()
    valid = understood(lines)
    latest = {(finding.node, finding.code): finding for finding in valid}
    return tuple(sorted((finding for finding in latest.values() if finding.until > moment), key=lambda finding: finding.time))


def understood(lines: Iterable[object]) -> list[BadNode]:
    """Return the lines that are findings. The certainty is a newer field and may be absent."""
    return [BadNode(**line) for line in lines
            if isinstance(line, dict) and KEYS - {"certainty"} <= line.keys() <= KEYS
            and line.get("certainty", "likely") in CERTAINTIES]


def bad_nodes(path: Path, now: float | None = None, run: Path | None = None) -> dict[str, BadNode]:
    """Return the most certain and newest finding of every avoided node, by node. A suspicion excludes no node. ``run``: the run
    that is being continued; its own findings count as certain."""
    continued = run and run.resolve()  # its path may contain links
    avoided = (replace(finding, certainty="certain") if continued and Path(finding.run).resolve() == continued else finding
               for finding in findings(path, now) if finding.certainty != "suspected")
    return {finding.node: finding for finding in sorted(avoided, key=lambda finding: finding.weight)}


def take_back(path: Path, nodes: Collection[str], codes: Collection[str] | None = None,
              now: float | None = None) -> tuple[BadNode, ...]:
    """Expire these nodes' findings. Return the findings that were valid. Raises OSError if the ledger cannot be written.
    ``codes``: only findings of these kinds; None: of all kinds."""
    moment = time.time() if now is None else now
    expired = tuple(finding for finding in findings(path, moment)
                    if finding.node in nodes and (codes is None or finding.code in codes))
    if expired:
        record(path, [replace(finding, until=moment) for finding in expired])
    return expired


@dataclass(frozen=True, slots=True)
class Keeping:
    """A choice of our exclusions."""

    excluded: tuple[BadNode, ...]  # our exclusions that still hold
    taken_back: tuple[BadNode, ...]  # our exclusions that no longer hold

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(finding.node for finding in self.excluded)


def choose(ours: Sequence[BadNode], users: Collection[str], states: Mapping[str, NodeState], needed: int,
           stuck: bool = False) -> Keeping:
    """Choose which of our exclusions hold.

    A node that the partition does not have (any more) is dropped, because Slurm could refuse the whole list for it. A suspicion
    excludes no node. If too few other nodes are in service, excluded nodes in service are taken back, because they help at once.
    If these do not suffice, all nodes are taken back, and the job gets the node that comes back first.

    Args:
        ours: at most one finding per node.
        users: nodes that the user excludes.
        states: states of the nodes of the job's partition.
        needed: number of nodes of the job.
        stuck: True if Slurm reports that the nodes in service do not fit the job, whatever their number, because of their
            features, memory or GPUs. Then one more is taken back.
    """
    held = [finding for finding in sorted(ours, key=lambda finding: finding.weight)
            if finding.certainty != "suspected" and finding.node in states and finding.node not in users]
    helpful = [finding for finding in held if states[finding.node].in_service]
    others = {node for node, state in states.items() if state.in_service} - {*users} - {finding.node for finding in held}
    short = max(needed - len(others), int(stuck))
    back = helpful[:short] if short <= len(helpful) else held
    return Keeping(tuple(finding for finding in ours if finding in held and finding not in back),
                   tuple(finding for finding in ours if finding in back))


def read_exclusions(path: Path) -> tuple[BadNode, ...]:
    """Return the exclusions that we have recorded for a job. All others in Slurm's list are the user's."""
    try:
        lines = read_json(path)
    except (OSError, ValueError):
        return ()
    return tuple(understood(lines)) if isinstance(lines, list) else ()


def write_exclusions(path: Path, ours: Sequence[BadNode]) -> None:
    """Record our exclusions. Raises OSError."""
    write_json(path, [asdict(finding) for finding in ours])
