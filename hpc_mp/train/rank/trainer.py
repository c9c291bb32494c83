"""The train loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_mp.job import JobSpec
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.origin import Counters
from hpc_mp.rundir.records import RankTrace, StepMetrics, line_of
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.data import Samples, positions
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.groups import Groups
from hpc_mp.train.engine.memory import peak_bytes
from hpc_mp.train.engine.optimizer import Optimizer, learning_rate
from hpc_mp.train.engine.pipeline import Pipeline, Span
from hpc_mp.train.engine.stage import Stage
from hpc_mp.train.engine.tensor import local
from hpc_mp.train.rank.fencing import Fence
from hpc_mp.train.rank.logs import Log
from hpc_mp.train.rank.signals import REASONS, Pace, StopFlag
from hpc_mp.train.rank.waits import Waits
from hpc_mp.train.rank.watchdog import Watchdog

TRACED_STEP = 2  # of an attempt: the first is dominated by allocation and lazy initialization


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all ranks agree on after a step: mean loss, gradient norm before clipping, labels that counted, why to stop
    (None: go on), and the largest peak memory."""

    loss: float
    norm: float
    labels: int
    stop: str | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """After which step training ended, and why before the last one; None when all steps are done."""

    step: int
    stopped: str | None


@dataclass(frozen=True)
class Trainer:
    """Everything that one rank trains with.

    Attributes:
        attempt: counts the starts of this run.
        fence: to the run directory.
        duties: what else this rank does between two steps: check for reasons to stop, keep logs short …
        watchdog: is told what this rank does.
        pace: kept for those duties.
        waits: gets how far the rank has come.
    """

    spec: JobSpec
    run: RunDirectory
    attempt: int
    fence: Fence
    stage: Stage
    pipeline: Pipeline
    optimizer: Optimizer
    groups: Groups
    clock: DropoutClock
    samples: Samples
    device: torch.device
    log: Log
    stop: StopFlag
    duties: Sequence[Callable[[], None]]
    watchdog: Watchdog
    pace: Pace
    waits: Waits

    def train(self, begin: Counters, traced: Callable[[int, list[Span]], None]) -> TrainingEnd:
        """From where training has come to ``train.steps``, or to the first step after which the run must stop.

        Raises:
            SaveFailed: the last checkpoint could not be saved.
            FencedOut: the run has been started again.
        """
        settings = self.spec.train
        metrics = LineFile(self.run.metrics) if dist.get_rank() == 0 else None
        failed: checkpoint.SaveFailed | None = None
        ended = TrainingEnd(begin.step, None)
        reached = begin
        tokens = settings.global_batch * self.spec.data.sequence_length  # of a step
        for step in range(begin.step, settings.steps):
            began = time.perf_counter()
            trace = step - begin.step + 1 == TRACED_STEP or settings.steps - begin.step == 1
            facts, spans = self._step(step, reached.samples, trace)
            seconds = self.pace.step = time.perf_counter() - began
            if not facts.norm < float("inf"):
                reached = self._skipped(reached, facts)
            reached = replace(reached, step=step + 1, samples=reached.samples + settings.global_batch,
                              tokens=reached.tokens + tokens)
            if metrics is not None:
                metrics.write(line_of(StepMetrics(
                    step + 1, facts.loss, reached.tokens, seconds, tokens / seconds, facts.norm, facts.peak_bytes,
                    learning_rate(step, settings), facts.labels, self.attempt)))
            if trace:
                traced(step + 1, spans)
            every = self.spec.checkpoint.every
            stop = facts.stop
            if stop or step + 1 == settings.steps or (every and (step + 1) % every == 0):
                failed = self._save(reached)
                self._between_steps()
                stop = stop or agree(self.stop, self.device)  # who asked while this was saved waits for no other step
            ended = TrainingEnd(step + 1, stop if step + 1 < settings.steps else None)
            if stop:
                break
        if metrics is not None:
            metrics.close()
        if failed is not None:
            raise checkpoint.SaveFailed(f"the last checkpoint could not be saved: {failed}")
        return ended

    def _between_steps(self) -> None:
        self.watchdog.now("step")
        for duty in self.duties:
            duty()

    def _skipped(self, reached: Counters, facts: StepFacts) -> Counters:
        """Say which step was skipped. Raises FloatingPointError when it is one too many."""
        settings, skipped = self.spec.train, reached.skipped + 1
        last = reached.samples + settings.global_batch - 1
        what = (f"step {reached.step + 1}, on the samples {reached.samples} to {last}: "
                f"the gradient norm is {facts.norm}, the loss {facts.loss}")
        if skipped > settings.skip_steps:
            raise FloatingPointError(f"{what}; {settings.skip_steps} steps may be skipped (train.skip_steps). "
                                     "Lower train.learning_rate, or look at the data of this step")
        self.log.say(f"{what}; it is skipped, {skipped} of {settings.skip_steps}")
        return replace(reached, skipped=skipped)

    def _step(self, step: int, first: int, trace: bool) -> tuple[StepFacts, list[Span]]:
        """One optimizer step, on the samples from position ``first`` on; what all ranks agree on, and the trace if asked for."""
        settings = self.spec.train
        self.waits.at(step + 1)
        mine = positions(first, global_batch=settings.global_batch, data_degree=self.spec.data_degree,
                         data_rank=self._data_rank, microbatches=self.spec.microbatches)
        labels = _LabelCount(self, mine)

        def batch(microbatch: int) -> tuple[Tensor | None, Tensor | None]:
            part = self.stage.part
            if not (part.first or part.last):
                return None, None
            ids, shifted = self.samples.batch(mine[microbatch])
            return (torch.from_numpy(ids).to(self.device) if part.first else None,
                    torch.from_numpy(shifted).to(self.device) if part.last else None)

        def enter(microbatch: int) -> None:
            self.waits.at(step + 1, microbatch)
            self.clock.set(step, tuple(mine[microbatch]))

        loss, spans = self.pipeline.run(batch, enter, lambda: 1.0 / max(1, labels.all()), trace)
        self._sum_tied_gradients()
        began = time.time()
        self._between_steps()
        facts = self._agree(loss, labels.all())
        if facts.norm < float("inf"):
            self.optimizer.step(step, facts.norm)
        else:
            self.optimizer.skip()
        if trace:
            spans.append(("OPTIMIZER", self.groups.mesh["pp"].get_local_rank(), -1, began, time.time()))
        return facts, spans

    def _agree(self, loss: Tensor, labels: int) -> StepFacts:
        """One message for all that ranks must know of each other; summed in rank order, so that all get the same bits."""
        # Tensor ranks hold the same loss: the first one's counts.
        mine = torch.stack((
            self.optimizer.squared_norm(),
            loss if self.stage.tensor.rank == 0 else torch.zeros_like(loss),
            torch.tensor(float(self.stop.reason), dtype=torch.float64, device=self.device),
            torch.tensor(float(peak_bytes(self.device)), dtype=torch.float64, device=self.device),
        ))
        everyone = mine.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather(list(everyone.unbind()), mine)
        squares, total, _, _ = everyone.sum(0).tolist()
        reason, peak = everyone[:, 2:].max(0).values.tolist()
        return StepFacts(total / max(1, labels), squares**0.5, labels, REASONS.get(int(reason)), int(peak))

    @cached_property
    def _data_rank(self) -> int:
        mesh = self.groups.mesh
        return mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()

    @torch.no_grad()
    def _sum_tied_gradients(self) -> None:
        """The embedding and the head's copy of it are one weight: both get the sum of their gradients."""
        if self.stage.shares_tied_weight:
            weight = self.stage.get_parameter(f"{self.stage.family.embedding}.weight")
            assert weight.grad is not None
            dist.all_reduce(local(weight.grad), group=self.groups.tied)

    def _save(self, counters: Counters) -> checkpoint.SaveFailed | None:
        """Save, and say how it went; the failure is returned, for training goes on."""
        began = time.perf_counter()
        self.watchdog.now("save")
        try:
            path = checkpoint.save(self.run.checkpoints, counters, self.stage, self.optimizer, self.groups,
                                   self.spec.checkpoint.keep, self.fence)
        except checkpoint.SaveFailed as error:
            self.log.say(f"checkpoint of step {counters.step} FAILED: {error}. Training goes on; the earlier "
                         "checkpoints are unharmed")
            return error
        self.pace.save = time.perf_counter() - began
        self.log.say(f"checkpoint {path.name} saved in {self.pace.save:.2f} s")
        return None


class _LabelCount:
    """Tokens of a step's global batch that count in the loss. Every replica counts its own; they are summed while the first
    microbatch is computed."""

    def __init__(self, trainer: Trainer, mine: Sequence[range]) -> None:
        own = sum(trainer.samples.label_count(part) for part in mine)
        self._count: Tensor | int
        self._waiting: list[dist.Work] = []
        if not trainer.samples.masked:
            self._count = trainer.spec.train.global_batch * trainer.spec.data.sequence_length
            return
        self._count = torch.tensor(own, dtype=torch.int64, device=trainer.device)
        for axis in ("replicate", "shard"):
            if trainer.groups.mesh[axis].size() > 1:
                for work in self._waiting:
                    work.wait()
                work = dist.all_reduce(self._count, group=trainer.groups.mesh[axis].get_group(), async_op=True)
                assert work is not None
                self._waiting = [work]

    def all(self) -> int:
        for work in self._waiting:
            work.wait()
        self._waiting, self._count = [], int(self._count)
        return self._count


def agree(flag: StopFlag, device: torch.device) -> str | None:
    """Why the run must stop, on all ranks alike; None when none of them has a reason. All ranks call this."""
    reason = torch.tensor(flag.reason, dtype=torch.int64, device=device)
    dist.all_reduce(reason, dist.ReduceOp.MAX)
    return REASONS.get(int(reason))


def write_trace(path: Path, trace: RankTrace) -> None:
    """A trace is a picture's raw material: when it cannot be written, training does not suffer."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(line_of(trace), encoding="utf-8")
    except OSError:
        pass
