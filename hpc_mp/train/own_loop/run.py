"""A run: a model divided over all ranks, in a user's own loop."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.layout import Layout
from hpc_mp.train.own_loop import saved
from hpc_mp.train.own_loop.batches import ReplicaRows, check_alike, checksum, rows_of
from hpc_mp.train.own_loop.keywords import Keywords, in_words_of_a_loop, job_of
from hpc_mp.train.own_loop.subject import Subject
from hpc_mp.train.own_loop.world import World
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.pipeline.stage import Carried, Microbatches
from hpc_mp.train.rank import facts
from hpc_mp.train.step.agreement import StepNumbers
from hpc_mp.train.step.engine import Engine, StepResult
from hpc_mp.train.step.passes import Passes

Shapes = tuple[tuple[str, Carried], ...]
KEPT = 8  # shapes of batches whose passes are kept: a loop that pads to a few lengths makes none anew


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes by name. Each has ``rank``, ``size`` and ``group``, which is None for a single rank."""

    tp: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    ep: Axis


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training: optimizer steps, those of them that changed nothing, samples, and tokens."""

    step: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0


class Run:
    """A model in a user's own loop; ``hpc_mp.parallel`` makes it. All ranks call every method.

    Attributes:
        axes: this rank's coordinates.
        layout: the division of the model.
        device: of this rank.
    """

    def __init__(self, subject: Subject, keywords: Keywords, layout: Layout, world: World, axes: Axes, engine: Engine) -> None:
        self.subject, self.keywords, self.layout, self.world, self.axes, self.engine = (
            subject, keywords, layout, world, axes, engine)
        self.device, self._progress = world.device, Progress()
        self._passes: dict[Shapes, Passes] = {}
        self._launched: tuple[StepResult, int] | None = None  # the last step and its tokens, until its numbers are read
        self._numbers: StepNumbers | None = None

    def step(self, batch: Mapping[str, Any]) -> Tensor:
        """Train an optimizer step: forward, backward, clip, update. The host does not wait for the device.

        Args:
            batch: tensors (samples, …) by name.

        Returns:
            The loss of the global batch, an fp64 scalar on the device.

        Raises:
            HpcMpError: the batch cannot be divided, or is not one of this model; nothing has changed.
        """
        rows, tokens, passes, share, notes = self._prepared(batch)
        done = self._progress
        if not 0 <= (rate := self.engine.settings.learning_rate(done.step)) < float("inf"):
            raise HpcMpError(f'optimizer["lr"]({done.step}) = {rate}', "is no learning rate",
                             "let lr return a number of at least 0")
        with torch.enable_grad():
            result = self.engine.step(done.step, share, lambda: notes, passes=passes)
        self._read()  # of the step before: the device has the next one to do meanwhile
        samples, done = rows.samples * self.layout.microbatches * self.layout.degrees.data, self._progress
        self._progress = replace(done, step=done.step + 1, samples=done.samples + samples, tokens=done.tokens + samples * tokens)
        self._launched = result, samples * tokens
        return result.loss

    def evaluate(self, batch: Mapping[str, Any]) -> float:
        """Return the loss of a global batch with the parameters as they are, without dropout."""
        _, _, passes, share, notes = self._prepared(batch)
        evaluated = self.engine.evaluate(share, lambda: notes, passes=passes)
        _check_notes(evaluated.notes, "the batch of this evaluation")
        return evaluated.loss / evaluated.labels if evaluated.labels else float("nan")

    @property
    def progress(self) -> Progress:
        """Steps, skipped ones, samples and tokens that have been trained. The host waits."""
        self._read()
        return self._progress

    @property
    def last(self) -> StepNumbers | None:
        """The numbers of the last step: gradient norm, labels, seconds …; None before the first one. The host waits."""
        self._read()
        return self._numbers

    def check(self, batch: Mapping[str, Any]) -> None:
        """Check that the model can be trained on batches like this one. Raises HpcMpError."""
        self._prepared(batch)

    def close(self) -> None:
        """Record the last step; the end of the program calls this. Ranks stay connected until then."""
        if getattr(sys, "last_value", None) is None:
            self._read()

    def checkpoint(self, directory: str | Path) -> None:
        """Save parameters, optimizer state and progress, completely or not at all."""
        self._read()
        saved.write_checkpoint(Path(directory), self.engine, self.subject, asdict(self.progress), self.world)

    def resume(self, directory: str | Path) -> None:
        """Continue from a checkpoint of any layout. Raises HpcMpError if it is of another model or damaged."""
        self._read()
        self._progress = Progress(**saved.read_checkpoint(Path(directory), self.engine, self.subject, self.world))
        self._numbers = None

    def model_state(self) -> dict[str, Tensor]:
        """Return every parameter as the model's module has it, by name, in the host's memory of rank 0; {} on other ranks."""
        return saved.model_state(self.engine, self.subject, self.world)

    def save(self, directory: str | Path, dtype: str = "keep") -> None:
        """Write the model for transformers' ``from_pretrained``; for layers that somebody has written, ``model.safetensors``.

        Args:
            directory: is replaced by the new one as a whole.
            dtype: "float32", "bfloat16" or "float64"; "keep" for that of the parameters.
        """
        self._read()
        saved.write_model(Path(directory), self.engine, self.subject, self.world, dtype)

    def _prepared(self, batch: Mapping[str, Any]) -> tuple[ReplicaRows, int, Passes, Microbatches, tuple[float, ...]]:
        """Return this replica's rows of a batch, the tokens of a sample, passes of its shape, the replica's share, and notes that
        must be the same on all ranks."""
        layout = self.layout
        replicas = None if self.keywords.replica else layout.degrees.data
        rows = rows_of(batch, layout, replicas, self.engine.groups.data_rank)
        tokens = self.subject.tokens(rows.batch)
        if not self._passes:  # the first batch: most mistakes are there from the beginning
            self._compare(batch)
        rows = replace(rows, batch=self.subject.adapted(rows.batch))
        key = tuple(sorted(rows.shapes.items()))
        if key not in self._passes:
            try:
                job = job_of(self.keywords, self.subject.table, self.world.who.world, rows.samples, tokens)
                self.subject.check(job)
            except HpcMpError as error:
                raise in_words_of_a_loop(error) from None
            model = self.subject.model(job, rows.shapes)
            self._passes[key] = self.engine.passes_of(model, replace(layout, samples=rows.samples, sequence=tokens))
        passes = self._passes[key] = self._passes.pop(key)  # the most recent one is the last
        if len(self._passes) > KEPT:
            del self._passes[next(iter(self._passes))]
        names = {stage: self.subject.needed(rows.batch, layout, stage) for stage in self.engine.data.stages}
        share = rows.share(names, self._progress.step, self._progress.samples, self.subject.labels(rows.batch), self.device)
        notes = rows.samples, tokens, 0 if self.keywords.replica else checksum(batch)
        return rows, tokens, passes, share, (*notes, *(-note for note in notes))

    def _compare(self, batch: Mapping[str, Tensor]) -> None:
        """Compare the batches of all ranks."""
        replica = self.engine.groups.data_rank if self.keywords.replica else 0
        fact = [{name: list(tensor.shape) for name, tensor in batch.items()}, checksum(batch), replica]
        check_alike(*zip(*facts.gather(fact, self.world.host), strict=True))

    def _read(self) -> None:
        """Read the numbers of the last step and record them."""
        if self._launched is None:
            return
        (result, tokens), self._launched = self._launched, None
        numbers = self._numbers = result.numbers()
        _check_notes(numbers.notes, f"the batch of step {self._progress.step}")
        if not numbers.norm < float("inf"):
            self._progress = replace(self._progress, skipped=self._progress.skipped + 1)
        step = self._progress.step
        hpc_mp.log(step=step, loss=numbers.loss, tokens=tokens, learning_rate=self.engine.settings.learning_rate(step - 1),
                   grad_norm=numbers.norm, seconds=numbers.seconds)


def _check_notes(notes: Sequence[float], batch: str) -> None:
    """Check the largest value over all ranks of each note, and of its negative. Raises HpcMpError if ranks had different ones."""
    names = ("samples", "tokens", "values")
    if different := [name for name, largest, negative in zip(names, notes, notes[len(names):], strict=False)
                     if largest != -negative]:
        raise HpcMpError(batch, f"had different {' and '.join(different)} on different ranks",
                         "pass the same batch on all ranks of a replica, and batches of one shape on all replicas")
