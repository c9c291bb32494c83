"""Resolution of the choices that a job file leaves open: each with its value and reason, applied to the job once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from typing import Any, Generic, TypeVar

from hpc_mp.job.load import Spec

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ResolvedKey(Generic[Value]):
    """One key of the job file (``"slurm.gpu_type"``), its value and the reason; the reason is empty if nothing was chosen."""

    key: str
    value: Value
    why: str = ""


@dataclass(frozen=True, slots=True)
class MachineChoices:
    """The choices of a launch that depend only on the machine or the cluster."""

    device: ResolvedKey[str]  # "cpu" or "cuda"; "auto" if it is unknown before the ranks start
    # gpu_request, gpu_type: the form and the type in which GPUs are requested
    gpu_request: ResolvedKey[str]
    gpu_type: ResolvedKey[str | None]
    # the nodes that Slurm must not allocate, in its notation; None for the job's own list, if it has one
    exclude: ResolvedKey[str | None]
    profile: ResolvedKey[str | None]  # the environment profile; None for no profile

    @property
    def keys(self) -> tuple[ResolvedKey[Any], ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def document(self) -> list[dict[str, Any]]:
        """Return ``[{"key", "value", "why"}, …]`` of all choices, for JSON."""
        return [asdict(choice) for choice in self.keys if choice.why]


@dataclass(frozen=True, slots=True)
class ProgramChoices(MachineChoices):
    """The choices of the launch of the user's program. ``mpi``: the plug-in of srun for the rendezvous of the ranks, if they use
    MPI."""

    mpi: ResolvedKey[str]


@dataclass(frozen=True, slots=True)
class Resolution(MachineChoices):
    """All choices of the launch of a training, in order of dependency."""

    layers: ResolvedKey[tuple[int, ...]]  # the number of layers of each pipeline stage
    # the modules that tensor ranks shard; the reason states which modules are replicated, and why
    tensor_modules: ResolvedKey[tuple[str, ...]]
    reduce: ResolvedKey[str]  # the interval at which data ranks reduce gradients
    order: ResolvedKey[str]  # the order of axes in which ranks are laid out, as letters
    schedule: ResolvedKey[str]  # the learning rate schedule, with a reason if the rate jumps when a run is resumed
    opened: tuple[ResolvedKey[Any], ...] = ()  # the layout, as far as the job leaves it open and the planner knows the machine

    @property
    def keys(self) -> tuple[ResolvedKey[Any], ...]:
        machine = (self.device, self.gpu_request, self.gpu_type, self.exclude, self.profile)
        return (*machine, *self.opened, *cut(self.layers), self.tensor_modules, self.reduce, self.order, self.schedule)


def cut(layers: ResolvedKey[tuple[int, ...]]) -> tuple[ResolvedKey[Any], ...]:
    """Return the layers of every stage, which replace the partition method and its inputs."""
    return layers, ResolvedKey("parallel.profile", None), ResolvedKey("parallel.memory_weight", None)


def resolved(spec: Spec, keys: Iterable[ResolvedKey[Any]]) -> Spec:
    """Return the job with these values in place of its own."""
    return reduce(lambda job, choice: _with(job, choice.key.split("."), choice.value), keys, spec)


def _with(table: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(table, Mapping):  # slurm.extra: an option that is not given has no key
        return {**table, name: value} if value is not None else table
    return table.model_copy(update={name: _with(getattr(table, name), rest, value) if rest else value})
