"""Messages between the stages of a pipeline: a rank sends them, receives them, or hands them to another stage of its own.

A receive is posted where the schedule says, and its consumer waits for it. On a GPU it is posted in a stream that does not wait
for the computations launched so far, so that it is in flight while they run. A sent tensor is kept until its
arrival is known: from the schedule (``layout/schedule/arrivals.py``), from NCCL, which often reports it earlier, or at the latest
at the end of the step. gloo reports no arrival. Every pair of ranks has a communicator for each direction and payload, so that a
message waits only for earlier ones of its kind between the same two ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_mp.layout.schedule import Action, Schedule, arrivals
from hpc_mp.layout.schedule.actions import Message, consumed, produced
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.pipeline.stage import Boundary, Carried


class Messages:
    """Messages of a rank during a step. ``boundaries``: the tensors that each stage receives from the one before, for one
    microbatch. ``device``: of the rank's stages."""

    def __init__(self, schedule: Schedule, groups: Groups, boundaries: Sequence[Mapping[str, Carried]],
                 device: torch.device) -> None:
        self._placement, self._channels, self._rank = schedule.placement, groups.channels, groups.pipeline
        self._boundaries, self._device = boundaries, device
        self._message_device = torch.device("cpu") if groups.channels.through_host else device
        self._stream = torch.cuda.Stream(device) if self._message_device.type == "cuda" else None
        self._proofs = arrivals(schedule, groups.pipeline)
        own, stages = schedule.ranks[groups.pipeline], schedule.stages
        self._consumed, self._produced = ({action: of(action, stages) for action in own} for of in (consumed, produced))
        self.begin()

    def begin(self) -> None:
        """Begin a step without messages."""
        self._ready: dict[Message | None, Boundary] = {}  # to be sent, or to be consumed
        self._arriving: dict[Message, tuple[list[dist.Work], Boundary]] = {}
        self._sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}

    def put(self, action: Action, tensors: Boundary) -> None:
        """Hand in the tensors that a computation has made for the neighbouring stage."""
        self._ready[self._produced[action]] = tensors

    def take(self, action: Action) -> Boundary:
        """Return the tensors that a computation needs from the neighbouring stage, on the device. The current stream waits."""
        self.arrive(action)
        return self._ready.pop(self._consumed[action])

    def send(self, action: Action) -> None:
        """Begin to send the message of a SEND."""
        message = cast(Message, self._produced[action])
        tensors, receiver = self._ready.pop(message), self._placement[message.receiver]
        group = self._channels.groups[self._rank, receiver, message.payload]
        self._sending = {send: sent for send, sent in self._sending.items() if not all(work.is_completed() for work, _ in sent)}
        sending = self._sending[action] = []
        for name in self._carried(message):
            tensor = tensors[name].contiguous().to(self._message_device)
            work = dist.isend(tensor, self._channels.ranks[receiver], group=group)
            sending.append((cast(dist.Work, work), tensor))

    def receive(self, action: Action) -> None:
        """Post the receive of a RECV."""
        message = cast(Message, self._consumed[action])
        sender = self._placement[message.sender]
        group = self._channels.groups[sender, self._rank, message.payload]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            buffers = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._message_device)
                       for name, tensor in self._carried(message).items()}
            works = [dist.irecv(buffer, self._channels.ranks[sender], group=group) for buffer in buffers.values()]
        self._arriving[message] = cast(list[dist.Work], works), buffers

    def awaited(self, action: Action) -> Message | None:
        """Return the message that a computation waits for; None if it needs none, or has it already."""
        message = self._consumed[action]
        return message if message in self._arriving else None

    def arrive(self, action: Action) -> None:
        """Wait for the message of a computation, if another rank sends it, and let go of messages whose arrival it proves."""
        if (message := self.awaited(action)) is None:
            return
        works, buffers = self._arriving.pop(message)
        for work in works:
            work.wait()
        for buffer in buffers.values() if self._stream is not None else ():
            buffer.record_stream(torch.cuda.current_stream(self._device))  # its memory belongs to the stream of receives
        self._ready[message] = {name: buffer.to(self._device) for name, buffer in buffers.items()}
        self._let_go(self._proofs.get(action, ()))

    def finish(self) -> None:
        """Wait for the arrival of everything that has been sent."""
        self._let_go(tuple(self._sending))

    def _let_go(self, sends: Iterable[Action]) -> None:
        for send in sends:
            for work, _ in self._sending.pop(send, ()):
                work.wait()

    def _carried(self, message: Message) -> Mapping[str, Carried]:
        """Return the tensors of a message: those that cross to a stage, or the gradients that come back from it."""
        carried = self._boundaries[max(message.sender, message.receiver)]
        return {name: tensor for name, tensor in carried.items() if message.payload == "F" or tensor.differentiable}
