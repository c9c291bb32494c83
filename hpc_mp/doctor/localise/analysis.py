"""Analysis of the log of rounds: health of nodes by themselves, and of their uplinks under load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from hpc_mp.doctor.localise.fit import NEAR, DecisionRule, Health, judge, level, scatter, shifts
from hpc_mp.doctor.localise.load import Load, of_leaves, of_nodes
from hpc_mp.doctor.localise.record import Bools, ClusterLayout, PairTable, RoundLog

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


def _nodes(
    table: PairTable, cluster: ClusterLayout, base: float, rule: DecisionRule, trust: Bools | None
) -> tuple[Health, float]:
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
