"""Bytes on links between nodes and switches, and the order of ranks and of hosts that a job gets for them."""

import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import FABRIC, layouts, sizes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.cluster.topology import SwitchTree, read_topology
from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import degrees_of, layout_of, read_shape, undivided
from hpc_mp.layout.placement import ORDERS, ORDERS_WITH_CONTEXT, Degrees, Placement, normalize_order, place
from hpc_mp.planner.assignment import hosts_cost
from hpc_mp.planner.hosts import choose_host_order, expected_slow_links, host_words, kept_order_words, uplinks
from hpc_mp.planner.links import node_loads
from hpc_mp.planner.order import cheapest_order, choose_rank_order
from hpc_mp.planner.traffic import traffic_of
from hpc_mp.rundir.plan import Traffic


def seventy_billion(microbatches: int) -> Traffic:
    """A 70 B model in bf16 under ZeRO-1 at T4 P4 D4: 19.7 GB of the data axis per rank (6 bytes × 3/4 of 4.375 billion
    parameters), 67 MB per boundary, microbatch and direction; tensor groups stay inside a node."""
    return Traffic(pp=microbatches * 4096 * 8192 * 2, dp=6 * 3 / 4 * 4.375e9)


def busiest(placement: Placement, traffic: Traffic) -> float:
    return max(load.total for load in node_loads(placement, traffic))


def test_busiest_link_of_a_70_billion_model() -> None:
    """Out of the busiest node, m microbatches: DPT 157.5 GB + 0.27 GB × m, PDT 78.75 GB + 1.07 GB × m; even at m = 97."""
    def out(order: str, microbatches: int) -> float:
        return busiest(place(Degrees(4, 4, 4), order, 8), seventy_billion(microbatches))

    pp = seventy_billion(1).pp
    assert out("DPT", 10) == pytest.approx(157.5e9 + 10 * 4 * pp)
    assert out("PDT", 10) == pytest.approx(78.75e9 + 10 * 16 * pp)
    assert out("PDT", 97) < out("DPT", 97)
    assert out("PDT", 98) > out("DPT", 98)


def test_loads_name_the_node_and_the_axis() -> None:
    # Ranks 0 1 | 2: one pipeline of three stages. Node 0 sends an activation to node 1, node 1 a gradient back.
    loads = node_loads(place(Degrees(pipeline=3), "DPT", ranks_per_node=2), Traffic(tp=1, pp=10, dp=100))
    assert loads == (Traffic(0, 10, 0), Traffic(0, 10, 0))
    # A ring of three replicas closes: every node sends once.
    loads = node_loads(place(Degrees(data=3), "DPT", ranks_per_node=2), Traffic(tp=1, pp=10, dp=100))
    assert loads == (Traffic(0, 0, 100), Traffic(0, 0, 100))


@given(layouts(), st.builds(Traffic, tp=sizes, pp=sizes, dp=sizes, cp=sizes, cp_pairs=sizes))
def test_chosen_order_is_never_beaten(placement: Placement, moved: Traffic) -> None:
    rank_map = placement.rank_map
    chosen, costs = cheapest_order(placement.degrees, moved, placement.ranks_per_node, bandwidth=2.0, rank_map=rank_map)
    loads = {order: busiest(place(placement.degrees, order, placement.ranks_per_node, rank_map), moved)
             for order in (ORDERS if placement.degrees.context == 1 else ORDERS_WITH_CONTEXT)}
    assert {cost.order: cost.seconds for cost in costs} == {order: load / 2.0 for order, load in loads.items()}
    assert loads[chosen] == min(loads.values())
    first = next(iter(loads))
    assert first == normalize_order("DPT", placement.degrees.context)
    assert chosen == first or loads[chosen] < loads[first]  # ties: DPT


def test_the_busiest_node_counts() -> None:
    """T2 P2 D2 on 4 × 2 ranks. DPT: a node holds both tensor ranks of one stage, DTP one rank of each of two stages."""
    costs = cheapest_order(Degrees(2, 2, 2), Traffic(tp=0, pp=1, dp=10), 2, bandwidth=1.0)[1]
    assert all(cost.waited == cost.seconds for cost in costs)
    assert {cost.order: cost.waited for cost in costs} == {"DPT": 22, "DTP": 20, "PDT": 22, "PTD": 2, "TDP": 20, "TPD": 2}


def test_shard_groups_and_replicas_have_rings_of_their_own() -> None:
    """Eight replicas on four nodes, two on each; shard groups of two lie inside the nodes, of four on two of them."""
    placement = place(Degrees(data=8), "DPT", 2)
    assert [load.dp for load in node_loads(placement, Traffic(dp=1))] == [1] * 4
    assert [(load.dp, load.replicas) for load in node_loads(placement, Traffic(dp=1, replicas=1, shards=2))] == [(0, 2)] * 4
    assert [(load.dp, load.replicas) for load in node_loads(placement, Traffic(dp=1, replicas=1, shards=4))] == [(1, 2)] * 4


def test_context_ranks_send_around_a_ring_and_a_tied_weight_crosses_from_end_to_end() -> None:
    """Four context ranks on two nodes: one edge of the ring leaves a node, and four of twelve pairs."""
    loads = node_loads(place(Degrees(context=4), "DPCT", ranks_per_node=2), Traffic(cp=1, cp_pairs=1))
    assert [(load.cp, load.cp_pairs) for load in loads] == [(1, 4)] * 2
    loads = node_loads(place(Degrees(pipeline=3), "DPT", ranks_per_node=1), Traffic(tied=1))
    assert [load.tied for load in loads] == [1, 0, 1]


def test_state_is_shared_out_over_data_and_context() -> None:
    """D2 C2 with a rank on each node: one ring of four ranks, whichever of the two letters comes first."""
    for order in ("DPCT", "CPDT"):
        placement = place(Degrees(data=2, context=2), order, ranks_per_node=1)
        assert placement.state_groups == ((0, 1, 2, 3),)
        assert [load.dp for load in node_loads(placement, Traffic(dp=1))] == [1] * 4


# --- hosts and switches ----------------------------------------------------------------------------------------------


def test_bytes_out_of_leaf_switches() -> None:
    tree, placement = read_topology(FABRIC), place(Degrees(2, 2, 2), "DPT", 2)
    moved = Traffic(tp=100, pp=10, dp=1)
    # Nodes are (d, p): under n1 n2 n3 n4 leaf s1 holds stage 0 of both replicas, so activations leave it.
    assert uplinks(placement, moved, ("n1", "n2", "n3", "n4"), tree) == {"s1": Traffic(0, 40, 0), "s2": Traffic(0, 40, 0)}
    # Under n1 n3 n2 n4 it holds a whole replica: gradients leave it.
    assert uplinks(placement, moved, ("n1", "n3", "n2", "n4"), tree) == {"s1": Traffic(0, 0, 4), "s2": Traffic(0, 0, 4)}
    assert hosts_cost(placement, moved, tree)(("n1", "n3", "n2", "n4")) == 4
    assert hosts_cost(placement, moved, SwitchTree())(("n1", "n3", "n2", "n4")) == 22  # each host its own leaf
    with pytest.raises(HpcMpError, match="3 hosts: are fewer than the 4 nodes"):
        uplinks(placement, moved, ("n1", "n2", "n3"), tree)


# --- the order that a job gets ---------------------------------------------------------------------------------------


GIVEN, PAIRED = ("n1", "n2", "n3", "n4"), ("n1", "n3", "n2", "n4")


def measured(days: float = 3, **rates: float) -> LinkRates:
    """So long ago, 0.0239 GB/s between any of n1 to n4, but for ``n1_n2`` and the like."""
    pairs = [(i, j, rates.get(f"{GIVEN[i]}_{GIVEN[j]}", 0.0239)) for i, j in combinations(range(4), 2)]
    return LinkRates("lab", time.time() - days * 86400, GIVEN, tuple(pairs))


def job(device: str = "cpu", microbatches: int = 4, **parallel: Any) -> JobSpec:
    """T2 P2 D2 on 4 × 2 ranks; two layers per stage."""
    return resolve({
        "job": {"nodes": 4, "ranks_per_node": 2, "device": device},
        "model": {"config": {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688,
                             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}},
        "data": {"files": ["text"], "sequence_length": 128},
        "parallel": {"tensor": 2, "pipeline": 2, "microbatches": microbatches, **parallel},
        "train": {"steps": 1, "global_batch": 2 * microbatches},
    }, Path("/"))


def order(spec: JobSpec) -> str:
    return choose_rank_order(undivided(spec), traffic(spec)).letters


def traffic(spec: JobSpec) -> Traffic:
    shape = read_shape(spec)
    return traffic_of(layout_of(spec, shape), shape)


@pytest.mark.parametrize(("spec", "letters"), [
    (job("cuda"), "DPT"),  # 3.4 MB of gradients a rank and step, 4.2 MB of tensor traffic
    (job("cpu"), "DPT"),
    (job("cpu", microbatches=16), "DPT"),
    (job("cpu", rank_map="cyclic"), "TDP"),  # the left-most letter stays inside a node
    (job("cpu", order="spread"), "TPD")])
def test_the_order_follows_traffic_and_map(spec: JobSpec, letters: str) -> None:
    assert order(spec) == letters


def test_the_reason_gives_bytes() -> None:
    spec = job()
    assert choose_rank_order(undivided(spec), traffic(spec)).why == (
        "a step waits for 7.91 MB on links between nodes, in the worst order 16.3 MB")


def test_the_reason_gives_seconds_where_the_doctor_has_measured() -> None:
    spec = job()
    def why(days: float) -> str:
        return choose_rank_order(undivided(spec), traffic(spec), measured(days, n1_n2=0.01)).why

    bytes_alone = "a step waits for 7.91 MB on links between nodes, in the worst order 16.3 MB"
    assert why(3) == f"{bytes_alone}; 331 ms at the 23.9 MB/s measured 3 d ago"
    assert why(31) == bytes_alone


def hosts(spec: JobSpec, letters: str, tree: SwitchTree, rates: LinkRates | None = None) -> tuple[tuple[str, ...], str]:
    return choose_host_order(place(degrees_of(spec), letters, 2, spec.parallel.rank_map), traffic(spec), GIVEN, tree, rates)


def test_hosts_follow_the_traffic_of_the_order() -> None:
    tree = read_topology(FABRIC)
    # PDT: nodes are (stage, replica). Gradients are heavy, activations light: both replicas of a stage under one leaf.
    assert hosts(job(), "PDT", tree) == (PAIRED, (
        "rank map: n1 n3 n2 n4 → 2.1 MB per step out of the busiest leaf switch, 13.7 MB in the order given"))
    placement = place(degrees_of(job()), "PDT", 2)
    words = host_words(hosts_cost(placement, Traffic(), tree), GIVEN, GIVEN)
    assert words == "rank map: n1 n2 n3 n4 → no traffic leaves a leaf switch"
    # DPT: nodes are (replica, stage): as given, the replicas of a stage are under one leaf already.
    assert hosts(job(), "DPT", tree)[0] == GIVEN


def test_hosts_stay_as_given_without_a_topology() -> None:
    assert hosts(job(), "PDT", SwitchTree())[0] == GIVEN


def test_hosts_follow_measured_rates() -> None:
    """DPT: nodes are (replica, stage). 1 and 3, 2 and 4 are replicas of a stage, 1 and 2, 3 and 4 stages of a replica."""
    nothing, tree = SwitchTree(), read_topology(FABRIC)
    assert hosts(job(), "DPT", nothing, measured(n1_n3=0.0239 * 0.38)) == (("n1", "n2", "n4", "n3"), (
        "rank map: n1 n2 n4 n3 → 331 ms per step on the busiest path at the rates measured 3 d ago, 755 ms in the order given; "
        "n1–n3 has 38 % of the usual rate: carries nothing"))
    assert hosts(job(), "DPT", nothing, measured(n1_n2=0.0239 * 0.38))[0] == ("n1", "n4", "n3", "n2")
    # Negative controls: a slow way that nothing goes by, rates that are almost alike or old.
    assert hosts(job(), "DPT", nothing, measured(n1_n4=0.0239 * 0.38))[0] == GIVEN
    for alike in (measured(n1_n3=0.0239 * 0.9), measured(days=31, n1_n3=0.001)):
        assert hosts(job(), "DPT", nothing, alike) == (GIVEN, "rank map: in Slurm's order of hosts")
        assert hosts(job(), "PDT", tree, alike) == hosts(job(), "PDT", tree)


def test_switches_decide_between_orders_that_rates_call_equal() -> None:
    """PDT wants n1 beside n3 (``FABRIC``); a slow n1–n2 must stand at a corner that nothing crosses."""
    tree = read_topology(FABRIC)
    assert hosts(job(), "PDT", tree)[0] == hosts(job(), "PDT", tree, measured(n1_n4=0.001))[0] == PAIRED
    assert hosts(job(), "PDT", tree, measured(n1_n2=0.001))[0] == ("n1", "n3", "n4", "n2")
    assert hosts(job(), "PDT", tree, measured(n1_n3=0.001))[0] not in (PAIRED, ("n1", "n3", "n4", "n2"))


@pytest.mark.parametrize(("rates", "words"), [
    (measured(n2_n3=0.001), "; it does not avoid slow links, measured 3 d ago: n2–n3 has 4 % of the usual rate"),
    (measured(n1_n4=0.0001, n2_n3=0.001), "n1–n4 has 0 % of the usual rate, n2–n3 has 4 % of the usual rate"),
    (measured(days=40, n2_n3=0.001), "its traffic is unknown"), (measured(), "its traffic is unknown"),
    (None, "its traffic is unknown")])
def test_a_program_whose_hosts_keep_their_order_is_told_of_slow_links(rates: Any, words: str) -> None:
    assert kept_order_words(GIVEN, rates).endswith(words)
    assert "slow links" not in kept_order_words(("n1", "n2"), rates)


def test_a_launch_says_what_hosts_will_be_put_in_order_by() -> None:
    assert expected_slow_links("auto", 4, measured(n2_n3=0.001)) == (
        "slow links will carry the least: measured 3 d ago, n2–n3 has 4 % of the usual rate")
    assert expected_slow_links("auto", 4, measured(days=40, n2_n3=0.001)) == (
        "rates were measured 40 d ago and are used for 30 days: run `hpc-mp doctor` again")
    assert expected_slow_links("auto", 4, None) is expected_slow_links("auto", 4, measured()) is None
    assert expected_slow_links("cyclic", 4, measured(n2_n3=0.001)) is None
