"""Records that ranks write during a run: one frozen value per document or line, with its writer and reader.

A reader ignores unknown keys, so it can read a newer run. A document with a missing key or a wrong type is refused.
``failures.py``, ``outcome.py``, ``history.py``, ``attempt.py`` and ``plan.py`` contain the other records.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

from annotated_types import Ge, Lt

from hpc_mp.base.files import read_json, read_lines, write_json
from hpc_mp.base.text import loss_number, loss_words

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Record = TypeVar("Record")
Count = Annotated[int, Ge(0), Lt(2**63)]
Seconds = Annotated[float, Ge(0), Lt(32_503_680_000)]
"""A duration or unix time before the year 3000: calendars and axes cannot show more."""


class _NullIsNan:
    """The reading of ``null`` as NaN. Only readers import pydantic: ranks and their witnesses start without it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(lambda value: math.nan if value is None else value, handler(source))


Measured = Annotated[float, _NullIsNan()]
"""A number that may be NaN or infinite: it is then ``null`` in a file, because JSON has no NaN."""

LONGEST_LINE = 1024  # bytes; twice the length of a line of metrics.jsonl


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """A line of ``metrics.jsonl``: one optimizer step, written by rank 0.

    Attributes:
        step: from 1.
        loss: mean over all counted tokens of the global batch, in nats; not finite in a skipped step, if its gradient norm was
            not finite or no token counts (``label_tokens`` is 0).
        tokens: number trained on in all steps so far, including those that do not count in the loss.
        step_time_s: seconds from the step's start to its end on rank 0; evaluations and saves are between two steps.
        tokens_per_s: throughput of this step, all ranks together.
        grad_norm: L2 norm over all parameters, before clipping.
        peak_memory_bytes: the maximum held by any rank since its start: allocated on its GPU, or on CPUs its resident memory.
        learning_rate: rate of this step, from ``train.warmup_steps`` and ``train.lr_schedule``.
        label_tokens: tokens of this step that count in the loss.
        attempt: number from 1; a resume or a restart by Slurm begins the next one.
        loss_scale: fp16's loss scale after the step; 1 otherwise.
        router_loss: part of the trained loss added by the routers of experts (``train.router_balance``, ``train.router_z``).
        dropped_share: fraction of the expert choices of all tokens in all layers that experts did not take
            (``train.expert_capacity``); NaN if experts have no capacity.
        samples_per_s: as ``tokens_per_s``; NaN for a program.
        mfu: model FLOPs utilization: the share of the dense peak of all GPUs, for ``train.precision``, that the model's own
            operations take, without those of recomputation; NaN on CPUs and if the catalogue of machines knows no such peak.
    """

    step: Count
    loss: Measured
    tokens: Count
    step_time_s: Seconds
    tokens_per_s: float
    grad_norm: Measured
    peak_memory_bytes: Count
    learning_rate: float = 0.0
    label_tokens: Count = 0
    attempt: Count = 1
    loss_scale: float = 1.0
    router_loss: Measured = 0.0
    dropped_share: Measured = math.nan
    samples_per_s: Measured = math.nan
    mfu: Measured = math.nan


def losses(steps: Iterable[StepMetrics]) -> list[float]:
    """Return the finite losses of the steps."""
    return [step.loss for step in steps if math.isfinite(step.loss)]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A line of ``evaluations.jsonl``: the loss on the held-out text after a step, written by rank 0.

    Attributes:
        step: the step before it; from 1.
        loss: mean over all counted held-out tokens, in nats; without dropout.
        label_tokens: tokens of the held-out text that count.
        seconds: duration of the evaluation.
        attempt: from 1.
        accuracy: share of the rows whose class a classification tells; NaN for other objectives.
        macro_f1: mean of F1 over the classes; likewise.
        criterion: value of ``evaluate.best``.
    """

    step: Count
    loss: Measured
    label_tokens: Count
    seconds: Seconds
    attempt: Count = 1
    accuracy: Measured = math.nan
    macro_f1: Measured = math.nan
    criterion: str = "loss"

    @property
    def cost(self) -> float:
        """The number that is least in the best evaluation."""
        return -self.accuracy if self.criterion == "accuracy" else self.loss

    @property
    def figure(self) -> str:
        """The value of the criterion in words."""
        return f"{self.accuracy:.4f}" if self.criterion == "accuracy" else loss_number(self.loss)

    @property
    def words(self) -> str:
        if math.isnan(self.accuracy):
            return loss_words(self.loss)
        return f"loss {loss_number(self.loss)}, accuracy {self.accuracy:.4f}, macro F1 {self.macro_f1:.4f}"


@dataclass(frozen=True, slots=True)
class RankStart:
    """A line of ``ranks.jsonl``: the start of one rank.

    Attributes:
        node: the scheduler's name; ``host``: the machine's own.
        dp, pp, cp, tp: the rank's coordinates.
        token: token of its attempt.
        device: name of its device.
        task: its Slurm task number, which srun writes before its lines; None if tasks are not numbered.
        time: unix seconds.
    """

    attempt: int
    rank: int
    node: str
    host: str
    time: Seconds
    pid: int = 0
    local_rank: int = 0
    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    token: str = ""
    device: str = ""
    task: int | None = None


AWAITING = "waiting for Slurm"  # phase of a run whose ranks have ended and whose supervisor waits to requeue it


@dataclass(frozen=True, slots=True)
class RankStatus:
    """``status.json``: rank 0's activity and its progress in bytes; ``time`` in unix seconds."""

    attempt: int
    phase: str
    detail: str = ""
    done: Count = 0
    total: Count = 0
    time: Seconds = 0.0


class TracedAction(NamedTuple):
    """An executed action of a schedule, in unix seconds; in a simulation, in seconds from its start."""

    kind: str
    stage: int
    microbatch: int
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank in bytes. ``peak``: the maximum ever held; ``limit``: its limit (0: unknown); ``host`` and ``disk``:
    state kept there instead; ``activations``: the maximum kept for backwards on its device; ``away``: the same on the host."""

    parameters: Count
    optimizer: Count
    peak: Count
    gradients: Count = 0
    limit: Count = 0
    host: Count = 0
    disk: Count = 0
    activations: Count = 0
    away: Count = 0


@dataclass(frozen=True, slots=True)
class RankTrace:
    """``trace/rank-00003.json``: one step of one rank."""

    attempt: int
    rank: int
    step: Count
    actions: tuple[TracedAction, ...]
    memory: RankMemory | None = None
    pp: int = 0


@dataclass(frozen=True, slots=True)
class StagedEnvironment:
    """``environment.json``: the archive that nodes unpack, the directory of its origin, and its unpacked size."""

    archive: str
    prefix: str
    bytes: int


def line_of(record: Any) -> str:
    """Return a record as a line of a JSON-lines file, without its newline."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in asdict(record).items()})


def write_record(path: Path, record: Any) -> None:
    """Publish a record as a document. Raises OSError."""
    write_json(path, asdict(record))


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a record. Raises OSError, or ValueError for another document."""
    return _understood(read_json(path), kind)


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records of a JSON-lines file; an absent file is empty, and invalid lines are left out. Raises OSError."""
    return [record for record in understood_lines(path, kind) if record is not None]


def last_records(path: Path, kind: type[Record], limit: int) -> list[Record]:
    """Return at most ``limit`` records from the end, without reading the lines before them. Raises OSError."""
    try:
        with open(path, "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - limit * LONGEST_LINE)
            file.seek(begin)
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    records = (record_of_line(line, kind) for line in lines[bool(begin):-1][-limit:])
    return [record for record in records if record is not None]


def understood_lines(path: Path, kind: type[Record]) -> Iterator[Record | None]:
    """Yield the records of a JSON-lines file, with None for every invalid line."""
    for document in read_lines(path):
        yield record_of(document, kind)


def record_of(document: Any, kind: type[Record]) -> Record | None:
    """Return a record; None if the document is not one."""
    with suppress(ValueError):
        return _understood(document, kind)
    return None


def record_of_line(line: str, kind: type[Record]) -> Record | None:
    """Return the record in a line; None if the line does not hold one."""
    with suppress(ValueError):
        return _understood(json.loads(line), kind)
    return None


def _understood(document: Any, kind: type[Record]) -> Record:
    """Return the validated record. Raises ValueError with the number of wrong keys."""
    from pydantic import ValidationError

    try:
        record: Record = _adapter(cast(Any, kind)).validate_python(document)
    except ValidationError as error:
        raise ValueError(f"{error.error_count()} wrong or missing keys") from None
    return record


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
