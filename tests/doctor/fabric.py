"""A simulated cluster: rates of pairs that share uplinks fairly, with noise and planted faults.

It knows nothing of the localiser. Rates are max-min fair: a flow gets what its NICs and cables allow, and no more than its
fair share of the uplinks that it crosses beside the other flows of the same round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_mp.doctor.localise import Pair, RailSample

NIC = 50.0  # GB/s of one rail


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` node (all its rails), rail, uplink, link or down; ``where``: node, leaf, or the two nodes of a link."""

    kind: str
    where: int | tuple[int, int]
    factor: float
    rail: int | None = None


@dataclass(slots=True)
class Fabric:
    """Attributes:
        leaf: leaf of every node.
        ports: nodes that fit on a leaf; its uplinks carry ports × rails × NIC / taper, shared by its rails or, with
            ``planes``, per rail. A faulty uplink carries ``factor`` × what the leaf's nodes could use of it.
        noise, lossy: sigma of the log-normal noise; share of samples that lose 30–60 %.
        drift: sigma of a log factor that all samples of a round share.
    """

    leaf: NDArray[np.int64]
    ports: int
    taper: float = 1.0
    rails: int = 1
    planes: bool = False
    faults: Sequence[Fault] = ()
    noise: float = 0.05
    lossy: float = 0.01
    drift: float = 0.0
    seed: int = 0
    rounds: int = 0
    silent_rounds: int = 0
    random: np.random.Generator = field(init=False)
    node: NDArray[np.float64] = field(init=False)
    uplink: NDArray[np.float64] = field(init=False)
    link: dict[Pair, float] = field(init=False)
    down: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        count, leaves = len(self.leaf), int(self.leaf.max()) + 1
        self.node = np.ones((count, self.rails))
        used = np.minimum(np.bincount(self.leaf, minlength=leaves), max(1.0, self.ports / self.taper))
        self.uplink = np.repeat((NIC * used)[:, None], self.rails, axis=1)
        self.link, self.down = {}, set()
        for fault in self.faults:
            rails = slice(None) if fault.rail is None else fault.rail
            if fault.kind in ("node", "rail"):
                self.node[fault.where, rails] *= fault.factor
            elif fault.kind == "uplink":
                self.uplink[fault.where, rails] *= fault.factor
            elif fault.kind == "link":
                self.link[fault.where] = fault.factor  # type: ignore[index]
            else:
                self.down.add(fault.where)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        return [f"n{index + 1}" for index in range(len(self.leaf))]

    @property
    def leaves(self) -> Mapping[str, str]:
        return {name: f"leaf{leaf}" for name, leaf in zip(self.names, self.leaf, strict=True)}

    def measure(self, pairs: Sequence[Pair]) -> list[RailSample]:
        """One round: ``localise.Measure``."""
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs), "pairs of a round are disjoint"
        self.rounds += 1
        talking = [pair for pair in pairs if not self.down & {*pair}]
        self.silent_rounds += len(talking) < len(pairs)
        rates = dict(zip(talking, self._rates(np.array(talking).reshape(-1, 2)).tolist(), strict=True))
        return [RailSample(pair, rail, rate or None)
                for pair in pairs for rail, rate in enumerate(rates.get(pair, [None] * self.rails))]

    def _rates(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        one, other = pairs.T
        limit = NIC * np.minimum(self.node[one], self.node[other])
        if self.link:
            limit *= np.array([self.link.get((int(a), int(b)), 1.0) for a, b in pairs])[:, None]
        cross = self.leaf[one] != self.leaf[other]
        limit[cross] = self._shared(self.leaf[one[cross]], self.leaf[other[cross]], limit[cross])
        noise = np.exp(self.random.normal(0, self.noise, limit.shape) + self.random.normal(0, self.drift or 1e-12))
        lost = np.where(self.random.random(limit.shape) < self.lossy, self.random.uniform(0.3, 0.6, limit.shape), 0)
        return limit * noise * (1 - lost)

    def _shared(self, one: NDArray[np.int64], other: NDArray[np.int64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
        """Max-min fair rates of flows (one rail of one pair) that cross the uplinks of the leaves ``one`` and ``other``."""
        rail = np.arange(self.rails) if self.planes else np.zeros(self.rails, int)
        left = (self.uplink if self.planes else self.uplink.sum(axis=1, keepdims=True)).ravel()
        width = self.rails if self.planes else 1
        first, second = ((leaf[:, None] * width + rail).ravel() for leaf in (one, other))
        rate, limit = np.zeros(limit.size), limit.ravel()
        open_ = np.arange(limit.size)
        left = left.copy()
        while open_.size:
            a, b = first[open_], second[open_]
            share = left / np.maximum(np.bincount(a, minlength=left.size) + np.bincount(b, minlength=left.size), 1)
            level = np.minimum(np.minimum(share[a], share[b]), limit[open_])
            # A flow is settled by its own limit, or by an uplink that is the tightest place for all flows that cross it.
            lowest = np.full(left.size, np.inf)
            np.minimum.at(lowest, a, level)
            np.minimum.at(lowest, b, level)
            tight = lowest >= share * (1 - 1e-12)
            settled = (limit[open_] <= level) | (tight[a] & (share[a] <= level)) | (tight[b] & (share[b] <= level))
            rate[open_[settled]] = level[settled]
            np.subtract.at(left, a[settled], level[settled])
            np.subtract.at(left, b[settled], level[settled])
            left = np.maximum(left, 0)
            open_ = open_[~settled]
        return rate.reshape(-1, self.rails)
