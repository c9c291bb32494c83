"""The pipeline driver: it executes one rank's action list of a schedule, whatever the schedule is.

Receives are posted where the schedule says (one compute action ahead) and waited for by their consumer. What is sent is let go
where the schedule proves that it has arrived (``layout/schedule/arrivals.py``), at the end of the step at the latest; of many a
message NCCL says so earlier, gloo of none. Every pair of ranks has a communicator for each direction and payload, so that a
message waits for none but those before it between the same two.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpc_mp.layout.schedule import Action, Chunk, Residency, Schedule, arrivals
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.dropout import Moment
from hpc_mp.train.parallel.groups import Groups, Payload
from hpc_mp.train.parallel.projection import WeightGradients
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.activations import Activations, ChunkActivations, SavedStorage
from hpc_mp.train.pipeline.stage import Batch, Boundary, Carried, Stage

Span = tuple[str, int, int, float, float]  # kind, stage, microbatch, start, end (unix seconds)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes.

    Attributes:
        batch: (stage, microbatch) -> what that stage needs of it.
        moment: microbatch -> where training is.
        enter: called with the microbatch before each of its forwards.
        loss_gradient: gives the gradient of the loss, a scalar: 1 / labels of the global batch, times fp16's scale; called at
            backwards of the last stage.
        trace: record when each action ran (the host waits for the computing stream around it).
    """

    batch: Callable[[int, int], Batch]
    moment: Callable[[int], Moment]
    enter: Callable[[int], None] | None
    loss_gradient: Callable[[], Tensor]
    trace: bool = False


@dataclass(slots=True)
class _Arrival:
    """Posted receives of a boundary. gloo waits for a second message when a receive is waited for twice, hence ``arrived``."""

    works: list[dist.Work]
    buffers: Boundary
    wanted_on: torch.device
    arrived: bool = False

    def wait(self) -> Boundary:
        if not self.arrived:
            for work in self.works:
                work.wait()
            self.arrived = True
        return {name: buffer.to(self.wanted_on) for name, buffer in self.buffers.items()}


@dataclass(slots=True)
class _Step:
    """What lives during one optimizer step, or one evaluation."""

    work: Work
    outputs: dict[Chunk, Boundary] = field(default_factory=dict)  # to be sent
    roots: dict[Chunk, dict[str, GradientEdge]] = field(default_factory=dict)  # where a backward begins
    found: dict[Chunk, Boundary] = field(default_factory=dict)  # gradients of a forward's inputs, once its backward has run
    away: dict[Chunk, ChunkActivations] = field(default_factory=dict)
    losses: dict[Chunk, Tensor] = field(default_factory=dict)
    gradients: dict[Chunk, Boundary] = field(default_factory=dict)  # of a stage's inputs, to be sent
    local: dict[tuple[Payload, int, int], Boundary] = field(default_factory=dict)  # for a stage of the same rank
    put_off: dict[Chunk, WeightGradients] = field(default_factory=dict)
    noted: dict[Chunk, list[SavedStorage]] = field(default_factory=dict)  # what they hold
    arriving: dict[tuple[Payload, int, int], _Arrival] = field(default_factory=dict)
    sending: dict[Action, list[tuple[dist.Work, Tensor]]] = field(default_factory=dict)  # what has not arrived yet
    loss: Tensor | None = None
    count: Tensor | None = None
    most_held: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of a step on this rank: the summed loss and its number of labels (zero without the last stage), when each action
    ran, how many chunks' activations it held at most, and the most bytes of them on the device and on the host, where they were
    counted."""

    loss: Tensor
    count: Tensor
    spans: list[Span]
    most_held: int
    most_here: int
    most_away: int


class _Inlet(torch.autograd.Function):
    """What another stage made, as the begin of this stage's graph. The graph hands its gradient over and, unlike that of a leaf,
    does not keep the tensor: who does not need its values for a backward need not hold them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, name: str, found: Boundary) -> Tensor:
        ctx.name, ctx.found = name, found
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.found[ctx.name] = gradient
        return None, None, None, None


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and the activations that leave the device between their forward and their backward."""

    schedule: Schedule
    residency: Residency


class Pipeline:
    """Forward and backward passes of one rank's stages.

    Args:
        stages: of this rank, by number.
        boundaries: the tensors that each stage receives from the one before, for one microbatch; ``returned``: the names of
            those whose gradients go back.
        around: what these stages share.
    """

    def __init__(self, stages: Mapping[int, Stage], boundaries: Sequence[Mapping[str, Carried]], data: DataAxis, groups: Groups,
                 around: Surroundings, plan: Plan) -> None:
        self.stages, self.boundaries, self.data = stages, boundaries, data
        self.rank, self.channels = groups.pipeline, groups.channels
        self.weights, self.clock, self.device = around.tensor.weights, around.clock, data.slabs.device
        self.schedule = schedule = plan.schedule
        self.actions, self.residency = schedule.ranks[self.rank], plan.residency
        self.activations = Activations(self.device)
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.last = len(schedule.placement) - 1
        self.returned = [[name for name, tensor in carried.items() if tensor.differentiable] for carried in boundaries]
        self.arrived = arrivals(schedule, self.rank)
        self.reducing = {(action.stage, action.microbatch) for action in self.actions if action.kind == "REDUCE"}
        self.perform: dict[str, Callable[[_Step, Action], None]] = {
            "F": self._forward, "B": self._backward, "I": self._input_backward, "W": self._weight_backward,
            "SEND_F": self._send_output, "RECV_F": self._post_input,
            "SEND_B": self._send_gradient, "RECV_B": self._post_gradient, "REDUCE": self._reduce,
        }

    def train(self, work: Work) -> Passed:
        """One step: all forwards and backwards. Sums over the data axis are under way when it returns."""
        self.data.begin()
        self.activations.begin()
        return self._run(work, self.actions, self.residency)

    @torch.no_grad()
    def evaluate(self, work: Work) -> Passed:
        """All forwards alone, without dropout, and nothing is kept for a backward. A schedule that can run as a whole can run so:
        no forward waits for a backward, and what is left keeps its order."""
        for stage in self.stages.values():
            stage.eval()
        try:
            return self._run(work, [action for action in self.actions if action.kind in ("F", "SEND_F", "RECV_F")], Residency())
        finally:
            for stage in self.stages.values():
                stage.train()

    def _run(self, work: Work, actions: Sequence[Action], plan: Residency) -> Passed:
        step = _Step(work)
        for action in actions:
            for chunk in plan.returns.get(action, ()):
                step.away[chunk].come_back()
            with profiled(f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"):
                if work.trace:
                    self._traced(step, action)
                else:
                    self.perform[action.kind](step, action)
        self._let_go(step, tuple(step.sending))
        nothing = torch.zeros((), device=self.device)
        return Passed((nothing if step.loss is None else step.loss).double(), nothing if step.count is None else step.count,
                      step.spans, step.most_held, self.activations.most_here, self.activations.most_away)

    def _traced(self, step: _Step, action: Action) -> None:
        """Waiting for a message is recorded as its receive, so that computing and waiting can be told apart."""
        payload: Payload = "F" if action.kind == "F" else "B"
        arrival = step.arriving.get((payload, action.stage, action.microbatch)) if action.kind in ("F", "B", "I") else None
        if arrival is not None:
            start = self._now()
            arrival.wait()
            step.spans.append((f"RECV_{payload}", action.stage, action.microbatch, start, self._now()))
        if action.kind.startswith("RECV"):
            self.perform[action.kind](step, action)
            return
        start = self._now()
        self.perform[action.kind](step, action)
        step.spans.append((action.kind, action.stage, action.microbatch, start, self._now()))

    def _now(self) -> float:
        if self.device.type == "cuda":  # not the whole device: a posted receive may need what this rank has yet to send
            torch.cuda.current_stream(self.device).synchronize()
        return time.time()

    def _forward(self, step: _Step, action: Action) -> None:
        stage, m = chunk = action.stage, action.microbatch
        part = self.stages[stage]
        if step.work.enter is not None:
            step.work.enter(m)
        self.clock.set(step.work.moment(m))
        received = self._taken(step, "F", action) if stage > 0 else {}
        if torch.is_grad_enabled():
            found = step.found[chunk] = {}
            received |= {name: _Inlet.apply(self._anchor, received[name], name, found)
                         for name in self.returned[stage]}
        with part.precision.computing(), self._kept(step, chunk):
            result = part(received, step.work.batch(stage, m))
        if stage == self.last:
            loss, count = cast(tuple[Tensor, Tensor], result)
            if torch.is_grad_enabled():
                step.losses[chunk] = loss
            step.loss = loss.detach() if step.loss is None else step.loss + loss.detach()
            step.count = count if step.count is None else step.count + count
        else:
            made = cast(Boundary, result)
            if torch.is_grad_enabled():
                step.roots[chunk] = {name: get_gradient_edge(made[name]) for name in self.returned[stage + 1]}
            if self._is_here(stage + 1):
                step.local["F", stage + 1, m] = _detached(made)
            else:
                step.outputs[chunk] = _detached(made)
        step.most_held = max(step.most_held, len(step.found) + len(step.put_off))

    @contextmanager
    def _kept(self, step: _Step, chunk: Chunk) -> Iterator[None]:
        """Around a forward: note what autograd keeps where somebody wants to know it, and send it away if it is to go."""
        if not self._counts(step):
            yield
            return
        kept = ChunkActivations(self.activations, self.stages[chunk[0]].tensors())
        with kept.hooks():
            yield
        if chunk in self.residency.away:
            kept.leave()
            step.away[chunk] = kept
        else:
            kept.stay()

    def _counts(self, step: _Step) -> bool:
        """Whether the bytes of activations are counted."""
        return torch.is_grad_enabled() and (step.work.trace or bool(self.residency.away))

    def _backward(self, step: _Step, action: Action) -> None:
        if (action.stage, action.microbatch) in self.reducing:
            self.data.announce(action.stage)
        self._differentiate(step, action)
        self.weights.work_off()

    def _input_backward(self, step: _Step, action: Action) -> None:
        self.weights.split = True
        self._differentiate(step, action)
        self.weights.split = False
        waiting = step.put_off[action.stage, action.microbatch] = self.weights.take()
        if self._counts(step):
            step.noted[action.stage, action.microbatch] = self.activations.noted(waiting.tensors())

    def _weight_backward(self, step: _Step, action: Action) -> None:
        with self.stages[action.stage].precision.computing():
            step.put_off.pop((action.stage, action.microbatch)).work_off()
        step.noted.pop((action.stage, action.microbatch), None)

    def _differentiate(self, step: _Step, action: Action) -> None:
        stage, m = chunk = action.stage, action.microbatch
        self.clock.set(step.work.moment(m))
        if chunk in step.away:
            step.away.pop(chunk).need()
        outputs: list[Tensor] | list[GradientEdge]
        if stage == self.last:
            loss = step.losses.pop(chunk)
            outputs, gradients = [loss], [step.work.loss_gradient().to(loss.dtype)]
        else:
            made, wanted = step.roots.pop(chunk), self._taken(step, "B", action)
            outputs, gradients = list(made.values()), [wanted[name] for name in made]
        with self.stages[stage].precision.computing():
            torch.autograd.backward(outputs, gradients)
        found, carried = step.found.pop(chunk), self.boundaries[stage]
        if stage > 0:
            found |= {name: torch.zeros(carried[name].shape, dtype=carried[name].dtype, device=self.device)
                      for name in self.returned[stage] if name not in found}  # of what was used without gradients
            if self._is_here(stage - 1):
                step.local["B", stage - 1, m] = found
            else:
                step.gradients[chunk] = found

    def _reduce(self, step: _Step, action: Action) -> None:
        self.data.reduce(action.stage)

    def _send_output(self, step: _Step, action: Action) -> None:
        self._send(step, action, step.outputs.pop((action.stage, action.microbatch)), action.stage + 1, "F")

    def _send_gradient(self, step: _Step, action: Action) -> None:
        self._send(step, action, step.gradients.pop((action.stage, action.microbatch)), action.stage - 1, "B")

    def _post_input(self, step: _Step, action: Action) -> None:
        step.arriving["F", action.stage, action.microbatch] = self._receive(action.stage - 1, action.stage, "F")

    def _post_gradient(self, step: _Step, action: Action) -> None:
        step.arriving["B", action.stage, action.microbatch] = self._receive(action.stage + 1, action.stage, "B")

    def _is_here(self, stage: int) -> bool:
        return self.schedule.placement[stage] == self.rank

    def _taken(self, step: _Step, payload: Payload, action: Action) -> Boundary:
        """What another stage made for this computation, on this rank or another."""
        key = payload, action.stage, action.microbatch
        if key in step.local:
            return step.local.pop(key)
        taken = step.arriving.pop(key).wait()
        self._let_go(step, self.arrived.get(action, ()))
        return taken

    def _let_go(self, step: _Step, sends: Iterable[Action]) -> None:
        for send in sends:
            for work, _ in step.sending.pop(send, ()):
                work.wait()

    def _send(self, step: _Step, action: Action, tensors: Boundary, stage: int, payload: Payload) -> None:
        place = self.schedule.placement[stage]
        group = self.channels.groups[self.rank, place, payload]
        step.sending = {send: sent for send, sent in step.sending.items() if not all(work.is_completed() for work, _ in sent)}
        sending = step.sending[action] = []
        for name in self._carried(max(action.stage, stage), payload):
            tensor = tensors[name].detach().contiguous()
            tensor = tensor.cpu() if self.channels.through_host else tensor
            sending.append((_posted(dist.isend(tensor, self.channels.ranks[place], group=group)), tensor))

    def _carried(self, stage: int, payload: Payload) -> Mapping[str, Carried]:
        """What crosses to this stage, or the gradients that come back from it."""
        carried = self.boundaries[stage]
        return carried if payload == "F" else {name: carried[name] for name in self.returned[stage]}

    def _receive(self, stage: int, to: int, payload: Payload) -> _Arrival:
        place = self.schedule.placement[stage]
        group = self.channels.groups[place, self.rank, payload]
        device = torch.device("cpu") if self.channels.through_host else self.device
        buffers = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                   for name, tensor in self._carried(max(to, stage), payload).items()}
        works = [_posted(dist.irecv(buffer, self.channels.ranks[place], group=group)) for buffer in buffers.values()]
        return _Arrival(works, buffers, self.device)


def _detached(tensors: Boundary) -> Boundary:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _posted(work: Any) -> dist.Work:
    assert work is not None
    return cast(dist.Work, work)
