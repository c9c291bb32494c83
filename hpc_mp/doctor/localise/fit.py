"""Fit of evidence to rates: healthy and bad ends of the measured pairs, and the remaining rate of bad ends.

A pair is as fast as its slower end. A fast sample therefore clears both ends, and a slow one counts against an end only if the
other end is cleared. The evidence of an end is a sum of log likelihood ratios, healthy against ``bad`` × healthy, and ends are
decided by its size (Wald's sequential test). Two limits make it robust. One sample clears by at most ``largest``. A slow sample
convicts by at most the log of the fraction of slow samples among cleared pairs, because healthy pairs are sometimes slow too:
through noise, and on shared uplinks through other pairs.
"""

from dataclasses import dataclass, field
from math import log

import numpy as np

from hpc_mp.doctor.localise.record import Bools, Floats, Ints, PairTable


@dataclass(frozen=True, slots=True)
class DecisionRule:
    """The thresholds at which evidence suffices."""

    bad: float = 0.8  # the mildest fault to find, as a factor on the rate
    clear: float = 7.0  # evidence at which an end is healthy: a fault passes once in exp(clear) cases
    convict: float = 14.0  # evidence against an end at which it is bad: wrongly once in exp(convict) cases
    largest: float = 6.0  # upper limit of the evidence of a single fast sample
    # least evidence of a fast sample to count in a crowd, where slow samples are ignored and cannot outweigh luck
    plain: float = 2.0
    least_noise: float = 0.03  # lower bound of the scatter of log rates: healthy nodes differ a little
    trim: bool = True  # True to limit slow samples as described above; without it the fit is not robust


RULE = DecisionRule()
COMMON = 5  # samples of a round from which on their median is taken for what the round has in common
MARGIN = 3.0  # evidence beyond a conviction: noise and the worth of slow samples are estimated anew with every round
NEAR = 0.12  # log rates this near to a level belong to it: about half way to the mildest fault


@dataclass(frozen=True, slots=True)
class Health:
    """The health of every end (node or leaf) and rail, (ends, rails)."""

    evidence: Floats  # positive for healthy, negative for bad
    healthy: Bools  # True if cleared
    bad: Bools  # True if convicted
    settled: Bools  # True if convicted so clearly that a few more samples will not change it
    # median fraction of the healthy rate, over undisturbed samples with cleared partners (else over undisturbed samples, else
    # over all); nan: never measured
    factor: Floats
    residual: Floats = field(repr=False)

    @property
    def open(self) -> Bools:
        """True for ends that are neither healthy nor bad."""
        return ~self.healthy & ~self.bad


def level(values: Floats, quantile: float = 0.9) -> float:
    """Return the level of the fastest sizeable cluster of log rates: start high and shift to the median of the near values.
    Faults and crowded uplinks only slow a pair down, so the healthy pairs are the fastest even if they are few."""
    middle = float(np.quantile(values, quantile))
    for _ in range(20):
        near = values[np.abs(values - middle) < NEAR]
        middle, before = float(np.median(near)) if len(near) else middle, middle
        if middle == before:
            break
    return middle


def nothing(ends: int, rails: int) -> Health:
    """Return the health before any measurement."""
    no = np.zeros((ends, rails), dtype=bool)
    return Health(np.zeros((ends, rails)), no, no, no, np.full((ends, rails), np.nan), np.zeros((0, rails)))


def judge(table: PairTable, residual: Floats, noise: Floats, ends: int, rule: DecisionRule, trust: Bools | None = None,
          counts: Bools | None = None) -> Health:
    """Compute the evidence of every end from the rows of a table.

    Args:
        residual: log rate relative to a healthy pair, (rows, rails).
        noise: sigma of each row, (rows, 1).
        ends: number of ends.
        trust: ends whose slow samples may count against their partners, (ends, rails).
        counts: ends that a fast row clears, (rows, 2).
    """
    rails = residual.shape[1]
    mild = log(rule.bad)
    ratio = mild * (mild - 2 * residual) / (2 * noise**2)
    fast, slow = np.clip(ratio, 0, rule.largest), np.minimum(ratio, 0)
    alone = table.alone[:, None]
    fast = np.where(alone | (fast >= rule.plain), fast, 0)
    slow = np.where(alone, slow, 0)
    trust = np.ones((ends, rails), dtype=bool) if trust is None else trust
    on_one, on_other = np.ones((2, 1, 1)) if counts is None else counts.T[:, :, None]
    healthy = _by_end(table, fast * on_one, fast * on_other, ends) >= rule.clear
    for _ in range(4):
        witness = healthy & trust
        limited = slow
        if rule.trim:
            limited = np.maximum(slow, _worth(residual, witness[table.one] & witness[table.other] & alone))
        one = fast * on_one + limited * witness[table.other]
        other = fast * on_other + limited * witness[table.one]
        evidence = _by_end(table, one, other, ends)
        before, healthy = healthy, evidence >= rule.clear
        if (before == healthy).all():
            break
    return Health(evidence, healthy, evidence <= -rule.convict, evidence <= -rule.convict - MARGIN,
                  _factors(table, residual, healthy & trust, ends, counts), residual)


def _worth(residual: Floats, healthy: Bools) -> float:
    """Return the log of the fraction of slow samples of cleared pairs: the bound on the evidence of one slow sample."""
    slow = np.count_nonzero(healthy & (residual < log(RULE.bad) / 2))
    return log((slow + 0.5) / (np.count_nonzero(healthy) + 20))


def _by_end(table: PairTable, one: Floats, other: Floats, ends: int) -> Floats:
    """Return the sums over the rows of each end, (ends, rails)."""
    rails = one.shape[1]
    rail = np.arange(rails)
    total = np.zeros(ends * rails)
    for end, values in ((table.one, one), (table.other, other)):
        total += np.bincount((end[:, None] * rails + rail).ravel(), values.ravel(), minlength=len(total))
    return total.reshape(ends, rails)


def _factors(table: PairTable, residual: Floats, witness: Bools, ends: int, counts: Bools | None) -> Floats:
    rails = residual.shape[1]
    end = (np.concatenate([table.one, table.other])[:, None] * rails + np.arange(rails)).ravel()
    value = np.concatenate([residual, residual]).ravel()
    alone = np.repeat(np.concatenate([table.alone, table.alone]), rails)
    if counts is not None:
        alone &= np.repeat(counts.T.ravel(), rails)
    clean = alone & np.concatenate([witness[table.other], witness[table.one]]).ravel()
    factors = np.full(ends * rails, np.nan)
    for rows in (clean, alone, np.ones(len(end), dtype=bool)):
        rows = rows & np.isnan(factors)[end]  # of the ends without a factor: most have one from the first rows
        factors = np.where(np.isnan(factors), medians(end[rows], value[rows], ends * rails), factors)
    return np.exp(factors).reshape(ends, rails)


def medians(group: Ints, value: Floats, groups: int) -> Floats:
    """Return the median of the values of each group, nan for a group without values."""
    order = np.argsort(value)
    ordered = value[order[np.argsort(group[order].astype(np.min_scalar_type(groups)), kind="stable")]]  # a radix sort
    counts = np.bincount(group, minlength=groups)
    last = np.cumsum(counts)
    middles = np.full(groups, np.nan)
    some = counts > 0
    first = (last - counts)[some]
    middles[some] = (ordered[first + (counts[some] - 1) // 2] + ordered[first + counts[some] // 2]) / 2
    return middles


def scatter(values: Floats) -> float:
    """Return the sigma of values around 0, from their median absolute value."""
    return 1.4826 * float(np.median(np.abs(values))) if values.size else 0.0


def shifts(table: PairTable, raw: Floats, sound: Bools) -> tuple[Floats, float]:
    """Return by row the median of the sound samples of its round (0: too few samples), and its spread over rounds."""
    rounds = int(table.round.max(initial=-1)) + 1
    which = np.repeat(table.round, raw.shape[1])[sound.ravel()]
    shift = medians(which, raw.ravel()[sound.ravel()], rounds)
    shift[np.bincount(which, minlength=rounds) < COMMON] = np.nan
    drift = float(np.nanstd(shift)) if np.count_nonzero(~np.isnan(shift)) >= 3 else 0.0
    return np.nan_to_num(shift)[table.round], drift
