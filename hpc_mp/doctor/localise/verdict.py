"""Conversion of the evidence to named suspects."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import exp, log

import numpy as np

from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.doctor.localise.analysis import Known
from hpc_mp.doctor.localise.fit import NEAR, Health
from hpc_mp.doctor.localise.record import DEAD, LINK, Bools, Localisation, PairTable, Suspect, SuspectKind
from hpc_mp.doctor.localise.rounds import ALL_PAIRS
from hpc_mp.doctor.localise.weigh import weighed

SLOWER = 0.75  # a rail of a bad node is named beside the node when it has less than this of what the node's other rails have
DOUBT = log(0.9)  # log factor under load below which a group of nodes that is neither cleared nor convicted is mentioned
MOSTLY = 0.7  # share of slow samples from which on an undecided end is mentioned, without certainty


def verdict(knowledge: Known, retests: int, complete: bool) -> Localisation:
    suspects = tuple(_suspects(knowledge, complete))
    if complete and knowledge.cluster.size <= ALL_PAIRS:
        suspects = tuple(weighed(suspects, knowledge.state, knowledge.cluster))
    return Localisation(suspects, exp(knowledge.state.base), knowledge.record.rounds, retests, complete)


def _suspects(knowledge: Known, complete: bool) -> Iterator[Suspect]:
    yield from _silent(knowledge, complete)
    names, state, cluster = knowledge.cluster.names, knowledge.state, knowledge.cluster
    yield from _ends("node", names, state.node, complete, "with healthy partners and nothing else in the way")
    if cluster.leaf is not None:
        yield from _ends("uplink", cluster.leaf_names, state.load.health, complete,
                         "all nodes of the leaf talking to a healthy leaf")
        yield from _doubts("uplink", cluster.leaf_names, state.load.health, state.load.table)
        yield from _doubts("node", names, state.node, state.table, _sole(knowledge))
    else:
        yield from _behind(knowledge, complete)
        yield from _doubts("node", names, state.node, state.table)
    if complete and cluster.size <= ALL_PAIRS:
        yield from _links(knowledge)


def _links(knowledge: Known) -> Iterator[Suspect]:
    """Yield slow pairs of healthy nodes. Several pairs of one node or leaf may be due to it: they are not certain."""
    names, leaf, bad = knowledge.cluster.names, knowledge.cluster.leaf, knowledge.links.bad
    often = Counter(node for pair in bad for node in pair)
    between = [sorted({int(leaf[node]) for node in pair}) for pair in bad] if leaf is not None else []
    uplinks = Counter(end for way in between if len(way) > 1 for end in way)
    for one, other in bad:
        ends = [int(leaf[node]) for node in (one, other)] if leaf is not None else []
        apart = len({*ends}) < 2 or all(uplinks[end] == 1 for end in ends)
        yield Suspect("link", (f"{names[one]}{LINK}{names[other]}",), bad[one, other], often[one] == often[other] == 1 and apart,
                      f"{bad[one, other]:.0%} of the healthy rate, though both nodes are fast with others")
    shared = [end for end, count in sorted(uplinks.items()) if count > 1]
    doubted = knowledge.state.load.health.bad | knowledge.state.load.health.open
    if shared and not doubted[shared].any():  # otherwise the uplink is reported already
        slow = [factor for way, factor in zip(between, bad.values(), strict=True) if {*way} & {*shared} and len(way) > 1]
        yield Suspect("uplink", tuple(knowledge.cluster.leaf_names[end] for end in shared), float(np.median(slow)), False,
                      f"{len(slow)} pairs across it have {np.median(slow):.0%} of the healthy rate")


def _silent(knowledge: Known, complete: bool) -> Iterator[Suspect]:
    names, silence = knowledge.cluster.names, knowledge.silence
    for node in sorted(silence.down):
        yield Suspect("down", (names[node],), 0.0, True, "no answer to two nodes, of which one answers others")
    if silence.aside:
        yield Suspect("down", tuple(names[node] for node in sorted(silence.aside)), 0.0, False, "no answer between these")
    for one, other in sorted(silence.cut):
        yield Suspect("link", (f"{names[one]}{LINK}{names[other]}",), 0.0, True, "twice no answer, though both answer others")


def _ends(kind: SuspectKind, names: tuple[str, ...], health: Health, complete: bool, how: str) -> Iterator[Suspect]:
    """Yield convicted nodes or leaves; single rails if other rails are healthy, or if one is worse than the others."""
    for end in np.flatnonzero(health.bad.any(axis=1)).tolist():
        bad, factor = health.bad[end], health.factor[end]
        whole = bool(bad.mean() >= 0.5 and not health.healthy[end].any())
        usual = float(np.median(factor)) if whole else 1.0
        if whole:
            yield Suspect(kind, (names[end],), usual, complete, f"{usual:.0%} of the healthy rate, {how}")
        for rail in np.flatnonzero(bad & (factor < SLOWER * usual if whole else True)).tolist() if len(bad) > 1 else ():
            part: SuspectKind = "rail" if kind == "node" else kind
            yield Suspect(part, (f"{names[end]} rail {rail}",), float(factor[rail]), complete,
                          f"{factor[rail]:.0%} of the healthy rate, {how}; other rails {usual:.0%}")


def _behind(knowledge: Known, complete: bool) -> Iterator[Suspect]:
    """Yield nodes that are fast by themselves and slow under full load, grouped by their rate."""
    health, group = knowledge.state.load.health, knowledge.state.load.group
    rate = np.log(np.maximum(health.factor, DEAD))
    typical = rate.copy()
    for index in np.unique(group[group >= 0]):
        typical[group == index] = np.nanmedian(rate[group == index], axis=0)
    like = (rate < np.minimum(typical, -NEAR) / 2) & knowledge.state.node.healthy
    yield from _gathered(knowledge, like & health.bad, complete)
    if complete:
        yield from _gathered(knowledge, like & health.open & (typical < DOUBT) & (group >= 0)[:, None], False)


def _gathered(knowledge: Known, slow: Bools, certain: bool) -> Iterator[Suspect]:
    factor, rails = knowledge.state.load.health.factor, knowledge.cluster.rails
    members = np.flatnonzero(slow.any(axis=1))
    share = np.array([np.median(factor[member][slow[member]]) for member in members])
    order = np.argsort(share)
    cuts = np.flatnonzero(np.diff(np.log(share[order])) > NEAR / 2) + 1 if len(members) else np.array([], dtype=int)
    for part in np.split(order, cuts) if len(members) else ():
        nodes, usual = sorted(members[part].tolist()), float(np.median(share[part]))
        which = np.flatnonzero(slow[nodes].mean(axis=0) >= 0.5).tolist()
        name = compress(knowledge.cluster.names[node] for node in nodes)
        yield Suspect("uplink", (name if len(which) in (0, rails) else f"{name} rail {','.join(map(str, which))}",), usual,
                      certain and len(nodes) > 1,
                      f"{usual:.0%} of the others' rate when all nodes talk, though fast by themselves")


def _sole(knowledge: Known) -> Callable[[int], str | None]:
    """Return a function that returns a node's leaf if no other node of the leaf answers: the two cannot be distinguished."""
    leaf, active = knowledge.cluster.leaf, {*knowledge.active}
    assert leaf is not None

    def of(node: int) -> str | None:
        others = [other for other in knowledge.leaves[leaf[node]] if other != node and other in active]
        return None if others else knowledge.cluster.leaf_names[leaf[node]]

    return of


def _doubts(kind: SuspectKind, names: tuple[str, ...], health: Health, table: PairTable,
            stand_in: Callable[[int], str | None] | None = None) -> Iterator[Suspect]:
    """Yield ends that are neither cleared nor convicted although most of their undisturbed samples are slow. Ends that were slow
    with each other form one set: at least one of them is bad."""
    rails = health.open.shape[1]
    for rail in range(rails):
        slow = table.alone & (health.residual[:, rail] < -NEAR)
        count, slow_count = (np.bincount(np.concatenate([table.one[rows], table.other[rows]]), minlength=len(names))
                             for rows in (table.alone, slow))
        doubted = {*np.flatnonzero(health.open[:, rail] & (count > 1) & (slow_count >= MOSTLY * count)).tolist()}
        edges = [(int(a), int(b)) for a, b in zip(table.one[slow], table.other[slow], strict=True) if {a, b} <= doubted]
        suffix = f" rail {rail}" if rails > 1 else ""
        while doubted:
            group = {doubted.pop()}
            while grown := {b for edge in edges for a, b in (edge, edge[::-1]) if a in group} - group:
                group |= grown
            doubted -= group
            ends = sorted(group)
            members = (*(f"{names[end]}{suffix}" for end in ends),
                       *(leaf for end in ends if stand_in and (leaf := stand_in(end))))
            factor = float(np.median(health.factor[ends, rail]))
            why = f"cannot tell which: {' or '.join(members)}" if len(members) > 1 else "too few samples to be sure"
            yield Suspect("rail" if rails > 1 and kind == "node" else kind, members, factor, False,
                          f"{factor:.0%} of the healthy rate; {why}")
