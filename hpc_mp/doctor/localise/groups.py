"""Groups of nodes that share a leaf, learnt from pairs that stay fast while a crowd is slow."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from hpc_mp.doctor.localise.fit import NEAR
from hpc_mp.doctor.localise.record import Floats, Ints, Pair, PairTable

LEARNT = 256  # up to so many nodes leaves are looked for: it takes about as many rounds as there are leaves

WITHIN = 1e6  # what makes a pair of one group the last choice


def relations(table: PairTable, residual: Floats, nodes: int) -> Floats:
    """Return for every two nodes how often they were fast in a crowd minus how often slow, (nodes, nodes)."""
    full = table.full
    one, other = table.one[full], table.other[full]
    fast = np.where(np.median(residual[full], axis=1) > -NEAR, 1.0, -1.0)
    score = np.zeros((nodes, nodes))
    np.add.at(score, (one, other), fast)
    return score + score.T


def clusters(score: Floats) -> Ints:
    """Return the group of every node (−1: none) by repeatedly joining the two groups that are most often fast together."""
    nodes = len(score)
    group = np.arange(nodes)
    total, tests = score.copy(), np.abs(score)

    def mean(sums: Floats, counts: Floats) -> Floats:
        return np.where(counts > 0, sums / np.maximum(counts, 1) + 1e-6 * sums, -1.0)

    near = mean(total, tests)
    while True:
        one, other = divmod(int(np.argmax(near)), nodes)
        if near[one, other] <= 0:
            break
        group[group == other] = one
        for matrix in (total, tests):
            matrix[one] += matrix[other]
            matrix[:, one] = matrix[one]
            matrix[one, one] = 0
        near[one] = near[:, one] = np.where(near[one] == -2, -2, mean(total[one], tests[one]))
        near[other] = near[:, other] = -2
    counts = np.bincount(group, minlength=nodes)[group]
    # A group of most nodes would leave no crowd: it is an error, which occurs if uplinks are only slightly oversubscribed.
    return np.where((counts > 1) & (2 * counts <= nodes), group, -1)


def seeking(nodes: Sequence[int], group: Ints, score: Floats, random: Random) -> list[Pair]:
    """Return pairs of all nodes, preferably of two groups with the least evidence for or against a common leaf."""
    label = np.unique(np.where(group < 0, -1 - np.arange(len(group)), group), return_inverse=True)[1]
    member = np.eye(int(label.max()) + 1)[label]
    evidence = (member.T @ np.abs(score) @ member)[label][:, label]
    ties = np.random.default_rng(random.randrange(2**32)).random(evidence.shape)
    cost = evidence + np.where(label[:, None] == label, WITHIN, 0) + ties
    free = np.zeros(len(group), dtype=bool)
    free[list(nodes)] = True
    pairs = []
    for node in sorted(nodes, key=lambda node: float(cost[node][free].min())):
        if free[node]:
            free[node] = False
            if free.any():
                partner = int(np.argmin(np.where(free, cost[node], np.inf)))
                free[partner] = False
                pairs.append((node, partner))
    _separate(pairs, label)
    return [(min(pair), max(pair)) for pair in pairs]


def _separate(pairs: list[Pair], label: Ints) -> None:
    """Swap partners so that no pair is within one group, if possible."""
    for index, (one, other) in enumerate(pairs):
        if label[one] == label[other]:
            for swap, (a, b) in enumerate(pairs):
                if label[one] not in (label[a], label[b]):
                    pairs[index], pairs[swap] = (one, a), (other, b)
                    break
