"""Bytes on links between nodes and switches, and the order that they choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import FABRIC, layouts, sizes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.topology import SwitchTree, order_hosts, read_topology
from hpc_mp.layout.placement import ORDERS, Degrees, Placement, normalize_order, place
from hpc_mp.planner.hosts import host_words, hosts_cost, uplinks
from hpc_mp.planner.links import node_loads
from hpc_mp.planner.order import cheapest_order
from hpc_mp.rundir.plan import Traffic


def seventy_billion(microbatches: int) -> Traffic:
    """A 70 B model in bf16 under ZeRO-1 at T4 P4 D4: 19.7 GB of the data axis per rank (6 bytes × 3/4 of 4.375 billion
    parameters), 67 MB per boundary, microbatch and direction; tensor groups stay inside a node."""
    return Traffic(pp=microbatches * 4096 * 8192 * 2, dp=6 * 3 / 4 * 4.375e9)


def busiest(placement: Placement, traffic: Traffic) -> float:
    """Bytes that leave the busiest node."""
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


@pytest.mark.parametrize(("heavy", "order"), [
    (Traffic(), "DPT"),  # no traffic: all tie
    # Edges out of the busiest node (T, P, D): DPT 0 4 8, DTP 4 0 8, PDT 0 16 4, PTD 4 16 0, TDP 8 0 4, TPD 8 4 0.
    (Traffic(tp=9, pp=1, dp=1), "DPT"),
    (Traffic(tp=9, pp=1, dp=8), "PDT"),
    (Traffic(tp=1, pp=9, dp=1), "DTP"),  # ties with TDP
    (Traffic(tp=1, pp=1, dp=9), "TPD"),
    (Traffic(tp=5, pp=1, dp=9), "PTD"),
])
def test_the_heavy_axis_stays_inside_a_node(heavy: Traffic, order: str) -> None:
    chosen, costs = cheapest_order(Degrees(4, 4, 4), heavy, ranks_per_node=8, bandwidth=2.0)
    assert chosen == order
    assert [cost.order for cost in costs] == list(ORDERS)
    assert all(cost.seconds == cost.load.total / 2.0 for cost in costs)
    assert min(cost.seconds for cost in costs) == {cost.order: cost.seconds for cost in costs}[order]


@given(layouts(), st.tuples(sizes, sizes, sizes))
def test_chosen_order_is_never_beaten(placement: Placement, weights: tuple[int, int, int]) -> None:
    rank_map = placement.rank_map
    chosen, costs = cheapest_order(placement.degrees, Traffic(*weights), placement.ranks_per_node, rank_map=rank_map)
    loads = {order: busiest(place(placement.degrees, order, placement.ranks_per_node, rank_map), Traffic(*weights))
             for order in (cost.order for cost in costs)}
    assert loads[chosen] == min(loads.values())
    first = next(iter(loads))
    assert first == normalize_order("DPT", placement.degrees.context)
    assert chosen == first or loads[chosen] < loads[first]  # ties: DPT


def test_the_map_changes_the_choice() -> None:
    """Two nodes of two ranks, T2 D2: in block order the right-most letter stays inside a node, in cyclic the left-most."""
    heavy_tensor = Traffic(tp=9, dp=1)
    assert cheapest_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map="block")[0] == "DPT"
    assert cheapest_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map="cyclic")[0] == "PTD"
    assert cheapest_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map=(0, 1, 0, 1))[0] == "PTD"


def test_the_busiest_node_counts() -> None:
    """T2 P2 D2 on 4 × 2 ranks. DPT: a node holds both tensor ranks of one stage, DTP one rank of each of two stages."""
    costs = cheapest_order(Degrees(2, 2, 2), Traffic(tp=0, pp=1, dp=10), 2, bandwidth=1.0)[1]
    assert all(cost.waited == cost.seconds for cost in costs)
    assert {cost.order: cost.waited for cost in costs} == {"DPT": 22, "DTP": 20, "PDT": 22, "PTD": 2, "TDP": 20, "TPD": 2}


def test_shard_groups_and_replicas_have_rings_of_their_own() -> None:
    """Eight replicas on four nodes, two on each; shard groups of two lie inside the nodes, of four on two of them."""
    placement = place(Degrees(data=8), "DPT", 2)
    whole = node_loads(placement, Traffic(dp=1))
    assert [load.dp for load in whole] == [1] * 4
    pairs = node_loads(placement, Traffic(dp=1, replicas=1, shards=2))
    assert [(load.dp, load.replicas) for load in pairs] == [(0, 2)] * 4
    fours = node_loads(placement, Traffic(dp=1, replicas=1, shards=4))
    assert [(load.dp, load.replicas) for load in fours] == [(1, 2)] * 4


def test_context_ranks_send_around_a_ring_or_to_each_other() -> None:
    """Four context ranks on two nodes: one edge of the ring leaves a node, and four of twelve pairs."""
    loads = node_loads(place(Degrees(context=4), "DPCT", ranks_per_node=2), Traffic(cp=1, cp_pairs=1))
    assert [(load.cp, load.cp_pairs) for load in loads] == [(1, 4)] * 2


def test_state_is_shared_out_over_data_and_context() -> None:
    """D2 C2 with a rank on each node: one ring of four ranks, whichever of the two letters comes first."""
    for order in ("DPCT", "CPDT"):
        placement = place(Degrees(data=2, context=2), order, ranks_per_node=1)
        assert placement.state_groups == ((0, 1, 2, 3),)
        assert [load.dp for load in node_loads(placement, Traffic(dp=1))] == [1] * 4


def test_context_may_stay_inside_a_node_instead_of_tensor() -> None:
    """T2 C2 on two nodes of two ranks: the heavier of the two axes does."""
    degrees = Degrees(tensor=2, context=2)
    assert cheapest_order(degrees, Traffic(tp=9, cp=1), 2)[0] == "DPCT"
    assert cheapest_order(degrees, Traffic(tp=1, cp=9), 2)[0] == "DPTC"
    assert cheapest_order(degrees, Traffic(tp=1, cp_pairs=9), 2)[0] == "DPTC"


def test_a_tied_weight_crosses_from_end_to_end() -> None:
    loads = node_loads(place(Degrees(pipeline=3), "DPT", ranks_per_node=1), Traffic(tied=1))
    assert [load.tied for load in loads] == [1, 0, 1]


def test_orders_are_equal_on_one_node() -> None:
    chosen, costs = cheapest_order(Degrees(2, 2, 2), Traffic(1, 1, 1), ranks_per_node=8)
    assert chosen == "DPT"
    assert {cost.seconds for cost in costs} == {0.0}


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


def test_hosts_ordered_by_what_they_send() -> None:
    tree, placement = read_topology(FABRIC), place(Degrees(2, 2, 2), "DPT", 2)
    given = ("n1", "n2", "n3", "n4")

    def ordered(moved: Traffic) -> tuple[str, ...]:
        cost = hosts_cost(placement, moved, tree)
        return order_hosts(given, tree, lambda hosts: (cost(hosts),))

    assert ordered(Traffic(pp=10e6, dp=1e6)) == ("n1", "n3", "n2", "n4")
    assert ordered(Traffic(pp=1e6, dp=10e6)) == given
    assert host_words(placement, Traffic(pp=10e6, dp=1e6), given, ("n1", "n3", "n2", "n4"), tree) == (
        "rank map: n1 n3 n2 n4 → 4 MB per step out of the busiest leaf switch, 40 MB in the order given")
    assert host_words(placement, Traffic(), given, given, tree) == "rank map: n1 n2 n3 n4 → no traffic leaves a leaf switch"
