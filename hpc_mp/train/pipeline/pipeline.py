"""The pipeline driver: it executes one rank's action list of a schedule, whatever the schedule is."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpc_mp.layout.schedule import Action, Chunk, Residency, Schedule, posted_ahead
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.parallel.collectives import RunningSum
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.parallel.projection import WeightGradients
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.activations import Activations, ChunkActivations, SavedStorage
from hpc_mp.train.pipeline.messages import Messages
from hpc_mp.train.pipeline.stage import Boundary, Carried, Microbatches, Stage

Span = tuple[str, int, int, float, float]  # kind, stage, microbatch, start, end (unix seconds)


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a step, or of an evaluation, on this rank.

    Attributes:
        loss: loss, summed over labels, a float64 scalar; ``count``: number of these labels. Both are 0 without the last stage.
        spans: time of each action, if it is recorded.
        most_held: largest number of chunks (stage, microbatch) whose activations were held at once.
        most_here, most_away: peak bytes of activations on the device and on the host. They are counted in traced steps, and in
            all steps if chunks go to the host.
    """

    loss: Tensor
    count: Tensor
    spans: list[Span]
    most_held: int
    most_here: int
    most_away: int


@dataclass(slots=True)
class _Step:
    """State of one optimizer step, or of one evaluation."""

    share: Microbatches
    scale: Tensor | None = None
    labels: RunningSum | None = None
    trace: bool = False
    counts: bool = False  # the bytes of activations
    roots: dict[Chunk, dict[str, GradientEdge]] = field(default_factory=dict)  # where a backward begins
    gradients: dict[Chunk, Boundary] = field(default_factory=dict)  # of a forward's inputs, filled by its backward
    away: dict[Chunk, ChunkActivations] = field(default_factory=dict)
    put_off: dict[Chunk, tuple[WeightGradients, list[SavedStorage]]] = field(default_factory=dict)  # and the counted storages
    loss: Tensor | None = None
    count: Tensor | None = None
    most_held: int = 0
    spans: list[Span] = field(default_factory=list)

    def loss_gradient(self) -> Tensor | None:
        """Return the gradient of the summed loss, a scalar; None in an evaluation."""
        return self.scale if self.scale is None or self.labels is None else self.scale / self.labels.value().clamp(min=1.0)


def _inlet(anchor: Tensor, received: Tensor, name: str, gradients: Boundary) -> Tensor:
    """Return a tensor of another stage as the beginning of this stage's graph, which puts its gradient into ``gradients``. Unlike
    the graph of a leaf it does not keep the tensor: only a module that needs the values for its backward holds them."""
    def hand_over(gradient: Tensor) -> tuple[None, None]:
        gradients[name] = gradient
        return None, None

    return with_backward(lambda anchor, received: received.view_as(received), hand_over, anchor, received)


class Pipeline:
    """Forward and backward passes of one rank's stages.

    Args:
        stages: stages of this rank, by number.
        boundaries: the tensors that each stage receives from the one before, for one microbatch.
        around: surroundings that these stages share.
        residency: the activations that leave the device between their forward and their backward.

    Attributes:
        perform: kind of an action -> its execution.
    """

    def __init__(self, stages: Mapping[int, Stage], boundaries: Sequence[Mapping[str, Carried]], data: DataAxis, groups: Groups,
                 around: Surroundings, schedule: Schedule, residency: Residency) -> None:
        self.stages, self.boundaries, self.data, self.residency = stages, boundaries, data, residency
        self.weights, self.clock, self.device = around.tensor.weights, around.clock, data.slabs.device
        self.actions, self.last = schedule.ranks[groups.pipeline], schedule.stages - 1
        self.posted = posted_ahead if groups.channels.through_host else list
        self.activations = Activations(self.device)
        self.messages = Messages(schedule, groups, boundaries, self.device)
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.returned = [[name for name, tensor in carried.items() if tensor.differentiable] for carried in boundaries]
        self.reducing = {(action.stage, action.microbatch) for action in self.actions if action.kind == "REDUCE"}
        self.perform: dict[str, Callable[[_Step, Action], None]] = {
            "F": self._forward, "B": self._backward, "I": self._input_backward, "W": self._weight_backward,
            **dict.fromkeys(("SEND_F", "SEND_B"), lambda step, action: self.messages.send(action)),
            **dict.fromkeys(("RECV_F", "RECV_B"), lambda step, action: self.messages.receive(action)),
            "REDUCE": lambda step, action: self.data.reduce(action.stage),
        }

    def train(self, share: Microbatches, scale: Tensor, labels: RunningSum | None, trace: bool = False) -> Passed:
        """Run all forwards and backwards of a step. Sums over the data axis are under way when it returns. ``scale``: of fp16's
        gradients, a scalar; 1 for other formats. ``labels``: of the global batch that count, by which the gradient of the loss is
        divided; None: their number is not known yet. ``trace``: True if the time of each action is recorded; the host waits for
        the computing stream around it."""
        self.data.begin()
        self.activations.begin()
        return self._run(_Step(share, scale, labels, trace, trace or bool(self.residency.away)), self.actions, self.residency)

    @torch.no_grad()
    def evaluate(self, share: Microbatches) -> Passed:
        """Run the forwards alone, without dropout; nothing is kept for a backward. They can run in the order of the schedule,
        because no forward waits for a backward."""
        for stage in self.stages.values():
            stage.eval()
        try:
            forwards = [action for action in self.actions if action.kind in ("F", "SEND_F", "RECV_F")]
            return self._run(_Step(share), forwards, Residency())
        finally:
            for stage in self.stages.values():
                stage.train()

    def _run(self, step: _Step, actions: Sequence[Action], residency: Residency) -> Passed:
        self.messages.begin()
        for action in self.posted(actions):
            for chunk in residency.returns.get(action, ()):
                step.away[chunk].come_back()
            with profiled(f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"):
                if step.trace:
                    self._traced(step, action)
                else:
                    self.perform[action.kind](step, action)
        self.messages.finish()
        nothing = torch.zeros((), device=self.device)
        return Passed((nothing if step.loss is None else step.loss).double(), nothing if step.count is None else step.count,
                      step.spans, step.most_held, self.activations.most_here, self.activations.most_away)

    def _traced(self, step: _Step, action: Action) -> None:
        """Perform an action and record its time. The wait for a message is recorded as its receive, and not as computation."""
        if (message := self.messages.awaited(action)) is not None:
            with self._timed(step, message.receive):
                self.messages.arrive(action)
        with nullcontext() if action.kind.startswith("RECV") else self._timed(step, action):
            self.perform[action.kind](step, action)

    @contextmanager
    def _timed(self, step: _Step, action: Action) -> Iterator[None]:
        start = self._now()
        yield
        step.spans.append((action.kind, action.stage, action.microbatch, start, self._now()))

    def _now(self) -> float:
        if self.device.type == "cuda":  # not the whole device: a posted receive may need a message that this rank has yet to send
            torch.cuda.current_stream(self.device).synchronize()
        return time.time()

    def _forward(self, step: _Step, action: Action) -> None:
        stage, m = chunk = action.stage, action.microbatch
        part = self.stages[stage]
        step.share.begun = m
        self.clock.set(step.share.moments[m])
        training, gradient = torch.is_grad_enabled(), step.loss_gradient() if stage == self.last else None
        received = self.messages.take(action) if stage > 0 else {}
        if training:
            gradients = step.gradients[chunk] = {}
            received |= {name: _inlet(self._anchor, received[name], name, gradients) for name in self.returned[stage]}
        activations = ChunkActivations(self.activations, part.tensors()) if step.counts else None
        leaves = chunk in self.residency.away
        with part.precision.computing(), activations.saved(leaves) if activations is not None else nullcontext():
            result = part(received, step.share.batches[chunk], gradient)
        if activations is not None and leaves:
            step.away[chunk] = activations
        if stage == self.last:
            loss, count = cast(tuple[Tensor, Tensor], result)
            step.loss = loss.detach() if step.loss is None else step.loss + loss.detach()
            step.count = count if step.count is None else step.count + count
            outputs, differentiable = {"loss": loss}, ["loss"]
        else:
            outputs, differentiable = cast(Boundary, result), self.returned[stage + 1]
            self.messages.put(action, {name: tensor.detach() for name, tensor in outputs.items()})
        if training:
            # no root: nothing in this stage or before it is trained
            step.roots[chunk] = {name: get_gradient_edge(outputs[name]) for name in differentiable if outputs[name].requires_grad}
        step.most_held = max(step.most_held, len(step.gradients) + len(step.put_off))

    def _backward(self, step: _Step, action: Action) -> None:
        if (action.stage, action.microbatch) in self.reducing:
            self.data.announce(action.stage)
        self._differentiate(step, action)
        with self.stages[action.stage].precision.computing():
            self.weights.work_off()

    def _input_backward(self, step: _Step, action: Action) -> None:
        self.weights.split = True
        self._differentiate(step, action)
        self.weights.split = False
        waiting = self.weights.take()
        storages = self.activations.noted(waiting.tensors()) if step.counts else []
        step.put_off[action.stage, action.microbatch] = waiting, storages

    def _weight_backward(self, step: _Step, action: Action) -> None:
        waiting, _ = step.put_off.pop((action.stage, action.microbatch))
        with self.stages[action.stage].precision.computing():
            waiting.work_off()

    def _differentiate(self, step: _Step, action: Action) -> None:
        stage, m = chunk = action.stage, action.microbatch
        self.clock.set(step.share.moments[m])
        if chunk in step.away:
            step.away.pop(chunk).need()
        roots = step.roots.pop(chunk)
        if stage == self.last:
            gradient = step.loss_gradient()
            assert step.loss is not None and gradient is not None, "a backward without a forward, or in an evaluation"
            received = {"loss": gradient.to(step.loss.dtype)}
        else:
            received = self.messages.take(action)
        if roots:
            with self.stages[stage].precision.computing():
                torch.autograd.backward(list(roots.values()), [received[name] for name in roots])
        gradients, carried = step.gradients.pop(chunk), self.boundaries[stage]
        if stage > 0:
            gradients |= {name: torch.zeros(carried[name].shape, dtype=carried[name].dtype, device=self.device)
                          for name in self.returned[stage] if name not in gradients}  # of tensors used without gradients
            self.messages.put(action, gradients)
