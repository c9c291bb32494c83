"""Facts that ranks exchange: JSON in tensors, so that nothing from the network is ever unpickled."""

import json
from typing import Any

import torch

from hpc_mp.train.parallel.collectives import from_first, known_to_all
from hpc_mp.train.parallel.groups import Tree


def gather(fact: Any, ranks: Tree) -> list[Any]:
    """Return the fact of every rank of the tree, by rank. All of its ranks call this. A fact must be JSON-serializable."""
    return [_decoded(text) for text in _texts(fact, ranks)]


def on_first(fact: Any, ranks: Tree) -> list[Any]:
    """Return every rank's fact on rank 0, as ``gather`` does. The other ranks call this too, get nothing and parse nothing."""
    texts = _texts(fact, ranks)
    return [_decoded(text) for text in texts] if ranks.rank == 0 else []


def largest(number: int, host: Tree) -> int:
    """Return the maximum of all ranks' numbers. All ranks call this."""
    return int(known_to_all(torch.tensor([number]), host).max())


def broadcast(fact: Any, host: Tree) -> Any:
    """Return rank 0's fact. All ranks call this; the facts of other ranks are ignored."""
    text = _encoded(fact) if host.rank == 0 else torch.empty(0, dtype=torch.uint8)
    size = int(from_first(torch.tensor([len(text)]), host))
    return _decoded(from_first(text if host.rank == 0 else torch.empty(size, dtype=torch.uint8), host))


def barrier(host: Tree) -> None:
    """Wait until every rank has called this."""
    largest(0, host)


def _texts(fact: Any, ranks: Tree) -> list[torch.Tensor]:
    """Return the encoded fact of every rank, by rank."""
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
