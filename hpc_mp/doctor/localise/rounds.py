"""Schedules of rounds of disjoint pairs."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, log2
from random import Random

from hpc_mp.doctor.localise.record import Ints, Pair, Round

ALL_PAIRS = 16  # up to so many nodes every pair is measured


def most_rounds(nodes: int) -> int:
    """Return the maximum number of rounds of the first pass."""
    return floor(2 * log2(nodes) + 6)


def light(nodes: int) -> int:
    """Return how many pairs may talk at the same time without filling an uplink oversubscribed up to about 4:1."""
    return max(1, nodes // 16)


def circle(members: Sequence[int], turn: int) -> tuple[list[Pair], int | None]:
    """Return round ``turn`` of a round robin (all pairs of m members in m−1 rounds, m if odd), and the unpaired member."""
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    turn %= max(1, len(seats) - 1)
    seats = seats[:1] + seats[1 + turn:] + seats[1: 1 + turn]
    pairs, unpaired = [], None
    for one, other in zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2:]), strict=True):
        if one is None or other is None:
            unpaired = other if one is None else one
        else:
            pairs.append(ordered(one, other))
    return pairs, unpaired


def ordered(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def all_crowded(pairs: Sequence[Pair], aimed: Sequence[int] = ()) -> Round:
    """Return a full round of pairs whose paths are unknown."""
    return Round(tuple(pairs), (len(pairs) == 1,) * len(pairs), True, frozenset(aimed))


def matching(nodes: Sequence[int], random: Random) -> list[Pair]:
    """Return random pairs of all nodes."""
    order = random.sample(nodes, len(nodes))
    return [ordered(*pair) for pair in zip(order[::2], order[1::2], strict=False)]


def everybody(members: Sequence[int]) -> Iterator[Round]:
    """Yield rounds of all pairs, up to three times, within the limit of the first pass."""
    limit = most_rounds(len(members))
    cycle = len(members) - 1 + len(members) % 2
    for turn in range(min(limit, cycle * max(1, min(3, limit // cycle)))):
        yield all_crowded(circle(members, turn)[0])


def inside(leaves: Sequence[Sequence[int]], leaf: Ints, turn: int) -> Round:
    """Pair every node with one of its own leaf. Unpaired nodes, at most one per leaf, are paired across leaves."""
    pairs, unpaired = [], []
    for members in leaves:
        paired, alone = circle(members, turn)
        pairs += paired
        unpaired += [] if alone is None else [alone]
    unpaired = unpaired[turn % max(1, len(unpaired)):] + unpaired[: turn % max(1, len(unpaired))]
    pairs += [ordered(*pair) for pair in zip(unpaired[::2], unpaired[1::2], strict=False)]
    return Round(tuple(pairs), tuple(bool(leaf[a] == leaf[b]) for a, b in pairs))


def across(leaves: Sequence[Sequence[int]], leaf: Ints, couples: Sequence[Pair], turn: int) -> Round:
    """Pair the nodes of each couple of leaves with each other. Nodes without a partner are paired inside their leaf."""
    pairs: list[Pair] = []
    remaining = {index: list(members) for index, members in enumerate(leaves)}
    for a, b in couples:
        small, large = sorted((remaining[a], remaining[b]), key=len)
        if small:
            shift = turn % len(large)
            turned = large[shift:] + large[:shift]
            pairs += [ordered(*pair) for pair in zip(small, turned, strict=False)]
            remaining[a], remaining[b] = [], turned[len(small):]
    for members in remaining.values():
        pairs += circle(members, turn)[0]
    return Round(tuple(pairs), tuple(bool(leaf[a] == leaf[b]) for a, b in pairs), full=True)


def known(leaves: Sequence[Sequence[int]], leaf: Ints) -> Iterator[Round]:
    """Yield the first pass for known leaves: rounds inside leaves test nodes, rounds between whole leaves test uplinks."""
    nodes = sum(map(len, leaves))
    limit = most_rounds(nodes)
    longest = max(map(len, leaves))
    inner = longest - 1 + longest % 2
    turns = max(1, len(leaves) - 1 + len(leaves) % 2) if len(leaves) > 1 else 0
    if nodes <= ALL_PAIRS:
        cycle = [(True, turn) for turn in range(inner)] + [(False, turn) for turn in range(turns * longest)]
        plan = cycle * max(1, min(3, limit // max(1, len(cycle))))
    else:
        insides, crossings = ceil(log2(nodes)) + 2, ceil(log2(nodes)) if turns else 0
        plan = [step for turn in range(insides) for step in ((True, turn), (False, turn))[: 1 + (turn < crossings)]]
    for within, turn in plan[:limit]:
        if within:
            yield inside(leaves, leaf, turn)
        else:
            couples, _ = circle(range(len(leaves)), turn)
            yield across(leaves, leaf, couples, turn // max(1, turns))


def neighbours(ranked: Sequence[int], turn: int, block: int = 16) -> list[Pair]:
    """Return pairs of nodes that are near in ``ranked``: a round robin in blocks, which are shifted by half in odd turns."""
    start = block // 2 if turn % 2 and len(ranked) > block else 0
    edges = sorted({0, *range(start, len(ranked), block), len(ranked)})
    return [pair for low, high in pairwise(edges) for pair in circle(ranked[low:high], turn)[0]]


def couples_of(nodes: Sequence[int], partners: Sequence[int], random: Random) -> list[Pair]:
    """Pair each of ``nodes`` with a random one of ``partners``, until either is used up."""
    return [ordered(*pair) for pair in zip(nodes, random.sample(partners, min(len(nodes), len(partners))), strict=False)]


def disjoint(pairs: Sequence[Pair]) -> list[Pair]:
    """Choose pairs in order, skipping those that share a node with an earlier choice."""
    used: set[int] = set()
    chosen = []
    for pair in pairs:
        if not used & {*pair}:
            chosen.append(pair)
            used |= {*pair}
    return chosen
