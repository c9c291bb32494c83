"""Choice of the nodes that a job is kept off: a pure decision from the findings and from the partition's nodes in service.

Slurm's list of excluded nodes is hard: a job with too long a list waits forever beside idle nodes. So our exclusions are taken
back if the other nodes are too few, the least certain and oldest first. Exclusions by the user are never taken back.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_mp.base.files import read_json, write_json
from hpc_mp.cluster.bad_nodes import BadNode, understood
from hpc_mp.cluster.slurm.nodes import NodeState


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
