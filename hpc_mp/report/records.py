"""The documents in a run directory, as far as a page needs them; what does not fit is refused by pydantic."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=32_503_680_000)]
"""A duration or unix time, before the year 3000: what calendars and axes can show."""


class Record(BaseModel):
    """A document that a rank or the launcher wrote; keys that no picture needs are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Metric(Record):
    """A line of ``metrics.jsonl``: one optimizer step."""

    step: Count
    loss: float
    grad_norm: float
    tokens: Count
    step_time_s: Seconds
    tokens_per_s: float
    peak_memory_bytes: Count
    attempt: int = 1


class Start(Record):
    """A line of ``ranks.jsonl``: one rank that came to life."""

    attempt: int
    rank: int
    node: str
    host: str
    time: Seconds


class Status(Record):
    """What rank 0 was doing when it last said so."""

    attempt: int
    phase: str
    done: Count = 0
    total: Count = 0
    time: Seconds


class Span(NamedTuple):
    """An action as executed, in unix seconds (or, of a simulation, in seconds from its start)."""

    kind: str
    stage: int
    microbatch: int
    start: Seconds
    end: Seconds


class Memory(Record):
    """Bytes of one rank. ``peak`` is the most it ever held, ``limit`` what it may hold (0: unknown)."""

    parameters: Count
    gradients: Count = 0
    optimizer: Count
    peak: Count
    limit: Count = 0


class Trace(Record):
    """One step of one rank."""

    attempt: int
    rank: int
    step: Count
    actions: tuple[Span, ...]
    memory: Memory | None = None
