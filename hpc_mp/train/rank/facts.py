"""Facts that ranks tell each other: JSON in tensors, so that nothing that came over a network is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from hpc_mp.train.engine.collectives import from_first, known_to_all
from hpc_mp.train.engine.groups import Tree


def gather(fact: Any, ranks: Tree) -> list[Any]:
    """The fact of every rank of the tree, by rank. All of them call this; a fact is what JSON can hold."""
    return [_decoded(text) for text in _texts(fact, ranks)]


def on_first(fact: Any, ranks: Tree) -> list[Any]:
    """As ``gather`` on rank 0; the others, which all call this too, get nothing and need not read what all have said."""
    texts = _texts(fact, ranks)
    return [_decoded(text) for text in texts] if ranks.rank == 0 else []


def largest(number: int, host: Tree) -> int:
    """Of all ranks' numbers. All of them call this."""
    return int(known_to_all(torch.tensor([number]), host).max())


def broadcast(fact: Any, host: Tree) -> Any:
    """Rank 0's fact. All ranks call this; what the others give is not looked at."""
    text = _encoded(fact) if host.rank == 0 else torch.empty(0, dtype=torch.uint8)
    size = int(from_first(torch.tensor([len(text)]), host))
    return _decoded(from_first(text if host.rank == 0 else torch.empty(size, dtype=torch.uint8), host))


def barrier(host: Tree) -> None:
    """Every rank has come here."""
    largest(0, host)


def _texts(fact: Any, ranks: Tree) -> list[torch.Tensor]:
    """The fact of every rank, by rank, as it was sent."""
    mine = _encoded(fact)
    device = torch.device("cpu") if ranks.through_host else torch.device("cuda", torch.cuda.current_device())
    sizes = known_to_all(torch.tensor([len(mine)], device=device), ranks).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[:len(mine)] = mine.to(device)
    return [text[:size] for text, size in zip(known_to_all(padded, ranks), sizes, strict=True)]


def _encoded(fact: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()))
