"""The engine: a model divided over all axes, and one optimizer step of it. It knows no job file and no run directory.

Its use by a rank::

    engine = Engine(model, settings, groups, device)
    engine.start(source)                     # first values; or fill ``engine.held()`` from a checkpoint, then ``restored``
    for number in range(steps):
        result = engine.step(number, share)  # all ranks call this; the host waits for no GPU
        result.numbers()                     # the same on all ranks; the host waits: read them after the next step's launch

``step`` is the training of a step from top to bottom.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.train.device.readback import Instant, Readback
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.optimizer.optimizer import Held, Optimizer
from hpc_mp.train.parallel.collectives import all_reduce, known_to_all
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.fill import Source, fill
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.pipeline.pipeline import Passed, Span, Work
from hpc_mp.train.pipeline.stage import StagedModel
from hpc_mp.train.step import loss_scale
from hpc_mp.train.step.agreement import Agreed, Shares, StepNumbers, unpacked
from hpc_mp.train.step.passes import Passes
from hpc_mp.train.step.settings import EngineSettings, Microbatches


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that has been launched.

    Attributes:
        spans: when each action of this rank ran, if that was asked for.
        loss: mean over the labels of the global batch that count, an fp64 scalar on the device.
        most_held: chunks (stage, microbatch) whose activations this rank held at once at most.
        most_here, most_away: bytes of activations that it kept for backwards at once at most, on the device and on the host;
            counted in steps that are traced, and of chunks that go to the host in all.
    """

    readback: Readback
    loss: Tensor
    spans: list[Span]
    most_held: int
    most_here: int
    most_away: int

    def numbers(self) -> StepNumbers:
        """The host waits until the device has made them."""
        return unpacked(self.readback.read(), self.readback.seconds)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation, the same on all ranks: the loss summed over the labels that count, the number of these, and of
    each note the largest."""

    loss: float
    labels: float
    notes: tuple[float, ...]


class Engine:
    """A rank's part of a model with its optimizer; parameters have no values yet."""

    def __init__(self, model: StagedModel, settings: EngineSettings, groups: Groups, device: torch.device) -> None:
        self.model, self.settings, self.groups, self.device = model, settings, groups, device
        layout, schedule = settings.layout, settings.schedule
        spans = stage_spans(layout.layers)
        mine = {stage: spans[stage] for stage in schedule.stages_of(groups.pipeline)}
        place = groups.tensor.rank, groups.expert.rank
        units = model.units(layout, mine.values(), *place)
        names = {stage: list(model.units(layout, [span], *place)) for stage, span in mine.items()}
        self.data = DataAxis(units, names, schedule, groups, layout, device)
        self.optimizer = Optimizer(self.data.units, settings.optimizer, self.data.slabs.dtype, device, settings.home)
        self.scale = loss_scale.on_device(loss_scale.first(settings.loss_scale), device)

    @cached_property
    def passes(self) -> Passes:
        """Passes of batches of the layout's shape."""
        return self.passes_of(self.model, self.settings.layout)

    def prepare(self) -> "Engine":
        """Build the passes of the layout's shape now, and not in the first step. Return this engine."""
        _ = self.passes
        return self

    def passes_of(self, model: StagedModel, layout: Layout) -> Passes:
        """Return passes of batches of another shape, for ``step`` and ``evaluate``."""
        return Passes(model, layout, self.settings, self.groups, self.data)

    def start(self, source: Source) -> None:
        """Give the parameters their first values."""
        fill(self.data.units.values(), source)
        self.data.filled()

    def held(self) -> Iterator[Held]:
        """This rank's state, to be saved, or to be filled by whoever calls ``restored`` afterwards."""
        return self.optimizer.held()

    def restored(self, updates: int, scale: Sequence[float] = ()) -> None:
        """``held`` has been filled with a state that has so many updates behind it, and this loss scale, if it had one."""
        self.optimizer.set_steps(updates)
        if scale:
            self.scale = loss_scale.on_device(scale, self.device)
        self.data.filled()

    def step(self, number: int, share: Microbatches, notes: Callable[[], Sequence[float]] = tuple,
             trace: bool = False, passes: Passes | None = None) -> StepResult:
        """Train an optimizer step. All ranks call this. The host waits for no device.

        Args:
            number: of the step, from 0.
            share: this replica's part of the batch.
            notes: returns numbers; all ranks learn the largest of each. Called when the last backward has been launched.
            trace: True if the time of each action is recorded.
            passes: of the shape of this batch; None: the layout's.
        """
        passes = passes or self.passes
        began, scale = Instant.here(self.device), self.scale[0]
        known = None if share.labels is None else _LabelCount(share.labels, self.groups, self.device)

        def gradient() -> Tensor:  # of the mean over labels, or of their sum until they are known
            return scale if known is None else scale / known.all().clamp(min=1.0)

        with profiled("forward_backward"):
            passes.router_loss.begin(scale)
            passes.capacity.begin()
            passed = passes.pipeline.train(_work(share, gradient, trace))
        with profiled("reduce_gradients"):
            self.data.finish()
        with profiled("agree"):
            agreed, divisor = self._agree(passes, passed, None if known is None else known.all(), notes())
        with profiled("update"):
            self.optimizer.step(self.settings.learning_rate(number), agreed.norm, divisor)
            self.scale = agreed.scale
        with profiled("publish"):
            self.data.publish()
        return StepResult(Readback(agreed.packed(), began), agreed.loss, passed.spans, passed.most_held, passed.most_here,
                          passed.most_away)

    def _agree(self, passes: Passes, passed: Passed, known: Tensor | None, notes: Sequence[float]) -> tuple[Agreed, Tensor]:
        """Exchange the numbers that all ranks must know. Return them, and the factor by which gradients are too large.

        Args:
            known: labels of the global batch, by which the gradient has been divided; None: forwards have counted them.
        """
        loss, count = self._counted(passed)
        shares = Shares(self.optimizer.squared_norm(), loss, count, passes.router_loss.total, *passes.capacity.total)
        total, largest = shares.exchanged(notes, self.groups.world)
        labels = total.count if known is None else known
        divisor = self.scale[0] * labels if known is None else self.scale[0]
        unlabelled = labels == 0  # then there is nothing to learn from, and momentum alone must not move the parameters
        norm = (total.squares.sqrt() / divisor).masked_fill(unlabelled, float("nan"))
        advanced, absorbed = loss_scale.advanced(self.scale, norm.isfinite(), self.settings.loss_scale)
        return Agreed(loss=total.loss / labels, norm=norm, labels=labels, absorbed=(absorbed | unlabelled).double(),
                      router_loss=total.router, dropped=total.dropped / total.choices,
                      scale=torch.where(unlabelled, self.scale, advanced), notes=largest), divisor

    def _counted(self, passed: Passed) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the summed loss and of the labels. Tensor ranks compute the same: the first one counts."""
        loss, count = passed.loss, passed.count.double()
        return (torch.zeros_like(loss), torch.zeros_like(count)) if self.groups.tensor.rank else (loss, count)

    def evaluate(self, share: Microbatches, notes: Callable[[], Sequence[float]] = tuple,
                 passes: Passes | None = None) -> Evaluated:
        """Compute the loss of a replica's microbatches, as many as a step has, with the parameters as they are. All ranks call
        this. Nothing is dropped, nothing changes. ``notes``, ``passes``: as for ``step``."""
        passed = (passes or self.passes).pipeline.evaluate(_work(share, lambda: self.scale[0]))
        mine = torch.stack([*self._counted(passed), *torch.tensor(notes(), dtype=torch.float64, device=self.device)])
        everyone = known_to_all(mine, self.groups.world)
        total, labels = everyone[:, :2].sum(0).tolist()
        return Evaluated(total, labels, tuple(everyone[:, 2:].amax(0).tolist()))


def _work(share: Microbatches, gradient: Callable[[], Tensor], trace: bool = False) -> Work:
    """Return a replica's share for the pipeline. ``gradient``: of the loss."""
    return Work(share.batch, share.moment, share.enter, gradient, trace)


class _LabelCount:
    """Labels of a step's global batch that count in the loss. Every replica counts its own, the first rank of each context group
    for all of it; they are summed while the first microbatch is computed."""

    def __init__(self, own: int, groups: Groups, device: torch.device) -> None:
        own = own if groups.context.rank == 0 else 0
        self._own = torch.full((), own, dtype=torch.float64, device=device)
        self._replicate = groups.replicate
        self._running = all_reduce(self._own, groups.shard)
        self._summed = False

    def all(self) -> Tensor:
        """A float64 scalar."""
        if not self._summed:
            self._running.wait()
            all_reduce(self._own, self._replicate).wait()
            self._summed = True
        return self._own
