"""The engine: a model cut over all axes, and one optimizer step of it. It knows no job file and no run directory.

One rank's use of it, whoever holds the loop::

    engine = Engine(model, settings, groups, device)
    engine.start(source)                    # first values; or fill ``engine.held()`` from a checkpoint, then ``publish``
    for number in range(steps):
        result = engine.step(number, work)  # all ranks call this; the host waits for no GPU
        result.numbers()                    # are the same on all ranks; better asked for when the next step has been launched

``step`` is the training of a step from top to bottom.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Residency, Schedule, residency
from hpc_mp.train.engine import initial, loss_scale
from hpc_mp.train.engine.agreement import Agreed, Shares, StepNumbers, unpacked
from hpc_mp.train.engine.capacity import Capacity
from hpc_mp.train.engine.collectives import all_reduce, known_to_all
from hpc_mp.train.engine.context import ContextAxis
from hpc_mp.train.engine.data_axis import DataAxis
from hpc_mp.train.engine.dropout import DropoutClock, Moment
from hpc_mp.train.engine.expert_axis import ExpertAxis
from hpc_mp.train.engine.groups import Groups
from hpc_mp.train.engine.host_parameters import Bus
from hpc_mp.train.engine.loss_scale import ScaleRule, Unscaled
from hpc_mp.train.engine.optimizer import Held, HomeMaker, Optimizer, OptimizerSettings
from hpc_mp.train.engine.optimizer_state import OnDevice
from hpc_mp.train.engine.pipeline import Pipeline, Span, Work
from hpc_mp.train.engine.precision import PRECISIONS
from hpc_mp.train.engine.projection import TensorAxis, WeightGradients
from hpc_mp.train.engine.readback import Instant, Readback
from hpc_mp.train.engine.router_loss import RouterLoss
from hpc_mp.train.engine.sequence import SequenceAxis
from hpc_mp.train.engine.stage import Batch, Model
from hpc_mp.train.engine.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a model is cut and trained.

    Attributes:
        schedule: of the layout: which rank of a pipeline has which stages, and what it does in which order.
        seed: of dropout.
        loss_scale: how that of fp16 moves.
        home: makes the place where optimizer state lies between two steps.
        router_balance, router_z: what the balance loss of a sample and the z loss of a token count, see ``router_loss``.
        compile: blocks and the loss are compiled, see ``compilation``.
    """

    layout: Layout
    schedule: Schedule
    seed: int
    optimizer: OptimizerSettings
    loss_scale: ScaleRule = field(default_factory=Unscaled)
    home: HomeMaker = OnDevice
    router_balance: float = 0.0
    router_z: float = 0.0
    compile: bool = False


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A replica's share of a step.

    Attributes:
        batch: (stage, microbatch) -> what that stage needs of it, on the device.
        moment: microbatch -> the step and the global positions of its samples.
        labels: how many labels of all of them count in the loss.
        enter: called with the microbatch before each of its forwards.
    """

    batch: Callable[[int, int], Batch]
    moment: Callable[[int], Moment]
    labels: int
    enter: Callable[[int], None] = lambda microbatch: None


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that has been launched.

    Attributes:
        spans: when each action of this rank ran, if that was asked for.
        most_held: chunks (stage, microbatch) whose activations this rank held at once at most.
        most_here, most_away: bytes of activations that it kept for backwards at once at most, on the device and on the host;
            counted in steps that are traced, and of chunks that go to the host in all.
    """

    readback: Readback
    spans: list[Span]
    most_held: int
    most_here: int
    most_away: int

    def numbers(self) -> StepNumbers:
        """The host waits until the device has made them."""
        return unpacked(self.readback.read(), self.readback.seconds)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What all ranks agree on after an evaluation: the loss summed over the labels of all replicas that count, and how many these
    are. ``notes``: as in ``StepResult``."""

    loss: float
    labels: int
    notes: tuple[float, ...]


class Engine:
    """This rank's stages with their optimizer and their pipeline; parameters have no values yet."""

    def __init__(self, model: Model, settings: EngineSettings, groups: Groups, device: torch.device) -> None:
        self.settings, self.groups, self.device = settings, groups, device
        layout, schedule = settings.layout, settings.schedule
        precision, spans = PRECISIONS[layout.precision], stage_spans(layout.layers)
        mine = {stage: spans[stage] for stage in schedule.stages_of(groups.pipeline)}
        weights = WeightGradients()
        self.context = context = ContextAxis(groups.context, layout.context_method, layout.sequence, device)
        along = groups.tensor, layout.tensor_modules, weights
        tensor = SequenceAxis(*along, len(context.positions)) if layout.sequence_parallel else TensorAxis(*along)
        clock = DropoutClock(settings.seed)
        place = groups.tensor.rank, groups.expert.rank
        layouts = model.units(layout, mine.values(), *place)
        names = {stage: list(model.units(layout, [span], *place)) for stage, span in mine.items()}
        reductions = Counter(action.stage for action in schedule.ranks[groups.pipeline] if action.kind == "REDUCE")
        once = any(count < schedule.microbatches for count in reductions.values())
        bus = Bus(device) if "parameters" in layout.offload else None
        self.data = DataAxis(layouts, names, reductions, groups, layout.zero, once, precision, device, bus)
        experts = ExpertAxis(groups.expert, model.experts)
        self.router_loss = RouterLoss(settings.router_balance, settings.router_z, layout.samples, layout.sequence, device)
        self.capacity = Capacity(model.capacity(layout), layout.samples, device)
        around = Surroundings(tensor, context, experts, self.router_loss, self.capacity, clock, precision, layout.recompute,
                              settings.compile)
        stages = {stage: model.build(span, around) for stage, span in mine.items()}
        for stage, built in stages.items():
            built.adopt({name: self.data.units[name] for name in names[stage]})
        tokens = len(tensor.share(context.positions, 0))
        boundaries = [model.received(layout, stage, tokens, precision.compute) for stage in range(layout.stages)]
        horizon = layout.offload_horizon
        plan = Residency() if horizon is None else residency(schedule.ranks[groups.pipeline], horizon)
        self.pipeline = Pipeline(stages, self.data, schedule, groups, boundaries, weights, clock, device, plan)

        self.optimizer = Optimizer(self.data.units, settings.optimizer, settings.home)
        self.scale = loss_scale.on_device(loss_scale.first(settings.loss_scale), device)

    def start(self, source: initial.Source) -> None:
        """Give the parameters their first values."""
        initial.fill(self.data.units.values(), source)
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
             trace: bool = False) -> StepResult:
        """One optimizer step; all ranks call this. The host waits for no device.

        Args:
            number: of the step, from 0.
            share: what this rank's replica trains.
            notes: gives numbers of which all ranks get to know the largest; called when the last backward is over.
            trace: record when each action ran.
        """
        began, scale = Instant.here(self.device), self.scale[0]
        labels = _LabelCount(share.labels, self.groups, self.device)
        with record_function("forward_backward"):
            self.router_loss.begin(scale)
            self.capacity.begin()
            passed = self.pipeline.train(self._work(share, lambda: scale / labels.all().clamp(min=1.0), trace))
        with record_function("reduce_gradients"):
            self.data.finish()
        with record_function("agree"):
            agreed = self._agree(passed.loss, labels.all(), notes())
        with record_function("update"):
            self.optimizer.step(number, agreed.norm, scale)
            self.scale = agreed.scale
        with record_function("publish"):
            self.data.publish()
        return StepResult(Readback(agreed.packed(), began), passed.spans, passed.most_held, passed.most_here, passed.most_away)

    def _agree(self, loss: Tensor, labels: Tensor, notes: Sequence[float]) -> Agreed:
        """Tell all ranks what they must know of each other. ``labels``: of the global batch."""
        own = torch.zeros_like(loss) if self.groups.tensor.rank else loss  # tensor ranks hold the same: the first one's counts
        shares = Shares(self.optimizer.squared_norm(), own, self.router_loss.total, *self.capacity.total)
        total, largest = shares.exchanged(notes, self.groups.world)
        unlabelled = labels == 0  # then there is nothing to learn from, and momentum alone must not move the parameters
        norm = (total.squares.sqrt() / self.scale[0]).masked_fill(unlabelled, float("nan"))
        advanced, absorbed = loss_scale.advanced(self.scale, norm.isfinite(), self.settings.loss_scale)
        return Agreed(loss=total.loss / labels, norm=norm, labels=labels, absorbed=(absorbed | unlabelled).double(),
                      router_loss=total.router, dropped=total.dropped / total.choices,
                      scale=torch.where(unlabelled, self.scale, advanced), notes=largest)

    def evaluate(self, share: Microbatches, notes: Callable[[], Sequence[float]] = tuple) -> Evaluated:
        """The loss of a replica's microbatches, as many as a step has, with the parameters as they are; all ranks call this. No
        dropout, no gradient: nothing that a step begins with changes. ``notes``: as for ``step``."""
        passed = self.pipeline.evaluate(self._work(share, lambda: self.scale[0]))
        loss, count = (torch.zeros_like(each) if self.groups.tensor.rank else each for each in (passed.loss, passed.count))
        mine = torch.stack([loss, count.double(), *torch.tensor(notes(), dtype=torch.float64, device=self.device)])
        everyone = known_to_all(mine, self.groups.world)
        total, labels = everyone[:, :2].sum(0).tolist()
        return Evaluated(total, int(labels), tuple(everyone[:, 2:].amax(0).tolist()))

    def _work(self, share: Microbatches, gradient: Callable[[], Tensor], trace: bool = False) -> Work:
        """A replica's share. ``gradient``: of the loss."""
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
