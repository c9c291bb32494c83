"""Pairs that are slow though both of their ends are healthy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp, log

import numpy as np

from hpc_mp.doctor.localise.analysis import State
from hpc_mp.doctor.localise.cluster import Cluster
from hpc_mp.doctor.localise.fit import NEAR, Rule
from hpc_mp.doctor.localise.sample import Pair


@dataclass(frozen=True, slots=True)
class Links:
    """Attributes:
        bad: factor by pair.
        open: pairs that look slow and have not been measured often enough by themselves, the slowest first.
    """

    bad: dict[Pair, float]
    open: tuple[Pair, ...]


def links(state: State, cluster: Cluster, rule: Rule) -> Links:
    """Only pairs that were measured can be judged, and crowded ones only by faults that show beside the crowd."""
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
        limit = min(limit, -2 * 1.4826 * float(np.median(np.abs(mean[crowd] - middle))))
        mean = np.where(table.alone, mean, mean - middle)
    evidence: defaultdict[Pair, list[float]] = defaultdict(list)
    seen: defaultdict[Pair, list[float]] = defaultdict(list)
    mild = log(rule.bad)
    for row in np.flatnonzero(ok):
        pair = (int(table.one[row]), int(table.other[row]))
        if table.alone[row]:
            ratio = mild * (mild - 2 * mean[row]) / (2 * state.noise**2)
            evidence[pair].append(float(np.clip(ratio, -3.5, rule.most)))
        if table.alone[row] or not state.load.tapered:
            seen[pair].append(float(mean[row]))
    slow = {(int(table.one[row]), int(table.other[row])): mean[row] for row in np.flatnonzero(ok & (mean < limit))}
    sums = {pair: sum(evidence[pair]) for pair in slow}
    bad = {pair: exp(float(np.median(seen[pair]))) for pair, total in sums.items() if total <= -rule.convict}
    waiting = [pair for pair, total in sums.items() if -rule.convict < total < rule.clear]
    return Links(bad, tuple(sorted(waiting, key=lambda pair: slow[pair])))
