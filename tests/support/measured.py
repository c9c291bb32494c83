"""Synthetic rates between nodes, as a survey would measure them, for given leaves."""

from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random

from hpc_mp.cluster.bandwidth import LinkRates

Groups = Sequence[Sequence[str]]
FAST, NOISE = 25.0, 0.05


def measure(groups: Groups, across: float = 0.5, rounds: int | None = None, seed: int = 0,
            change: Callable[[str, str, float], float] = lambda _a, _b, rate: rate) -> LinkRates:
    """Return rates between nodes; between leaves they are ``across`` times those inside. Pairs are all, or from random rounds."""
    random = Random(seed)
    of = {node: number for number, nodes in enumerate(groups) for node in nodes}
    nodes = tuple(of)
    pairs = set(combinations(range(len(nodes)), 2)) if rounds is None else set()
    for _ in range(rounds or 0):
        order = random.sample(range(len(nodes)), len(nodes))
        pairs |= {(min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=False)}
    rates = []
    for a, b in sorted(pairs):
        rate = FAST * (1.0 if of[nodes[a]] == of[nodes[b]] else across) * random.uniform(1 - NOISE, 1 + NOISE)
        rates.append((a, b, change(nodes[a], nodes[b], rate)))
    return LinkRates("lab", 0.0, nodes, tuple(rates))


def leaves(*sizes: int) -> list[list[str]]:
    numbers = iter(range(1, 10_000))
    return [[f"n{next(numbers)}" for _ in range(size)] for size in sizes]
