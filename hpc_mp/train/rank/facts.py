"""Facts that ranks tell each other: JSON in tensors, so that nothing that came over a network is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.train.engine.collectives import known_to_all
from hpc_mp.train.engine.groups import Axis, world


def gather(fact: Any, axis: Axis | None = None) -> list[Any]:
    """The fact of every rank of the axis (default: of all), by rank. All of them call this; a fact is what JSON can hold."""
    axis = axis or world()
    mine = _encoded(fact)
    device = torch.device("cpu") if axis.through_host else torch.device("cuda", torch.cuda.current_device())
    sizes = known_to_all(torch.tensor([len(mine)], device=device), axis).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[:len(mine)] = mine.to(device)
    return [_decoded(text[:size]) for text, size in zip(known_to_all(padded, axis), sizes, strict=True)]


def largest(number: int) -> int:
    """Of all ranks' numbers. All of them call this."""
    return int(known_to_all(torch.tensor([number]), world()).max())


def broadcast(fact: Any) -> Any:
    """Rank 0's fact. All ranks call this; what the others give is not looked at."""
    text = _encoded(fact) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return _decoded(text)


def _encoded(fact: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()))
