"""Analysis of the log of rounds: health of nodes by themselves, and of their uplinks under load; pairs that do not answer, and
pairs that are slow although both ends are healthy. It is the knowledge from which the next rounds follow."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isqrt, log
from random import Random

import numpy as np

from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.fit import NEAR, DecisionRule, Health, judge, level, scatter, shifts
from hpc_mp.doctor.localise.load import EARLY, Load, of_leaves, of_nodes, seeking
from hpc_mp.doctor.localise.record import Bools, ClusterLayout, Pair, PairTable, Round, RoundLog

ENOUGH = 4  # samples from which on their level is worth something


@dataclass(frozen=True, slots=True)
class NetworkState:
    """The fitted state of the network."""

    table: PairTable
    base: float  # log GB/s of an undisturbed healthy pair
    noise: float  # sigma of the log rates of healthy pairs
    node: Health  # health of nodes, from undisturbed pairs; crowded pairs can only clear
    load: Load


def analyse(record: RoundLog, cluster: ClusterLayout, rule: DecisionRule) -> NetworkState:
    table = record.table
    base = _base(table)
    node, noise = _nodes(table, cluster, base, rule, None)
    if cluster.leaf is not None:
        return NetworkState(table, base, noise, node, of_leaves(table, cluster, cluster.leaf, base, node, rule))
    load = of_nodes(table, cluster, base, rule)
    table = _sparse(table, behind(load, rule))
    # Nodes behind a slow uplink are not witnesses against others.
    node, noise = _nodes(table, cluster, base, rule, load.health.evidence > -rule.clear)
    return NetworkState(table, base, noise, node, load)


def behind(load: Load, rule: DecisionRule) -> Bools:
    """Return nodes that are slow under full load behind oversubscribed unknown leaves: it is unknown which share an uplink."""
    return (load.health.evidence <= -rule.clear).any(axis=1) & (load.group < 0) & load.tapered


def together(count: int) -> int:
    """Return how many of ``count`` nodes behind slow uplinks may talk undisturbed at the same time, one or two per leaf."""
    return max(1, count // 16, isqrt(count) // 2)


def _sparse(table: PairTable, behind: Bools) -> PairTable:
    """Return the table in which samples of the nodes ``behind`` count as undisturbed only in rounds with few of these nodes."""
    ends = behind[table.one].astype(int) + behind[table.other]
    crowded = (ends > 0) & (np.bincount(table.round, ends, minlength=1)[table.round] > together(int(behind.sum())))
    return replace(table, alone=table.alone & ~crowded)


def _base(table: PairTable) -> float:
    parts = [values for rows in (table.alone, ~table.alone) if (values := table.rate[rows].ravel()).size >= ENOUGH]
    return max(map(level, parts or [table.rate.ravel()])) if table.rate.size else 0.0


def _nodes(table: PairTable, cluster: ClusterLayout, base: float, rule: DecisionRule,
           trust: Bools | None) -> tuple[Health, float]:
    raw = table.rate - base
    near = np.abs(raw) < 2 * NEAR
    sound = near
    for _ in range(2):
        shift, drift = shifts(table, raw, sound)
        # A crowded round may be slow as a whole because of its load: only a common positive shift is subtracted.
        residual = raw - np.where(table.alone, shift, np.maximum(shift, 0))[:, None]
        alone = sound & table.alone[:, None]
        noise = max(scatter(residual[alone if np.count_nonzero(alone) >= ENOUGH else sound]), rule.least_noise)
        sigma = np.where(shift == 0, np.hypot(noise, drift), noise)[:, None]
        health = judge(table, residual, sigma, cluster.size, rule, trust)
        sound = near & health.healthy[table.one] & health.healthy[table.other]
    return health, noise


@dataclass(frozen=True, slots=True)
class Silence:
    """Nodes and pairs that do not answer."""

    # nodes without an answer since they were first silent, with at least two partners, one of which has answered
    down: frozenset[int]
    aside: frozenset[int]  # silent nodes that are not proven to be the cause; they are left out of the rounds until a retest
    cut: frozenset[Pair]  # pairs that were silent twice although both ends answer others
    doubtful: frozenset[Pair]  # pairs that were silent once and never talked, although both ends answer others


def silence(record: RoundLog) -> Silence:
    unexplained = list(record.silent)
    down: set[int] = set()
    while True:
        partners: defaultdict[int, set[int]] = defaultdict(set)
        first: dict[int, int] = {}
        for turn, (one, other) in unexplained:
            for node, partner in ((one, other), (other, one)):
                if record.answered.get(node, -1) < turn:
                    partners[node].add(partner)
                    first.setdefault(node, turn)
        proven = [node for node, met in partners.items()
                  if len(met) > 1 and record.answered.get(node, -1) < first[node] and met & record.answered.keys()]
        if not proven:
            break
        worst = max(proven, key=lambda node: (len(partners[node]), -node))
        down.add(worst)
        unexplained = [(turn, pair) for turn, pair in unexplained if worst not in pair]
    times: defaultdict[Pair, list[int]] = defaultdict(list)
    for turn, pair in unexplained:
        times[pair].append(turn)
    excused = {pair: turns for pair, turns in times.items() if all(record.answered.get(node, -1) > turns[0] for node in pair)}
    aside = {node for turn, pair in unexplained if pair not in excused for node in pair if record.answered.get(node, -1) < turn}
    return Silence(frozenset(down), frozenset(aside), frozenset(pair for pair, turns in excused.items() if len(turns) > 1),
                   frozenset(pair for pair, turns in excused.items() if len(turns) == 1 and pair not in record.talked))


@dataclass(frozen=True, slots=True)
class Links:
    """Slow links between healthy nodes."""

    bad: dict[Pair, float]  # fraction of the healthy rate by pair
    open: tuple[Pair, ...]  # pairs that look slow but lack undisturbed samples, the slowest first


def links(state: NetworkState, cluster: ClusterLayout, rule: DecisionRule) -> Links:
    """Judge all measured pairs, crowded ones only by faults that exceed the crowd's effect."""
    table, residual = state.table, state.node.residual
    fine = np.asarray(state.node.healthy.all(axis=1))
    if cluster.leaf is None:
        fine &= (state.load.health.evidence > -rule.clear).all(axis=1)
    ok = fine[table.one] & fine[table.other]
    if cluster.leaf is not None and len(state.load.health.open):
        doubted = state.load.health.bad | (state.load.health.open & (state.load.health.evidence < 0))
        clear = np.asarray(~doubted.any(axis=1))
        same = cluster.leaf[table.one] == cluster.leaf[table.other]
        ok &= same | (clear[cluster.leaf[table.one]] & clear[cluster.leaf[table.other]])
    mean = residual.mean(axis=1)
    crowd = ok & ~table.alone
    limit = -NEAR * 0.8
    if crowd.any():
        middle = np.median(mean[crowd])
        limit = min(limit, -2 * scatter(mean[crowd] - middle))
        mean = np.where(table.alone, mean, mean - middle)
    evidence: defaultdict[Pair, list[float]] = defaultdict(list)
    samples: defaultdict[Pair, list[float]] = defaultdict(list)
    mild = log(rule.bad)
    for row in np.flatnonzero(ok):
        pair = (int(table.one[row]), int(table.other[row]))
        if table.alone[row]:
            ratio = mild * (mild - 2 * mean[row]) / (2 * state.noise**2)
            evidence[pair].append(float(np.clip(ratio, -3.5, rule.largest)))
        if table.alone[row] or not state.load.tapered:
            samples[pair].append(float(mean[row]))
    slow = {(int(table.one[row]), int(table.other[row])): mean[row] for row in np.flatnonzero(ok & (mean < limit))}
    sums = {pair: sum(evidence[pair]) for pair in slow}
    bad = {pair: exp(float(np.median(samples[pair]))) for pair, total in sums.items() if total <= -rule.convict}
    waiting = [pair for pair, total in sums.items() if -rule.convict < total < rule.clear]
    return Links(bad, tuple(sorted(waiting, key=lambda pair: slow[pair])))


@dataclass(frozen=True, slots=True)
class Known:
    """The knowledge after a round."""

    cluster: ClusterLayout
    rule: DecisionRule
    leaves: Sequence[Sequence[int]]  # the nodes of every known leaf, in random order; empty if leaves are unknown
    record: RoundLog  # all rounds so far
    analysed: NetworkState | None  # analysis of nodes and uplinks; None before the first round
    silence: Silence  # nodes and pairs that do not answer

    @property
    def state(self) -> NetworkState:
        assert self.analysed is not None, "nothing was measured yet"
        return self.analysed

    @property
    def active(self) -> list[int]:
        """The nodes that answer."""
        missing = self.silence.down | self.silence.aside
        return [node for node in range(self.cluster.size) if node not in missing]

    @property
    def links(self) -> Links:
        return links(self.state, self.cluster, self.rule)

    def crowd(self, random: Random, turn: int = 0) -> list[Pair]:
        """Return pairs of all nodes. If crowds are slow, the pairs are chosen to learn leaves and cross the known ones."""
        nodes = self.active
        if len(nodes) % 2:
            nodes.remove(nodes[turn % len(nodes)])
        load = self.analysed.load if self.analysed is not None else None
        if load is not None and load.score.size and len(np.unique(load.table.round)) >= EARLY:
            return seeking(nodes, load.group, load.score, random)
        return rounds.matching(nodes, random)

    def crowded(self, pairs: Sequence[Pair]) -> Round:
        """Return a round of many pairs. Only pairs inside a known leaf count as undisturbed."""
        leaf = self.cluster.leaf
        return Round(tuple(pairs), tuple(leaf is not None and bool(leaf[a] == leaf[b]) for a, b in pairs), leaf is None)

    def undisturbed(self, pairs: Sequence[Pair]) -> Round:
        """Return a round of a few pairs. Across known leaves they count as undisturbed only if both uplinks are cleared."""
        leaf = self.cluster.leaf
        if leaf is None:
            return Round(tuple(pairs), (True,) * len(pairs))
        clear = np.asarray(self.state.load.health.healthy.all(axis=1))
        return Round(tuple(pairs), tuple(bool(leaf[a] == leaf[b] or (clear[leaf[a]] and clear[leaf[b]])) for a, b in pairs))

    def only(self, round_: Round) -> Round:
        """Return the round without pairs of nodes that do not answer."""
        active = {*self.active}
        remaining = [(pair, alone) for pair, alone in zip(round_.pairs, round_.alone, strict=True) if active.issuperset(pair)]
        return Round(tuple(pair for pair, _ in remaining), tuple(alone for _, alone in remaining), round_.full)
