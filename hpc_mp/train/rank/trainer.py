"""The train loop of one rank.

The results of a step are read after the next step has been launched, so that a GPU never waits for its host. The line of metrics,
the budget of skipped steps and the reasons to stop therefore come one step late. Before a checkpoint everything is read. A run
that is asked to stop does so after the step that follows the one in which ranks agreed; all ranks stop after the same step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hpc_mp.job import JobSpec
from hpc_mp.layout.learning_rate import learning_rate
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.origin import Counters
from hpc_mp.rundir.records import RankTrace, StepMetrics, line_of
from hpc_mp.train.data import Samples, positions
from hpc_mp.train.device.readback import to_device
from hpc_mp.train.parallel.dropout import Moment
from hpc_mp.train.parallel.groups import Groups, Tree
from hpc_mp.train.pipeline.stage import Microbatches
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.logs import Log, StepWords
from hpc_mp.train.rank.profiler import ProfilerWindow
from hpc_mp.train.rank.saver import Saver
from hpc_mp.train.rank.signals import REASONS, Pace, StopFlag
from hpc_mp.train.rank.waits import Waits
from hpc_mp.train.rank.watchdog import Watchdog
from hpc_mp.train.step.agreement import StepNumbers
from hpc_mp.train.step.engine import Engine, StepResult
from hpc_mp.train.step.memory import peak_bytes

TRACED_STEP = 2  # of an attempt, and of every 256 steps: the first one is dominated by allocation and lazy initialization
TRACED_EACH = 256


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """The step after which training ended, and the reason if the run is to go on; None if it is done."""

    step: int
    stopped: str | None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose results are not read yet. ``samples``: its first sample's position; ``tokens``: the total trained on after
    it."""

    step: int
    samples: int
    tokens: int
    result: StepResult


@dataclass
class MetricLines:
    """The lines of ``metrics.jsonl``, which rank 0 writes as soon as the results of a step arrive."""

    file: LineFile | None  # None on all other ranks
    metrics: Callable[[Launched], StepMetrics]  # returns the metrics of a step
    track: Callable[[str, StepMetrics], None]  # called with them
    words: StepWords  # logs the progress from time to time
    unwritten: deque[Launched] = field(default_factory=deque)

    def add(self, launched: Launched) -> None:
        self.unwritten.append(launched)
        self.write(until=-1)

    def write(self, until: int) -> None:
        """Write the lines of steps whose results have arrived. For steps up to ``until`` the host waits."""
        while self.unwritten and (self.unwritten[0].step <= until or self.unwritten[0].result.readback.there):
            launched = self.unwritten.popleft()
            if self.file is not None:
                metrics = self.metrics(launched)
                self.file.write(line_of(metrics))
                self.words(metrics)
                self.track("train", metrics)

    def close(self) -> None:
        if self.file is not None:
            self.words.close()
            self.file.close()


@dataclass(frozen=True)
class Trainer:
    """Everything that one rank trains with."""

    spec: JobSpec
    run: RunDirectory
    attempt: int  # number of this start of the run
    saver: Saver
    engine: Engine
    groups: Groups
    samples: Samples
    device: torch.device
    log: Log
    stop: StopFlag
    # other work of this rank between two steps: check for reasons to stop, keep logs short …
    duties: Sequence[Callable[[], None]]
    watchdog: Watchdog  # notified of this rank's phases
    pace: Pace  # updated for those duties
    waits: Waits  # notified of the rank's progress
    # called after each step with the reason why the run must stop; returns why an evaluation that is due was not made
    evaluate: Callable[[int, str | None], str | None]
    track: Callable[[str, StepMetrics], None]  # called with the metrics of each step on rank 0
    peak_speed: float  # tokens per second at the peak of all devices; NaN if unknown
    enough: Callable[[], bool] = lambda: False  # returns True, after an evaluation, if no further step shall follow

    def train(self, begin: Counters, traced: Callable[[int, StepResult], None]) -> TrainingEnd:
        """Train up to ``train.steps``, or to the first step after which the run must stop. Raises SaveFailed, Unwritable,
        PeerGone, FencedOut as ``Saver.save``."""
        settings, every = self.spec.train, self.spec.checkpoint.every
        metrics = MetricLines(LineFile(self.run.metrics) if dist.get_rank() == 0 else None, self._metrics, self.track,
                              StepWords(self.log, begin.step + 1, settings.steps))
        tokens = settings.global_batch * self.spec.data.sequence_length
        ended = TrainingEnd(begin.step, None)
        reached, stop = begin, None
        waiting: deque[Launched] = deque()
        window = ProfilerWindow(settings.profile, dist.get_rank(), self.device, self.run.profile(dist.get_rank()), self.log.say)
        for step in range(begin.step, settings.steps):
            window.before(step + 1)
            trace = (step - begin.step + 1) % TRACED_EACH == TRACED_STEP or settings.steps - begin.step == 1
            first = begin.samples + (step - begin.step) * settings.global_batch
            waiting.append(Launched(step, first, begin.tokens + (step + 1 - begin.step) * tokens, self._step(step, first, trace)))
            metrics.add(waiting[-1])
            if trace:
                traced(step + 1, waiting[-1].result)
            due = step + 1 == settings.steps or (every and (step + 1) % every == 0)
            while len(waiting) > 1 or (waiting and (due or stop or evaluation_is_due(self.spec, step + 1))):
                metrics.write(until=waiting[0].step)
                reached, reason = self._read(waiting.popleft(), reached)
                stop = stop or reason
            missing = self.evaluate(step + 1, stop)
            stop = stop or missing
            enough = stop is None and evaluation_is_due(self.spec, step + 1) and self.enough()
            if stop or due or enough:
                self.saver.save(reached, last=bool(stop) or enough or step + 1 == settings.steps)
                self._between_steps()
                stop = stop or agree(self.stop, self.groups.host)  # a request made during the save needs no further step
            ended = TrainingEnd(step + 1, stop if step + 1 < settings.steps and not enough else missing)
            if stop or enough:
                break
        window.close()
        metrics.close()
        self.saver.end()
        return ended

    def _read(self, launched: Launched, reached: Counters) -> tuple[Counters, str | None]:
        """Read the results of a step. Return the counters after it, and the reason to stop. Raises FloatingPointError if too
        many steps were skipped."""
        settings, numbers = self.spec.train, launched.result.numbers()
        self.pace.step = numbers.seconds
        reason, _, writing = numbers.notes
        if not writing:  # no rank is
            self.saver.publish()
        if not numbers.norm < float("inf"):
            reached = self._skipped(launched, reached, numbers)
        fp16 = settings.precision == "fp16"
        reached = replace(reached, step=launched.step + 1, samples=launched.samples + settings.global_batch,
                          tokens=launched.tokens, loss_scale=numbers.scale if fp16 else ())
        return reached, REASONS.get(int(reason))

    def _metrics(self, launched: Launched) -> StepMetrics:
        settings, numbers = self.spec.train, launched.result.numbers()
        tokens = settings.global_batch * self.spec.data.sequence_length
        speed = tokens / numbers.seconds
        return StepMetrics(
            launched.step + 1, numbers.loss, launched.tokens, numbers.seconds, speed, numbers.norm,
            int(numbers.notes[1]), learning_rate(launched.step, settings), int(numbers.labels), self.attempt, numbers.scale.scale,
            numbers.router_loss, numbers.dropped, settings.global_batch / numbers.seconds,
            speed / self.peak_speed)

    def _between_steps(self) -> None:
        self.watchdog.now("step")
        for duty in self.duties:
            duty()

    def _skipped(self, launched: Launched, reached: Counters, numbers: StepNumbers) -> Counters:
        """Log that a step was skipped. Raises FloatingPointError if too many steps, or all steps of the run, were skipped."""
        settings = self.spec.train
        last = launched.samples + settings.global_batch - 1
        where = f"step {launched.step + 1}, on the samples {launched.samples} to {last}"
        what = f"{where}: the gradient norm is {numbers.norm}, the loss {numbers.loss}"
        reached = replace(reached, skipped=reached.skipped + 1, absorbed=reached.absorbed + numbers.absorbed)
        counted = reached.skipped - reached.absorbed
        if not numbers.labels:
            self.log.say(f"{where}: none of their tokens counts in the loss; it is skipped")
        elif numbers.absorbed:
            self.log.say(f"{what}; it is skipped, and the loss scale is {numbers.scale.scale:g} now")
        elif counted > settings.skip_steps:
            raise FloatingPointError(f"{what}; {settings.skip_steps} steps may be skipped (train.skip_steps). "
                                     "Lower train.learning_rate, or look at the data of this step")
        else:
            self.log.say(f"{what}; it is skipped, {counted} of {settings.skip_steps}")
        if reached.skipped == settings.steps:
            raise FloatingPointError(f"{what}; all {settings.steps} steps of the run were skipped, and its model is as it began. "
                                     "Look at the data and at the checkpoint that it began with, lower train.learning_rate, or "
                                     "give fp16 more steps for its loss scale")
        return reached

    def _step(self, step: int, first: int, trace: bool) -> StepResult:
        """Launch an optimizer step on the samples from position ``first`` on. Its notes are reduced over all ranks: the reason
        to stop, the largest peak memory, and whether a checkpoint is still being written."""
        self.waits.at(step + 1)
        mine = positions(first, global_batch=self.spec.train.global_batch, data_degree=self.spec.data_degree,
                         data_rank=self.groups.data_rank, microbatches=self.spec.microbatches)
        labels = sum(map(self.samples.label_count, mine))
        work = share(self.spec, self.samples, mine, step, labels, self.engine)
        self.waits.at(step + 1, work)

        def notes() -> tuple[float, float, float]:
            self._between_steps()
            return float(self.stop.reason), float(peak_bytes(self.device)), float(self.saver.busy)

        return self.engine.step(step, work, notes, trace)


class SampleSource(Protocol):
    """A source of samples by position, such as ``Samples`` and ``HeldOut``: ids, labels, and kinds of tokens if it has some."""

    def batch(self, positions: range, /) -> tuple[NDArray[np.int64], ...]: ...

    def documents(self, positions: range, /) -> NDArray[np.int64] | None: ...


def share(spec: JobSpec, source: SampleSource, mine: Sequence[range], step: int, labels: int, engine: Engine) -> Microbatches:
    """Return a replica's samples of a step for the stages of a rank. Ids and labels are read only for the end stages. ``mine``:
    the positions of each microbatch. ``labels``: the number of labels that count."""
    ends, batches = {"ids": 0, "labels": spec.stages - 1, "token_types": 0}, {}
    for microbatch, samples in enumerate(mine):
        documents = source.documents(samples)
        needed = {} if documents is None else {"documents": to_device(torch.from_numpy(documents), engine.device)}
        read = {*ends.values()} & engine.data.stages.keys()
        arrays = dict(zip(ends, source.batch(samples), strict=False)) if read else {}
        for stage in engine.data.stages:
            batches[stage, microbatch] = needed | {name: to_device(torch.from_numpy(array), engine.device)
                                                   for name, array in arrays.items() if ends[name] == stage}
    return Microbatches(batches, [Moment(step, tuple(samples)) for samples in mine], labels)


def evaluation_is_due(spec: JobSpec, step: int) -> bool:
    """Return True if an evaluation is due after this step (from 1)."""
    every = spec.evaluate.every
    return spec.evaluate.active and (step == spec.train.steps or (every > 0 and step % every == 0))


def agree(flag: StopFlag, host: Tree) -> str | None:
    """Return the reason why the run must stop, the same on all ranks; None if no rank has one. All ranks call this."""
    return REASONS.get(facts.largest(int(flag.reason), host))


def write_trace(path: Path, trace: RankTrace) -> None:
    """Write a trace. Errors are ignored, because a trace is not essential to training."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(line_of(trace), encoding="utf-8")
    except OSError:
        pass
