"""Nodes in the ledger are left out of new jobs, where that leaves enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_mp.cluster.bad_nodes import BadNode
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.job import resolve
from hpc_mp.job.resolution import resolved
from hpc_mp.launch.choices import avoid
from hpc_mp.launch.facts import ClusterFacts

PARTITION = SlurmPartition("all", True, True, None, (NodeKind(("n1", "n2", "n3", "n4"), 4, 2**30, ()),))


def bad(*nodes: str) -> dict[str, BadNode]:
    return {node: BadNode(node, "lost", f"{node} vanished", "run", 0.0, 1e12) for node in nodes}


@pytest.mark.parametrize(("nodes", "extra", "found", "excluded", "words"), [
    (2, {}, (), None, None),
    (2, {}, ("n3",), "n3", "avoided: n3 (lost: n3 vanished)"),
    (2, {"exclude": "n4"}, ("n3",), "n[4,3]", "avoided: n3"),
    (2, {"exclude": "n3"}, ("n3",), "n3", None),
    (2, {}, ("x9",), None, None),
    (4, {}, ("n3",), None, "not avoided, as only 3 other nodes are there: n3"),
    (3, {}, ("n2", "n3"), "n3", "avoided: n3 (lost: n3 vanished); not avoided, as only 2 other nodes are there: n2"),
    (3, {"exclude": "n1"}, ("n2",), "n1", "not avoided, as only 2 other"),
    (2, {"nodelist": "n[3-4]"}, ("n2", "n3"), "n2", "avoided: n2 (lost: n2 vanished)"),
])
def test_bad_nodes(nodes: int, extra: dict[str, Any], found: tuple[str, ...], excluded: str | None, words: str | None) -> None:
    check(nodes, extra, found, excluded, words)


def test_nodes_that_are_down_are_not_enough() -> None:
    check(3, {}, ("n2", "n3"), "n2", "avoided: n2 (lost: n2 vanished); not avoided, as only 2 other nodes are there: n3",
          down=("n2",))
    check(2, {}, ("n3",), None, "not avoided, as only 1 other nodes are there: n3", down=("n1", "n2"))


def check(nodes: int, extra: dict[str, Any], found: tuple[str, ...], excluded: str | None, words: str | None,
          down: tuple[str, ...] = ()) -> None:
    spec = resolve({"job": {"nodes": nodes}, "model": {"config": {"model_type": "gpt2"}},
                    "data": {"files": ["x"], "sequence_length": 8}, "train": {"steps": 1, "global_batch": 12},
                    "slurm": {"extra": extra}}, Path("/"))
    chosen = avoid(spec, ClusterFacts(partition=PARTITION, out_of_service=frozenset(down)), bad(*found))
    assert resolved(spec, [chosen]).slurm.extra == {**extra, **({"exclude": excluded} if excluded else {})}
    assert chosen.why.startswith(words or "") and bool(chosen.why) == (words is not None)
