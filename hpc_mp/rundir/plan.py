"""``plan.json``: what was decided and predicted before a run's ranks started; written at launch, read by everybody else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpc_mp.base.files import read_json, write_json
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per optimizer step and axis: those that one rank sends to one partner, or those that leave a node or a switch.

    Attributes:
        tp: activations, to the rank's neighbour in the ring of its tensor group.
        pp: activations to the next stage, and as many bytes of gradients to the previous one.
        cp: keys, values and their gradients, to the rank's neighbour in the ring of its context group.
        cp_pairs: a part of queries, keys, values and outputs, to each other rank of its context group, with ``ulysses``.
        dp: parameters and gradients, to its neighbour in the ring of its shard group.
        replicas: gradients, to its neighbour in the ring of the ranks that hold the same part, with ``shard_degree``.
        ep: tokens, to each other rank of its expert group; an expectation, for routers decide.
        expert_dp, expert_replicas: as ``dp`` and ``replicas``, of experts that ranks share out: among those with the same ones.
        tied: the embedding's gradient, to the other end of a pipeline where the head is a copy of it.
        shards: how many ranks of data × context a ring of ``dp`` has; None: all of them. ``expert_shards``: of ``expert_dp``.
    """

    tp: float = 0.0
    pp: float = 0.0
    dp: float = 0.0
    replicas: float = 0.0
    tied: float = 0.0
    cp: float = 0.0
    cp_pairs: float = 0.0
    shards: int | None = None
    ep: float = 0.0
    expert_dp: float = 0.0
    expert_replicas: float = 0.0
    expert_shards: int | None = None

    @property
    def total(self) -> float:
        return self.tp + self.pp + self.ep + self.data + self.tied + self.cp + self.cp_pairs

    @property
    def data(self) -> float:
        """All that the data axis sends."""
        return self.dp + self.replicas + self.expert_dp + self.expert_replicas


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model state of one rank at the fullest moment of a step (after the first backward), in bytes.

    Attributes:
        host, disk: what lies there instead of on the rank's device; no part of the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """How many chunks (stage, microbatch) a pipeline rank is between the forward and the backward of at once at most: ``held`` in
    all, ``here`` with their activations on the device, ``away`` with them on the host."""

    held: int
    here: int
    away: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of one attempt.

    Attributes:
        layers: of every pipeline stage.
        traffic: what the busiest stage sends along each axis.
        state: of every rank.
        link_time_s: seconds per step for which ranks wait for links between nodes, at the measured rate; None where the
            doctor has measured none.
        choices: the keys of the job that the launch has settled, with the reason of each.
        chunks: of every pipeline rank.
        place: the back end that starts the ranks: "slurm", "step", "local" or "mpi"; empty in plans of earlier releases.
    """

    layers: tuple[int, ...]
    traffic: Traffic
    state: tuple[StateBytes, ...]
    link_time_s: float | None = None
    choices: tuple[ResolvedKey[Any], ...] = ()
    chunks: tuple[ChunkCounts, ...] = ()
    place: str = ""


def write_plan(run: RunDirectory, plan: RunPlan) -> None:
    """Raises OSError."""
    write_json(run.plan, asdict(plan))


def read_plan(run: RunDirectory) -> RunPlan | None:
    """None for a run without one: its ranks were started by hand, or it is broken."""
    try:
        return _from_dict(read_json(run.plan))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _from_dict(tree: dict[str, Any]) -> RunPlan:
    return RunPlan(tuple(tree["layers"]), Traffic(**tree["traffic"]), tuple(StateBytes(**each) for each in tree["state"]),
                   tree["link_time_s"], tuple(map(_choice, tree["choices"])),
                   tuple(ChunkCounts(**each) for each in tree.get("chunks", ())), tree.get("place", ""))


def _choice(tree: dict[str, Any]) -> ResolvedKey[Any]:
    value = tree["value"]
    return ResolvedKey(tree["key"], tuple(value) if isinstance(value, list) else value, tree["why"])
