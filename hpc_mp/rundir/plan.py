"""``plan.json``: decisions and predictions made before a run's ranks start. The launch writes it; all other parts read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_mp.base.files import read_json, write_json
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per optimizer step and axis: sent by one rank to one partner, or leaving a node or a switch.

    Attributes:
        tp: activations, to the rank's neighbour in the ring of its tensor group.
        pp: activations to the next stage, and the same number of bytes of gradients to the previous one.
        cp: keys, values and their gradients, to the rank's neighbour in the ring of its context group.
        cp_pairs: a part of queries, keys, values and outputs, to each other rank of its context group, with ``ulysses``.
        dp: parameters and gradients, to the rank's neighbour in the ring of its shard group.
        replicas: gradients, to its neighbour in the ring of the ranks that hold the same part, with ``shard_degree``.
        ep: tokens, to each other rank of its expert group; an expectation, since it depends on the routers.
        expert_dp, expert_replicas: like ``dp`` and ``replicas``, for experts that are divided among ranks: among ranks with the
            same experts.
        tied: the embedding's gradient, to the other end of a pipeline if the head is a copy of the embedding.
        shards: number of ranks of data × context in a ring of ``dp``; None: all of them. ``expert_shards``: the same for
            ``expert_dp``.
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
        """Total bytes on the data axis."""
        return self.dp + self.replicas + self.expert_dp + self.expert_replicas


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model state of one rank at the peak of a step (after the first backward), in bytes. ``host``, ``disk``: state kept there
    instead of on the rank's device; not part of the total."""

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
    """Maximum number of chunks (stage, microbatch) that a pipeline rank holds at once between forward and backward: ``held`` in
    total, ``here`` with activations on the device, ``away`` with activations on the host."""

    held: int
    here: int
    away: int


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The predicted memory and speed of a run.

    Attributes:
        gpu, machine, memory: name of the GPU model; description of the machine whose links count; bytes of one GPU.
        needs: bytes of the fullest tensor rank of every pipeline rank on its GPU, by what holds them, the largest first.
            ``libraries`` are outside of what PyTorch allocates; on CPUs there is the ``process`` instead.
        seconds, parts: of a step, and of what takes them on the slowest rank. tokens_per_s, mfu: throughput; share of the peak.
        passes: seconds of the computations of every pipeline rank.
        pace: measured by predicted seconds of earlier runs on such GPUs; all seconds contain this factor.
    """

    gpu: str
    machine: str
    memory: int
    needs: tuple[Mapping[str, int], ...]
    seconds: float
    parts: Mapping[str, float]
    tokens_per_s: float
    mfu: float
    passes: tuple[float, ...]
    pace: float = 1.0

    @property
    def fullest(self) -> Mapping[str, int]:
        """The needs of the fullest rank."""
        return max(self.needs, key=lambda rank: sum(rank.values()))

    @property
    def total(self) -> int:
        return sum(self.fullest.values())

    @property
    def on_gpus(self) -> bool:
        return "libraries" in self.fullest

    @property
    def allocated(self) -> int:
        """The bytes of ``total`` that PyTorch allocates."""
        return self.total - self.fullest.get("libraries", 0)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of one attempt.

    Attributes:
        layers: number of layers of every pipeline stage.
        traffic: bytes that the busiest stage sends along each axis.
        state: model state of every rank.
        link_time_s: seconds per step that ranks wait for links between nodes, at the doctor's measured rate; None without one.
        choices: keys of the job that the launch decided, with the reason of each.
        chunks: chunk counts of every pipeline rank.
        place: the back end that starts the ranks: "slurm", "step", "local" or "mpi"; empty in plans of earlier releases.
        expected: memory and speed; None on an unknown machine.
    """

    layers: tuple[int, ...]
    traffic: Traffic
    state: tuple[StateBytes, ...]
    link_time_s: float | None = None
    choices: tuple[ResolvedKey[Any], ...] = ()
    chunks: tuple[ChunkCounts, ...] = ()
    place: str = ""
    expected: ExpectedStep | None = None


def write_plan(run: RunDirectory, plan: RunPlan) -> None:
    """Write the plan. Raises OSError."""
    write_json(run.plan, asdict(plan))


def read_plan(run: RunDirectory) -> RunPlan | None:
    """Read the plan; None for a run without one (its ranks were started by hand) or if it is broken."""
    try:
        tree = read_json(run.plan)
        return RunPlan(tuple(tree["layers"]), Traffic(**tree["traffic"]), tuple(StateBytes(**fields) for fields in tree["state"]),
                       tree["link_time_s"], tuple(map(_choice, tree["choices"])),
                       tuple(ChunkCounts(**fields) for fields in tree.get("chunks", ())), tree.get("place", ""),
                       ExpectedStep(**fields | {"needs": tuple(fields["needs"]), "passes": tuple(fields["passes"])})
                       if (fields := tree.get("expected")) else None)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _choice(tree: dict[str, Any]) -> ResolvedKey[Any]:
    value = tree["value"]
    return ResolvedKey(tree["key"], tuple(value) if isinstance(value, list) else value, tree["why"])
