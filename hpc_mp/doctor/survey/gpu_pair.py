"""Bandwidth between one GPU of each of two nodes, in both directions, over NCCL.

``python -m hpc_mp.doctor.survey.gpu_pair '{"side": 0, "address": …}'``, one process per GPU on either node. The result is one
line of JSON on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Parameters that both processes share, except ``side``.

    Attributes:
        side: 0 sends first and holds the store.
        address, port: address and port of the store.
        gpu: index of the device.
        backend: "nccl", or "gloo" between CPUs.
        size: bytes of a message.
        messages: number of timed messages in each direction.
        patience: timeout in seconds.
    """

    side: int
    address: str
    port: int
    gpu: int
    backend: str
    size: int
    messages: int
    patience: float


def measure(spec: PairSpec) -> tuple[float, float]:
    """Return bytes per second from side 0 to side 1, and from side 1 to side 0."""
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=spec.patience)
    device = torch.device("cuda", spec.gpu) if spec.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(spec.address, spec.port, 2, spec.side == 0, patience)
    dist.init_process_group(spec.backend, store=store, rank=spec.side, world_size=2, timeout=patience)
    buffer = torch.zeros(spec.size, dtype=torch.uint8, device=device)

    def pass_on(sender: int, count: int) -> None:
        for _ in range(count):
            if spec.side == sender:
                dist.send(buffer, 1 - sender)
            else:
                dist.recv(buffer, sender)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def rate(sender: int) -> float:
        pass_on(sender, WARM_UPS)
        dist.barrier()
        begin = time.monotonic()
        pass_on(sender, spec.messages)
        dist.barrier()
        return spec.messages * spec.size / (time.monotonic() - begin)

    rates = rate(0), rate(1)
    dist.destroy_process_group()
    return rates


if __name__ == "__main__":
    print(json.dumps(measure(PairSpec(**json.loads(sys.argv[1])))))
