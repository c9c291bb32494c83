"""The choices that a job file leaves open, settled: each with its value and its reason, applied to the job once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from hpc_mp.job.load import Spec

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ResolvedKey(Generic[Value]):
    """One key of the job file (``"slurm.gpu_type"``), the value that it gets, and why; no reason where nothing was chosen."""

    key: str
    value: Value
    why: str = ""


@dataclass(frozen=True, slots=True)
class MachineChoices:
    """The choices of a launch that the machine or the cluster decides, whatever runs there.

    Attributes:
        device: "cpu" or "cuda"; "auto" where nobody can tell before the ranks start.
        gpu_request, gpu_type: in which form, and as which type, GPUs are asked for.
        exclude: the nodes that Slurm must not give, in its own notation; None: the job's own list, if it has one.
        profile: the environment profile; None: none.
    """

    device: ResolvedKey[str]
    gpu_request: ResolvedKey[str]
    gpu_type: ResolvedKey[str | None]
    exclude: ResolvedKey[str | None]
    profile: ResolvedKey[str | None]

    @property
    def keys(self) -> tuple[ResolvedKey[Any], ...]:
        return (self.device, self.gpu_request, self.gpu_type, self.exclude, self.profile)

    def document(self) -> list[dict[str, Any]]:
        """``[{"key", "value", "why"}, …]`` of all that was chosen, for JSON."""
        return [asdict(each) for each in self.keys if each.why]


@dataclass(frozen=True, slots=True)
class ProgramChoices(MachineChoices):
    """Those of the launch of somebody's program.

    Attributes:
        mpi: the plug-in of srun by which its ranks meet, where they meet through MPI.
    """

    mpi: ResolvedKey[str]

    @property
    def keys(self) -> tuple[ResolvedKey[Any], ...]:
        return (self.device, self.gpu_request, self.gpu_type, self.exclude, self.profile, self.mpi)


@dataclass(frozen=True, slots=True)
class Resolution(MachineChoices):
    """All choices of the launch of a training, in the order in which they depend on each other.

    Attributes:
        layers: how many layers each stage of the pipeline has.
        tensor_modules: what tensor ranks cut; the reason says what of the model they hold alike, and why.
        reduce: after what data ranks sum gradients.
        order: the letters in whose order ranks are laid out.
        schedule: how the learning rate goes, with a reason where it jumps as a run is gone on with.
    """

    layers: ResolvedKey[tuple[int, ...]]
    tensor_modules: ResolvedKey[tuple[str, ...]]
    reduce: ResolvedKey[str]
    order: ResolvedKey[str]
    schedule: ResolvedKey[str]

    @property
    def keys(self) -> tuple[ResolvedKey[Any], ...]:
        machine = (self.device, self.gpu_request, self.gpu_type, self.exclude, self.profile)
        return (*machine, *cut(self.layers), self.tensor_modules, self.reduce, self.order, self.schedule)


def cut(layers: ResolvedKey[tuple[int, ...]]) -> tuple[ResolvedKey[Any], ...]:
    """The layers of every stage in place of the method that found them, and of what that was found by."""
    return layers, ResolvedKey("parallel.profile", None), ResolvedKey("parallel.memory_weight", None)


def resolved(spec: Spec, keys: Iterable[ResolvedKey[Any]]) -> Spec:
    """The job with these values in place of its own."""
    return reduce(lambda job, each: _with(job, each.key.split("."), each.value), keys, spec)


def _with(table: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(table, Mapping):  # slurm.extra: an option that is not given has no key there
        return {**table, name: value} if value is not None else table
    return table.model_copy(update={name: _with(getattr(table, name), rest, value) if rest else value})
