"""The rounds of a search, one after the other: a first pass over all, then retests until nothing is in doubt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.localise.fit import RULE, DecisionRule
from hpc_mp.doctor.localise.record import ClusterLayout, Localisation, Measure
from hpc_mp.doctor.localise.retest import Retests
from hpc_mp.doctor.localise.search import Search
from hpc_mp.doctor.localise.verdict import verdict


def localise(nodes: Sequence[str], measure: Measure, leaves: Mapping[str, str] | None = None, rails: int = 1, seed: int = 0, *,
             healthy: float | None = None, taper: float | None = None, rule: DecisionRule = RULE) -> Iterator[Localisation]:
    """A verdict after every round; the last one is complete.

    Args:
        nodes: names.
        measure: measures one round of disjoint pairs of indices into ``nodes``.
        leaves: leaf switch of every node; None: not known.
        rails: NICs of every node that are measured one by one.
        seed: of the random rounds.
        healthy: GB/s per rail that a healthy pair must reach, if known. Without it, all is relative to the fastest pairs,
            and two nodes with one rail cannot be slow.
        taper: oversubscription of healthy uplinks, if known. Three and more leaves show it themselves; two count as 1:1.

    Raises:
        HpcMpError: fewer than two nodes, or a node without a leaf.
    """
    if len(nodes) < 2:
        raise HpcMpError(f"{len(nodes)} nodes", "a pair is the least that can be measured", "give at least two nodes")
    if leaves is not None and (lost := [node for node in nodes if node not in leaves]):
        raise HpcMpError(f"node {lost[0]} has no leaf", "leaves are known of all nodes or of none",
                         "complete the topology or leave it out")
    leaf_names = tuple(sorted({leaves[node] for node in nodes})) if leaves is not None else ()
    number = {name: index for index, name in enumerate(leaf_names)}
    leaf = np.array([number[leaves[node]] for node in nodes]) if leaves is not None else None
    search = Search(ClusterLayout(tuple(nodes), leaf, leaf_names, rails, healthy, taper), seed, rule)
    first = 0
    for round_ in search.first_pass():
        search.note(round_, measure)
        first += 1
        yield verdict(search.known, retests=0, complete=False)
    for round_ in Retests(lambda: search.known, search.random):
        search.note(round_, measure)
        yield verdict(search.known, retests=search.known.record.rounds - first, complete=False)
    yield verdict(search.known, retests=search.known.record.rounds - first, complete=True)
