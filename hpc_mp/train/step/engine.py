"""The engine: a model divided over all axes, and one optimizer step of it. It knows no job file and no run directory.

Its use by a rank::

    engine = Engine(model, settings, groups, device)
    engine.start(source)                     # first values; or fill ``engine.held()`` from a checkpoint, then ``restored``
    for number in range(steps):
        result = engine.step(number, share)  # all ranks call this; the host waits for no GPU
        result.numbers()                     # the same on all ranks; the host waits: read them after the next step's launch

``step`` trains one step from top to bottom.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS
from hpc_mp.train.device.readback import Instant, Readback
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.optimizer.optimizer import Held, Optimizer
from hpc_mp.train.parallel.collectives import RunningSum, known_to_all
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.fill import Source, fill
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.pipeline.pipeline import Passed
from hpc_mp.train.pipeline.stage import Microbatches, StagedModel
from hpc_mp.train.step import loss_scale
from hpc_mp.train.step.agreement import SCALE, Shares, StepNumbers, agree, step_numbers
from hpc_mp.train.step.passes import Passes
from hpc_mp.train.step.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that has been launched. ``loss``: mean over the labels of the global batch that count, an fp64 scalar on the
    device."""

    readback: Readback
    loss: Tensor
    passed: Passed

    def numbers(self) -> StepNumbers:
        """Return the numbers of the step. The host waits for them."""
        return step_numbers(*self.readback.read())


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation on all ranks: the loss, summed over labels, their number, the largest of each note, and what
    ``SampleClass`` counts of classes."""

    loss: float
    labels: float
    notes: tuple[float, ...]
    classes: Tensor


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
        whole = settings.optimizer.optimizer in WHOLE_WEIGHTS
        layouts = [model.units(layout, mine.values(), rank, groups.expert.rank)
                   for rank in range(groups.tensor.size if whole else 0)]
        shapes = model.module_shapes(mine.values()) if whole or settings.optimizer.weight_decay else {}
        self.optimizer = Optimizer(self.data.trained, settings.optimizer, self.data.slabs.dtype, device, settings.home,
                                   groups.tensor, layouts, shapes)
        self.scale = loss_scale.on_device(loss_scale.first(settings.loss_scale), device)

    @cached_property
    def passes(self) -> Passes:
        """Passes of batches of the layout's shape; the first use builds them."""
        return self.passes_of(self.model, self.settings.layout)

    def passes_of(self, model: StagedModel, layout: Layout) -> Passes:
        """Return passes of batches of another shape, for ``step`` and ``evaluate``."""
        return Passes(model, layout, self.settings, self.groups, self.data)

    def start(self, source: Source) -> None:
        """Give the parameters their first values."""
        fill(self.data.units.values(), source)
        self.data.filled()

    def held(self) -> Iterator[Held]:
        """Yield this rank's state, to be saved, or to be filled before a call of ``restored``."""
        return self.optimizer.held()

    def restored(self, updates: int, scale: Sequence[float] = ()) -> None:
        """Continue from the state with which ``held`` has been filled: after so many updates, and with this loss scale if any."""
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
        labels = None if share.labels is None else label_count(share.labels, self.groups, self.device)
        with profiled("forward_backward"):
            passes.router_loss.begin(scale)
            passes.capacity.begin()
            passed = passes.pipeline.train(share, scale, labels, trace)
        with profiled("reduce_gradients"):
            self.data.finish()
        with profiled("agree"):
            noted = notes()
            shares = Shares(self.optimizer.squared_norm(), *self._counted(passed), passes.router_loss.total,
                            *passes.capacity.total)
            counted = None if labels is None else labels.value()
            numbers, divisor = agree(shares, noted, counted, self.scale, self.settings.loss_scale, self.groups.world)
            loss, norm, *_ = numbers
        with profiled("update"):
            self.optimizer.step(self.settings.learning_rate(number), norm, divisor)
            self.scale = numbers[SCALE]
        with profiled("publish"):
            self.data.publish()
        return StepResult(Readback(numbers, began), loss, passed)

    def _counted(self, passed: Passed) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the summed loss and of the labels. Tensor ranks compute the same: the first one counts."""
        loss, count = passed.loss, passed.count.double()
        return (torch.zeros_like(loss), torch.zeros_like(count)) if self.groups.tensor.rank else (loss, count)

    def evaluate(self, share: Microbatches, notes: Callable[[], Sequence[float]] = tuple,
                 passes: Passes | None = None, classes: int = 0) -> Evaluated:
        """Compute the loss of a replica's microbatches, as many as a step has, with the parameters as they are. All ranks call
        this. Nothing is dropped, nothing changes. ``notes``, ``passes``: as for ``step``. ``classes``: of samples, if the model
        tells them apart."""
        loss, count = self._counted((passes or self.passes).pipeline.evaluate(share))
        counts = count.expand((3, classes) if classes else (1, 1))
        mine = torch.cat((loss.view(1), counts.flatten(), torch.tensor(notes(), dtype=torch.float64, device=self.device)))
        everyone, behind = known_to_all(mine, self.groups.world).cpu(), 1 + counts.numel()
        total, noted = everyone[:, :behind].sum(0), everyone[:, behind:].amax(0)
        counts = total[1:].view(counts.shape)
        return Evaluated(float(total[0]), float(counts[0].sum()), tuple(noted.tolist()), counts)


def label_count(own: int, groups: Groups, device: torch.device) -> RunningSum:
    """Begin to sum the labels of a step's global batch that count in the loss, while the first microbatch is computed. Every
    replica counts its own labels; the first rank of each context group counts for all of it."""
    return RunningSum(own if groups.context.rank == 0 else 0, (groups.shard, groups.replicate), device)
