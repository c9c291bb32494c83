"""Which nodes a job is kept off: a pure decision from what is known against them and what its partition has in service.

Slurm's list of excluded nodes is hard: a job with too long a list waits for ever beside idle nodes. So exclusions of ours are
taken back when the others are too few, the least certain and oldest first. Exclusions by the user are never taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_mp.base.files import read_json, write_json
from hpc_mp.cluster.bad_nodes import BadNode, understood
from hpc_mp.cluster.slurm.nodes import NodeState


@dataclass(frozen=True, slots=True)
class Keeping:
    """Attributes:
    kept: exclusions of ours that hold.
    taken_back: those that do not any more.
    """

    kept: tuple[BadNode, ...]
    taken_back: tuple[BadNode, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(finding.node for finding in self.kept)


def choose(ours: Sequence[BadNode], users: Collection[str], states: Mapping[str, NodeState], needed: int,
           stuck: bool = False) -> Keeping:
    """Which of our exclusions hold.

    A node that the partition does not have (any more) is dropped: to name it could make Slurm refuse the whole list. A
    suspicion excludes nobody. While too few other nodes are in service, nodes in service are taken back, for these help at once;
    when they do not suffice, so are all, and whichever node comes back first is given to the job.

    Args:
        ours: at most one finding per node.
        users: nodes that the user excludes.
        states: of the nodes of the job's partition.
        needed: how many nodes the job has.
        stuck: whether Slurm says that nodes in service are too few for the job, whatever their number: their features,
            memory or GPUs are not what it asks for. Then one more is taken back.
    """
    held = [each for each in sorted(ours, key=lambda each: each.weight)
            if each.certainty != "suspected" and each.node in states and each.node not in users]
    helpful = [each for each in held if states[each.node].in_service]
    others = {node for node, state in states.items() if state.in_service} - {*users} - {each.node for each in held}
    short = max(needed - len(others), int(stuck))
    back = helpful[:short] if short <= len(helpful) else held
    return Keeping(tuple(each for each in ours if each in held and each not in back),
                   tuple(each for each in ours if each in back))


def read_exclusions(path: Path) -> tuple[BadNode, ...]:
    """Those that we have written down for a job; whatever else stands in Slurm's list is the user's."""
    try:
        lines = read_json(path)
    except (OSError, ValueError):
        return ()
    return tuple(understood(lines)) if isinstance(lines, list) else ()


def write_exclusions(path: Path, ours: Sequence[BadNode]) -> None:
    """Raises OSError."""
    write_json(path, [asdict(finding) for finding in ours])
