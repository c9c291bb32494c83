"""Evaluation: the loss on held-out text between two steps, without effect on training.

It runs before the checkpoint of its step. A request to stop does not wait for it: the evaluation is given up, the state is saved,
and the next attempt begins with the evaluation. A run is done when its last evaluation is done.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hpc_mp.base.text import counted, duration
from hpc_mp.job import JobSpec
from hpc_mp.rundir import LineFile
from hpc_mp.rundir.records import Evaluation, line_of, read_records
from hpc_mp.rundir.retention import exhausted
from hpc_mp.train.data import HeldOut, SampleRows, passes
from hpc_mp.train.pipeline.stage import Microbatches
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.bootstrap import status
from hpc_mp.train.rank.failures import RankContext
from hpc_mp.train.rank.signals import REASONS, StopFlag
from hpc_mp.train.rank.trainer import evaluation_is_due, share
from hpc_mp.train.rank.watchdog import Watchdog
from hpc_mp.train.step.engine import Engine


@dataclass
class Evaluator:
    """Evaluation on all ranks, when it is due.

    Attributes:
        held_out: the whole text; this rank's replica takes its part.
        duties: other work of this rank between two passes: check for reasons to stop, keep logs short …
        watchdog: notified of every pass.
        lines: the file, written by rank 0; ``track`` is called with the same.
        evaluations: of the run, the same on all ranks.
    """

    spec: JobSpec
    context: RankContext
    engine: Engine
    held_out: HeldOut | SampleRows
    device: torch.device
    stop: StopFlag
    duties: Sequence[Callable[[], None]]
    watchdog: Watchdog
    lines: LineFile
    track: Callable[[str, Evaluation], None]
    evaluations: list[Evaluation]

    def after(self, step: int, stop: str | None) -> str | None:
        """Evaluate, if an evaluation is due after this step (from 1). All ranks call this. Return the reason why an evaluation
        that is due was not made; None if none is missing. ``stop``: the reason why the run must stop."""
        newest = self.evaluations[-1].step if self.evaluations else 0
        if step <= newest or not evaluation_is_due(self.spec, step):
            return None
        stop = stop or self._evaluate(step)
        if stop is not None:
            self.context.log.say(f"the evaluation after step {step} is put off: {stop}")
        return stop

    def enough(self) -> bool:
        """Return True if ``evaluate.patience`` is exhausted, the same on all ranks."""
        rule = self.spec.evaluate
        if not exhausted(self.evaluations, rule.patience, rule.gain, rule.best):
            return False
        better = "lower loss" if rule.best == "loss" else "higher accuracy"
        self.context.log.say(f"no {better} on the held-out text for {counted(rule.patience, 'evaluation')}: the run ends")
        return True

    def _evaluate(self, step: int) -> str | None:
        """Evaluate. Return the reason why the evaluation was given up; None if it is complete."""
        began = time.perf_counter()
        status(self.context, "evaluating", f"after step {step}")
        size, microbatches, data = self.spec.microbatch_size, self.spec.microbatches, self.engine.groups.data_rank
        loss, labels, reason, named = 0.0, 0, None, len(self.spec.data.labels)
        counts = torch.zeros((3, named) if named else (1, 1), dtype=torch.float64)
        for mine in passes(len(self.held_out), microbatch=size, microbatches=microbatches, data_degree=self.spec.data_degree,
                           data_rank=data):
            if reason is not None:
                return reason
            result = self.engine.evaluate(self._own(step, mine), self._notes, classes=named)
            loss, labels, reason = loss + result.loss, labels + int(result.labels), REASONS.get(int(result.notes[0]))
            counts += result.classes
        self.watchdog.now("step")
        self.evaluations.append(Evaluation(step, loss / labels, labels, time.perf_counter() - began, self.context.attempt,
                                           *(shares_of(counts) if named else (math.nan, math.nan)), self.spec.evaluate.best))
        self._say(self.evaluations[-1])
        return None

    def _own(self, step: int, mine: Sequence[range]) -> Microbatches:
        work = share(self.spec, self.held_out, mine, step, 0, self.engine)
        self.context.waits.at(step, work)
        return work

    def _notes(self) -> tuple[float]:
        self.watchdog.now("evaluation")
        for duty in self.duties:
            duty()
        return float(self.stop.reason),

    def _say(self, evaluation: Evaluation) -> None:
        status(self.context, "training")
        if self.context.who.rank == 0:
            self.lines.write(line_of(evaluation))
            self.track("held_out", evaluation)
        what = "rows" if self.spec.data.labels else "tokens"
        self.context.log.say(f"held out after step {evaluation.step}: {evaluation.words} over "
                             f"{evaluation.label_tokens:,} {what} in {duration(evaluation.seconds)}")


def shares_of(counts: torch.Tensor) -> tuple[float, float]:
    """Return accuracy and macro F1, given what ``SampleClass`` counts: F1 is 2 × right / (samples + taken), and macro F1 its mean
    over the classes that have either, as in scikit-learn."""
    samples, taken, right = counts
    return float(right.sum() / samples.sum()), float((2 * right / (samples + taken))[samples + taken > 0].mean())


def evaluations_made(context: RankContext) -> list[Evaluation]:
    """Return the evaluations in the run directory. All ranks call this."""
    mine = read_records(context.run.evaluations, Evaluation) if context.who.rank == 0 else []
    lines: list[dict[str, Any]] = facts.broadcast(list(map(asdict, mine)), context.everyone)
    return [Evaluation(**fields) for fields in lines]
