"""Which exclusions of ours hold, and what the ledger says: pure decisions, and files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from hpc_mp.cluster.bad_nodes import (
    AVOIDED_S,
    CERTAINTIES,
    BadNode,
    Certainty,
    Keeping,
    bad_nodes,
    choose,
    findings,
    ledger,
    record,
    take_back,
)
from hpc_mp.cluster.slurm.nodes import NodeState, node_states


def bad(node: str, time: float = 0.0, sure: Certainty = "likely", code: str = "lost") -> BadNode:
    return BadNode(node, code, f"{node} vanished", "run", time, time + AVOIDED_S, sure)


def states(up: str, down: str = "") -> dict[str, NodeState]:
    return {**{node: NodeState("idle") for node in up.split()}, **{node: NodeState("down*") for node in down.split()}}


def names(keeping: Keeping) -> tuple[str, str]:
    return " ".join(each.node for each in keeping.excluded), " ".join(each.node for each in keeping.taken_back)


FOUR = "n1 n2 n3 n4"
LOST, BOTH = [bad("n2", time=1.0)], [bad("n2", time=1.0), bad("n3", time=2.0)]
GRADED = [bad("n1", 1.0, "certain", "hardware"), bad("n2", 3.0), bad("n3", 2.0)]
ALL = [bad(f"n{number}", number) for number in range(1, 5)]
SUSPECTED = [bad(f"n{number}", sure="suspected") for number in range(1, 5)]
RENAMED = [bad("old"), bad("n3")]


@pytest.mark.parametrize(
    ("ours", "users", "up", "down", "needed", "excluded", "back"), table(__file__, "exclusions.toml", "exclusions", globals()))
def test_which_exclusions_hold(ours: list[BadNode], users: str, up: str, down: str, needed: int, excluded: str,
                               back: str) -> None:
    assert names(choose(ours, users.split(), states(up, down), needed)) == (excluded, back)


def test_slurms_own_word_that_nodes_do_not_fit_takes_one_more_back() -> None:
    assert names(choose(BOTH, (), states(FOUR), 1, stuck=True)) == ("n3", "n2")
    assert names(choose([], (), states("n1"), 1, stuck=True)) == ("", "")


NODES = [f"n{number}" for number in range(6)]


@given(st.dictionaries(st.sampled_from([*NODES, "gone"]), st.sampled_from(CERTAINTIES)), st.sets(st.sampled_from(NODES)),
       st.sets(st.sampled_from(NODES)), st.integers(1, 6))
def test_a_job_can_start_whenever_enough_nodes_are_up(ours: dict[str, Certainty], users: set[str], up: set[str],
                                                      needed: int) -> None:
    seen = states(" ".join(up), " ".join({*NODES} - up))
    keeping = choose([bad(node, number, sure) for number, (node, sure) in enumerate(ours.items())], users, seen, needed)
    assert {*keeping.nodes}.isdisjoint({*users, "gone"})
    if len(up - users) >= needed:
        assert len(up - users - {*keeping.nodes}) >= needed
        assert not keeping.taken_back or len(up - users - {*keeping.nodes}) == needed, "more than needed"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ledger("lab", {"XDG_STATE_HOME": str(tmp_path)})


def test_what_is_taken_back_counts_no_more_until_it_is_found_again(path: Path) -> None:
    record(path, [bad("n3"), bad("n3", 1.0, code="node-slow"), bad("n4")])
    assert [each.node for each in take_back(path, ["n3"], ["lost"], now=5.0)] == ["n3"]
    assert {each: found.code for each, found in bad_nodes(path, 5.0).items()} == {"n3": "node-slow", "n4": "lost"}
    take_back(path, ["n3"], now=6.0)
    assert [*bad_nodes(path, 6.0)] == ["n4"] and take_back(path, ["n3"], now=6.0) == ()
    record(path, [bad("n3", 7.0)])
    assert {*bad_nodes(path, 8.0)} == {"n3", "n4"}


def test_suspicions_are_listed_and_avoid_nobody(path: Path) -> None:
    record(path, [bad(f"n{number}", sure="suspected") for number in range(9)])
    assert len(findings(path, 1.0)) == 9 and bad_nodes(path, 1.0) == {}
    record(path, [bad("n3", 1.0, "certain", "hardware")])
    assert {each: found.code for each, found in bad_nodes(path, 2.0).items()} == {"n3": "hardware"}


def test_lines_of_an_earlier_release_are_read(path: Path) -> None:
    old = {"node": "n3", "code": "lost", "evidence": "it vanished", "run": "run", "time": 0.0, "until": 10.0}
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(map(json.dumps, [old, {**old, "node": "n4", "more": 1}, {**old, "certainty": "?"}, 7])) + "\n")
    assert [(each.node, each.certainty) for each in findings(path, 1.0)] == [("n3", "likely")]


@pytest.mark.parametrize(("state", "in_service", "ready"), [
    *((f"{base}{mark}", True, False) for base in ("idle", "mixed", "allocated") for mark in "*~#!%@^"),
    *((f"{base}{mark}", True, True) for base in ("idle", "mixed", "allocated", "completing") for mark in ("", "-", "+")),
    ("planned", True, True), ("powered_down", True, False), ("POWERING_UP", True, False), ("reboot^", True, False),
    *((state, False, False) for state in ("down", "down*", "down~", "drained", "draining@", "drng", "maint", "allocated$",
                                          "inval", "future", "unk*", "failing"))])
def test_only_nodes_that_can_start_a_step_now_are_ready(state: str, in_service: bool, ready: bool) -> None:
    found = node_states(ask=lambda argv: f"n1|{state}|none\n")["n1"]
    assert (found.in_service, found.ready) == (in_service, ready)
