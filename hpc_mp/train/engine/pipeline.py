"""The pipeline driver: it executes one rank's action list of a schedule, whatever the schedule is.

Receives are posted where the schedule says (one compute action ahead) and waited for by their consumer; sends are
never waited for before the end of the step. Activations and gradients travel in separate process groups, so that the
order of messages between two ranks is the order of each direction alone, and no receive of one direction stands before
a send of the other in one NCCL stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_mp.layout.schedule import Action
from hpc_mp.train.engine.stage import Stage
from hpc_mp.train.engine.zero import DataAxis

Span = tuple[str, int, int, float, float]  # kind, stage, microbatch, start, end (unix seconds)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Point-to-point partners along the pipeline. ``ranks``: global rank of every stage."""

    ranks: tuple[int, ...]
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    through_host: bool  # gloo moves CPU tensors only


@dataclass(slots=True)
class _Arrival:
    """A posted receive. gloo waits for a second message when a receive is waited for twice, hence ``arrived``."""

    work: dist.Work
    buffer: Tensor
    wanted_on: torch.device
    arrived: bool = False

    def wait(self) -> Tensor:
        if not self.arrived:
            self.work.wait()
            self.arrived = True
        return self.buffer.to(self.wanted_on)


@dataclass(slots=True)
class _Step:
    """What lives during one optimizer step."""

    batch: Callable[[int], tuple[Tensor | None, Tensor | None]]
    enter: Callable[[int], None]
    loss_scale: Callable[[], float]
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    arriving: dict[tuple[str, int], _Arrival] = field(default_factory=dict)
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None
    spans: list[Span] = field(default_factory=list)


class Pipeline:
    """Runs optimizer steps' forward and backward passes of one stage.

    Args:
        stage, data: the stage and its data axis.
        actions: this rank's list of a validated schedule.
        shape: of a microbatch's hidden states, (batch, sequence, hidden).
        dtype, device: of hidden states.
    """

    def __init__(
        self, stage: Stage, data: DataAxis, actions: Sequence[Action], neighbours: Neighbours, shape: tuple[int, int, int],
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.stage, self.data, self.actions, self.neighbours = stage, data, actions, neighbours
        self.shape, self.dtype, self.device = shape, dtype, device
        self.reducing = {action.microbatch for action in actions if action.kind == "REDUCE"}
        self.last = [action.microbatch for action in actions if action.kind == "B"][-1]
        self.perform: dict[str, Callable[[_Step, Action], None]] = {
            "F": self._forward, "B": self._backward, "REDUCE": self._reduce,
            "SEND_F": self._send_output, "RECV_F": self._post_input,
            "SEND_B": self._send_input_gradient, "RECV_B": self._post_output_gradient,
        }

    def run(
        self, batch: Callable[[int], tuple[Tensor | None, Tensor | None]], enter: Callable[[int], None],
        loss_scale: Callable[[], float], trace: bool = False,
    ) -> tuple[Tensor, list[Span]]:
        """One step: all forwards and backwards. Gradients are summed over the data axis when it returns.

        Args:
            batch: microbatch -> (ids or None, labels or None) on the device, as this stage needs them.
            enter: called with the microbatch before its forward (sets the dropout clock).
            loss_scale: gives the gradient of the loss, 1 / tokens of the global batch; called at backwards of the last stage.
            trace: record when each action ran (the host waits for the computing stream around it).

        Returns:
            The summed cross entropy of this rank's microbatches (a float64 scalar; zero but on the last stage), and spans.
        """
        step = _Step(batch, enter, loss_scale)
        for action in self.actions:
            if trace:
                self._traced(step, action)
            else:
                self.perform[action.kind](step, action)
        for work, _ in step.sending:
            work.wait()
        loss = torch.zeros((), device=self.device) if step.loss is None else step.loss
        return loss.double(), step.spans

    def _traced(self, step: _Step, action: Action) -> None:
        """Waiting for a message is recorded as its receive, so that computing and waiting can be told apart."""
        awaited = {"F": "RECV_F", "B": "RECV_B"}.get(action.kind)
        if awaited is not None and (awaited, action.microbatch) in step.arriving:
            start = self._now()
            step.arriving[awaited, action.microbatch].wait()
            step.spans.append((awaited, action.stage, action.microbatch, start, self._now()))
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
        m = action.microbatch
        ids, labels = step.batch(m)
        step.enter(m)
        if self.stage.part.first:
            assert ids is not None
            x = ids
        else:
            x = step.arriving.pop(("RECV_F", m)).wait().requires_grad_()
            step.inputs[m] = x
        output = self.stage(x, labels) if self.stage.part.last else self.stage(x)
        step.outputs[m] = output
        if self.stage.part.last:
            loss = output.detach()
            step.loss = loss if step.loss is None else step.loss + loss

    def _backward(self, step: _Step, action: Action) -> None:
        m = action.microbatch
        output = step.outputs.pop(m)
        if self.stage.part.last:
            gradient = torch.full_like(output, step.loss_scale())
        else:
            gradient = step.arriving.pop(("RECV_B", m)).wait()
        self.data.before_backward(reduce=m in self.reducing, last=m == self.last)
        torch.autograd.backward(output, gradient)
        if not self.stage.part.first:
            received = step.inputs.pop(m)
            assert received.grad is not None
            step.input_gradients[m] = received.grad

    def _reduce(self, step: _Step, action: Action) -> None:
        self.data.reduce()

    def _send_output(self, step: _Step, action: Action) -> None:
        self._send(step, step.outputs[action.microbatch].detach(), action.stage + 1, self.neighbours.forward)

    def _send_input_gradient(self, step: _Step, action: Action) -> None:
        self._send(step, step.input_gradients.pop(action.microbatch), action.stage - 1, self.neighbours.backward)

    def _post_input(self, step: _Step, action: Action) -> None:
        step.arriving["RECV_F", action.microbatch] = self._receive(action.stage - 1, self.neighbours.forward)

    def _post_output_gradient(self, step: _Step, action: Action) -> None:
        step.arriving["RECV_B", action.microbatch] = self._receive(action.stage + 1, self.neighbours.backward)

    def _send(self, step: _Step, tensor: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        tensor = tensor.contiguous()
        if self.neighbours.through_host:
            tensor = tensor.cpu()
        work = dist.isend(tensor, self.neighbours.ranks[stage], group=group)
        assert work is not None
        step.sending = [(w, t) for w, t in step.sending if not w.is_completed()]
        step.sending.append((work, tensor))

    def _receive(self, stage: int, group: dist.ProcessGroup | None) -> _Arrival:
        device = torch.device("cpu") if self.neighbours.through_host else self.device
        buffer = torch.empty(self.shape, dtype=self.dtype, device=device)
        work = dist.irecv(buffer, self.neighbours.ranks[stage], group=group)
        assert work is not None
        return _Arrival(work, buffer, self.device)
