"""``hpc_mp.log``: a program's report of its steps, for status, ``--wait`` and the report page."""

import math
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import cut_metrics
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.rank_env import identity
from hpc_mp.rundir.records import StepMetrics, last_records, line_of
from hpc_mp.rundir.usage import cut_steps


def log(*, step: int, loss: float = math.nan, tokens: int = 0, learning_rate: float = 0.0, grad_norm: float = math.nan,
        seconds: float | None = None) -> None:
    """Record the end of a step. Only rank 0 writes. On other ranks, and outside of a run of hpc-mp, it does nothing.

    ::

        for step, batch in enumerate(batches, start=1):
            ...
            hpc_mp.log(step=step, loss=loss.item(), tokens=batch.numel() * world_size)

    Args:
        step: number from 1, greater than the previous one; steps may be skipped. If a later attempt begins with a recorded
            step, it replaces that step and all later ones.
        loss: loss of the step; omitted if it has none.
        tokens: tokens, samples or other units of this step, on all ranks. The first step of an attempt is timed from the start
            of its ranks.
        seconds: time of the step; default: since the previous call.

    Raises:
        HpcMpError: the step does not follow the previous one.
    """
    run = os.environ.get("HPC_MP_RUN")
    if run is None or _rank(os.environ) != 0:
        return
    _writer(run, int(os.environ.get("HPC_MP_ATTEMPT", "1"))).write(
        step, {"loss": float(loss), "learning_rate": float(learning_rate), "grad_norm": float(grad_norm)}, int(tokens), seconds)


def _rank(environ: Mapping[str, str]) -> int:
    """Return the rank from the program's own launcher, else from MPI's."""
    rank = environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else identity(environ).rank


@cache
def _writer(run: str, attempt: int) -> "_StepWriter":
    return _StepWriter(RunDirectory(Path(run)), attempt)


class _StepWriter:
    """Writer of one attempt's lines of ``metrics.jsonl``."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._file = LineFile(run.metrics)
        self._step, self._tokens = 0, 0
        status = AttemptReader(run, attempt).status()  # written when the ranks began
        self._time = time.monotonic() - (max(time.time() - status.time, 0.0) if status is not None else 0.0)

    def write(self, step: int, values: Mapping[str, float], tokens: int, measured: float | None) -> None:
        if self._step == 0:
            self._begin(step)
        if step <= self._step:
            raise HpcMpError(f"hpc_mp.log(step={step})", f"does not follow step {self._step}", "number steps upwards from 1")
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-9), now
        step_seconds = seconds / (step - self._step) if measured is None else max(measured, 1e-9)
        self._tokens += tokens
        self._file.write(line_of(StepMetrics(
            step=step, tokens=self._tokens, step_time_s=step_seconds, tokens_per_s=tokens / step_seconds, peak_memory_bytes=0,
            label_tokens=tokens, attempt=self._attempt, **values)))
        self._step = step

    def _begin(self, step: int) -> None:
        """Continue from the records of earlier attempts before this step; their later records are moved to the lost ones."""
        if self._attempt > 1:
            cut_steps(self._run, step - 1)
            cut_metrics(self._run.metrics, step - 1)
        before = last_records(self._run.metrics, StepMetrics, 1)
        self._step = before[-1].step if before else step - 1
        self._tokens = before[-1].tokens if before else 0
