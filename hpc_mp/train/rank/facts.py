"""Facts that ranks tell each other: JSON in tensors, so that nothing that came over a network is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather(fact: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The fact of every rank of the group (default: of all), by rank. All of them call this; a fact is what JSON can hold."""
    mine = _encoded(fact)
    device = _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    most = max(int(size) for size in sizes)
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[:len(mine)] = mine.to(device)
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    return [_decoded(text[:int(size)]) for text, size in zip(everyone, sizes, strict=True)]


def broadcast(fact: Any) -> Any:
    """Rank 0's fact. All ranks call this; what the others give is not looked at."""
    device = _device(None)
    text = _encoded(fact).to(device) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, 0)
    return _decoded(text)


def _encoded(fact: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for the group's messages: on the host, where its back end moves them there."""
    backend = dist.get_backend_config(group)
    return torch.device("cpu") if "gloo" in backend else torch.device("cuda", torch.cuda.current_device())
