"""Health of uplinks, from rates under full load; and groups of nodes that share a leaf, learnt from pairs that stay fast while a
crowd is slow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from random import Random

import numpy as np

from hpc_mp.doctor.localise.fit import NEAR, DecisionRule, Health, judge, level, medians, nothing, scatter, shifts
from hpc_mp.doctor.localise.record import Bools, ClusterLayout, Floats, Ints, Pair, PairTable

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


CROWDED = 0.25  # share of slow pairs from which on crowds are called slow
EARLY = 6  # full rounds of random pairs by which that is told; later ones may be made of chosen pairs
LUCK = 3.0  # what one fast sample can add under load: a slow uplink is fast when few of its nodes happen to use it
LOADED = 0.75  # share of a leaf's nodes that must talk to others for its uplink to count as loaded


@dataclass(frozen=True, slots=True)
class Load:
    """The state under full load."""

    health: Health  # health of leaves if they are known, else of the uplink behind each node
    table: PairTable  # the rows on which the health is based
    tapered: bool  # True if healthy pairs are slower under full load than undisturbed
    group: Ints  # if leaves are unknown, group of every node: nodes of one group (≥ 0) were fast together while a crowd was slow
    score: Floats


def of_leaves(table: PairTable, cluster: ClusterLayout, leaf: Ints, base: float, node: Health, rule: DecisionRule) -> Load:
    """Judge leaves under full load: one row per pair of leaves and round, the median over their flows."""
    table = table.take(table.full & (leaf[table.one] != leaf[table.other]))
    leaves, rails = len(cluster.leaf_names), cluster.rails
    sizes = np.bincount(leaf, minlength=leaves)
    first, second = np.sort([leaf[table.one], leaf[table.other]], axis=0)
    keys, group = np.unique(table.round * leaves**2 + first * leaves + second, return_inverse=True)
    flows = np.bincount(group, minlength=len(keys))
    cleared = node.healthy[table.one] & node.healthy[table.other]
    where = group[:, None] * rails + np.arange(rails)
    typical = medians(where[cleared], table.rate[cleared], len(keys) * rails).reshape(-1, rails)
    total = np.bincount(where.ravel(), np.exp(table.rate).ravel(), minlength=len(keys) * rails).reshape(-1, rails)
    every = np.ones(len(keys), dtype=bool)
    rows = PairTable(keys // leaves**2, keys // leaves % leaves, keys % leaves, every, every,
                 np.zeros((len(keys), 2), dtype=bool), typical)
    measured = ~np.isnan(typical).any(axis=1)
    judging = measured & (flows >= LOADED * np.maximum(sizes[rows.one], sizes[rows.other]))
    if not judging.any():
        return Load(nothing(leaves, rails), rows.take(~every), False, leaf, np.zeros((0, 0)))
    log_flows = np.log(flows)[:, None]
    usual = level(typical[judging].ravel()) if leaves > 2 else base
    tapered = usual < base - NEAR
    carried = level((typical + log_flows)[judging].ravel())  # throughput of a healthy uplink, log GB/s per rail
    due = np.minimum(base, carried - log_flows) if tapered else np.full((len(keys), 1), usual)
    residual = typical - due
    # Bad nodes leave the others a larger share of a slow uplink: then the total rate is used.
    residual = np.where(residual < -NEAR / 2, np.minimum(residual, np.log(total) - log_flows - due), residual)

    def judged(which: Bools) -> Health:
        values = residual[which]
        noise = max(scatter(values[np.abs(values) < NEAR]), rule.least_noise)
        return judge(rows.take(which), values, np.full((len(values), 1), noise), leaves, rule)

    health = judged(judging)
    larger = np.where(sizes[rows.one] > sizes[rows.other], rows.one, rows.other)
    # A leaf that is too small to load its partner is judged only with healthy partners.
    small = measured & ~judging & health.healthy[larger].all(axis=1)
    if small.any():
        judging |= small
        health = judged(judging)
    return Load(health, rows.take(judging), tapered, leaf, np.zeros((0, 0)))


def of_nodes(table: PairTable, cluster: ClusterLayout, base: float, rule: DecisionRule) -> Load:
    """Judge nodes under full load, relative to pairs of healthy leaves under the same load."""
    table = table.take(table.full)
    table = replace(table, alone=np.ones(len(table.one), dtype=bool))
    group, score = np.full(cluster.size, -1), np.zeros((0, 0))
    if not len(table.one):
        return Load(nothing(cluster.size, cluster.rails), table, False, group, score)
    raw = table.rate - base
    tapered = _slow_crowd(table, (raw < -NEAR).mean(axis=1), cluster.size)
    if tapered and cluster.size <= LEARNT:
        score = relations(table, raw, cluster.size)
        group = clusters(score)
    if tapered:
        ends = _crossing(table, group)
        crossing = ends.max(axis=1)
        apart = (group[table.one] != group[table.other]) | (group[table.one] < 0)
        loaded = apart & (crossing > LOADED) & (np.median(raw, axis=1) < -NEAR)
        usual = level((table.rate + np.log(crossing)[:, None])[loaded].ravel(), 0.8) if loaded.any() else base
        raw = table.rate - np.minimum(base, usual - np.log(crossing)[:, None]) + _larger(table, group)[:, None]
    counts = None if tapered else _most_loaded(table, cluster.size)
    near = np.abs(raw) < 2 * NEAR
    sound = near
    for _ in range(3):
        shift, _ = shifts(table, raw, sound)
        residual = raw - shift[:, None]
        noise = max(scatter(residual[sound]), rule.least_noise)
        health = judge(table, residual, np.full((len(raw), 1), noise), cluster.size, replace(rule, largest=LUCK), counts=counts)
        sound = near & health.healthy[table.one] & health.healthy[table.other]
    if (group >= 0).any():
        health = _pooled(table, health, group, ends, rule)
    return Load(health, table, tapered, group, score)


def _slow_crowd(table: PairTable, slow: Floats, nodes: int) -> bool:
    """Return True if many pairs are slow even among the least often slow nodes: bad uplinks would leave some nodes fast."""
    early = table.round <= np.unique(table.round)[:EARLY][-1]
    ends = np.concatenate([table.one[early], table.other[early]])
    count = np.maximum(np.bincount(ends, minlength=nodes), 1)
    often = np.bincount(ends, np.concatenate([slow[early], slow[early]]), minlength=nodes) / count
    best = often <= np.median(often[np.unique(ends)])
    among = early & best[table.one] & best[table.other]
    return bool(among.any() and slow[among].mean() > CROWDED)


def _crossing(table: PairTable, group: Ints) -> Floats:
    """Return by row and end the fraction of the end's group that talks to other groups in this round; 1 without a group."""
    rounds, groups = int(table.round.max()) + 1, int(group.max()) + 1
    out = group[table.one] != group[table.other]
    count, cross = np.zeros((2, max(1, groups) * rounds))
    for end in (table.one, table.other):
        rows = group[end] >= 0
        where = group[end][rows] * rounds + table.round[rows]
        count += np.bincount(where, minlength=len(count))
        cross += np.bincount(where, out[rows], minlength=len(cross))
    share = np.maximum(cross / np.maximum(count, 1), 1 / len(group))
    return np.stack([np.where(group[end] >= 0, share[np.maximum(group[end], 0) * rounds + table.round], 1.0)
                     for end in (table.one, table.other)], axis=1)


def _larger(table: PairTable, group: Ints) -> Floats:
    """Return by row how much less its nodes get because their group is larger than usual, as a log factor."""
    sizes = np.bincount(group[group >= 0], minlength=1)
    more = np.log(np.clip(sizes / np.median(sizes[sizes > 0]), 1, 1.2)) if sizes.any() else np.zeros(1)
    factor = np.where(group >= 0, more[np.maximum(group, 0)], 0)
    return np.maximum(factor[table.one], factor[table.other])


def _most_loaded(table: PairTable, nodes: int) -> Bools:
    """Return which ends a fast row clears, (rows, 2). For ends under aimed load, only rows with half of its maximum do."""
    sizes = np.bincount(table.round, table.aimed.sum(axis=1), minlength=int(table.round.max()) + 1)[table.round]
    largest = np.zeros(nodes)
    ends = np.stack([table.one, table.other], axis=1)
    for side in (0, 1):
        np.maximum.at(largest, ends[:, side], sizes * table.aimed[:, side])
    return np.where(largest[ends] > 0, table.aimed & (sizes[:, None] >= largest[ends] / 2), True)


def _pooled(table: PairTable, health: Health, group: Ints, crossing: Floats, rule: DecisionRule) -> Health:
    """Pool the evidence of nodes that share a leaf: by round, the median of nodes that talk to other groups. A row counts only if
    most of the group talked to others in that round and the partner's leaf was not loaded more."""
    rails = health.residual.shape[1]
    rounds = int(table.round.max()) + 1
    groups = int(group.max()) + 1
    slow = np.zeros((groups, rails), dtype=bool)
    for _ in range(2):
        which, value = [], []
        for side, (mine, others) in enumerate(((table.one, table.other), (table.other, table.one))):
            share = crossing[:, side]
            loaded = (share >= LOADED) & (share >= 0.9 * crossing[:, 1 - side])
            fair = loaded[:, None] & ~((group[others] >= 0)[:, None] & slow[group[others]])
            rows = ((group[mine] >= 0) & (group[mine] != group[others]))[:, None] & fair
            where = (group[mine] * rounds + table.round)[:, None] * rails + np.arange(rails)
            which.append(where[rows])
            value.append(health.residual[rows])
        middle = medians(np.concatenate(which), np.concatenate(value), groups * rounds * rails).reshape(groups, rounds, rails)
        at, rail = np.nonzero(np.isfinite(middle).any(axis=1))
        typical = np.zeros((groups, rails))
        typical[at, rail] = np.nanmedian(middle[at, :, rail], axis=1)
        slow = typical < -NEAR / 2
    spread = (middle - typical[:, None])[np.isfinite(middle)]
    noise = max(scatter(spread), rule.least_noise)
    mild = log(rule.bad)
    ratio = np.clip(mild * (mild - 2 * middle) / (2 * noise**2), -rule.largest, rule.largest)
    evidence = np.where(group[:, None] >= 0, np.nansum(ratio, axis=1)[group], health.evidence)
    return replace(health, evidence=evidence, healthy=evidence >= rule.clear, bad=evidence <= -rule.convict,
                   settled=evidence <= -rule.convict)
