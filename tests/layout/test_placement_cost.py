"""Bytes on links between nodes and switches, and the order that they choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import FABRIC, layouts, sizes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.topology import SwitchTree, order_hosts, read_topology
from hpc_mp.layout.placement import (
    GLOO,
    ORDERS,
    Degrees,
    Placement,
    Traffic,
    busiest_link,
    choose_order,
    normalize_order,
    place,
    traffic,
)
from hpc_mp.layout.placement.cost import node_loads
from hpc_mp.planner.hosts import host_words, hosts_cost, uplinks


def seventy_billion(microbatches: int, zero: int = 1) -> Traffic:
    """A 70 B model in bf16 at T4 P4 D4: 8.75 GB of gradients per rank, 67 MB per boundary, microbatch and direction."""
    return traffic(Degrees(4, 4, 4), hidden=8192, sequence=4096, microbatch_size=1, microbatches=microbatches,
                   layers_per_stage=20, stage_parameters=4_375_000_000, bytes_per_element=2, zero=zero)


def test_traffic_of_a_70_billion_model() -> None:
    found = seventy_billion(microbatches=1)
    assert found.dp == pytest.approx(13.125e9)  # 2 × 3/4 × 8.75 GB
    assert found.pp == 4096 * 8192 * 2
    assert found.tp == 4 * 20 * 2 * 3 / 4 * found.pp  # 4 all-reduces a layer, each 2 × 3/4 of an activation
    assert seventy_billion(8).pp == 8 * found.pp
    reduce_scatter = 3 / 4 * 8.75e9
    for zero, collectives in ((0, 2), (1, 2), (2, 8 + 1), (3, 3 * 8)):
        assert seventy_billion(8, zero).dp == pytest.approx(collectives * reduce_scatter)


def test_axes_of_degree_one_carry_nothing() -> None:
    assert traffic(Degrees(), hidden=8, sequence=8, microbatch_size=1, microbatches=4, layers_per_stage=2,
                   stage_parameters=100, bytes_per_element=4, zero=0) == Traffic(0, 0, 0)


def test_busiest_link_of_a_70_billion_model() -> None:
    """Out of the busiest node, m microbatches: DPT 105 GB + 0.27 GB × m, PDT 52 GB + 1.07 GB × m; even at m = 65."""
    def out(order: str, microbatches: int) -> float:
        return busiest_link(place(Degrees(4, 4, 4), order, 8), seventy_billion(microbatches))

    pp = seventy_billion(1).pp
    assert out("DPT", 10) == pytest.approx(105e9 + 10 * 4 * pp)
    assert out("PDT", 10) == pytest.approx(52.5e9 + 10 * 16 * pp)
    assert out("PDT", 65) < out("DPT", 65)
    assert out("PDT", 66) > out("DPT", 66)


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
    chosen, costs = choose_order(Degrees(4, 4, 4), heavy, ranks_per_node=8, bandwidth=2.0)
    assert chosen == order
    assert [cost.order for cost in costs] == list(ORDERS)
    assert all(cost.seconds == cost.load.total / 2.0 for cost in costs)
    assert min(cost.seconds for cost in costs) == {cost.order: cost.seconds for cost in costs}[order]


@given(layouts(), st.tuples(sizes, sizes, sizes))
def test_chosen_order_is_never_beaten(placement: Placement, weights: tuple[int, int, int]) -> None:
    rank_map = placement.rank_map
    chosen, costs = choose_order(placement.degrees, Traffic(*weights), placement.ranks_per_node, rank_map=rank_map)
    loads = {order: busiest_link(place(placement.degrees, order, placement.ranks_per_node, rank_map), Traffic(*weights))
             for order in (cost.order for cost in costs)}
    assert loads[chosen] == min(loads.values())
    first = next(iter(loads))
    assert first == normalize_order("DPT", placement.degrees.context)
    assert chosen == first or loads[chosen] < loads[first]  # ties: DPT


def test_the_map_changes_the_choice() -> None:
    """Two nodes of two ranks, T2 D2: in block order the right-most letter stays inside a node, in cyclic the left-most."""
    heavy_tensor = Traffic(tp=9, dp=1)
    assert choose_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map="block")[0] == "DPT"
    assert choose_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map="cyclic")[0] == "PTD"
    assert choose_order(Degrees(tensor=2, data=2), heavy_tensor, 2, rank_map=(0, 1, 0, 1))[0] == "PTD"


def test_stages_that_take_turns_wait_longer() -> None:
    """T2 P2 D2 on 4 × 2 ranks. DPT: a node holds both tensor ranks of one stage, DTP one rank of each of two stages."""
    def waited(in_turn: bool) -> dict[str, float]:
        costs = choose_order(Degrees(2, 2, 2), Traffic(tp=0, pp=1, dp=10), 2, bandwidth=1.0, stages_in_turn=in_turn)[1]
        assert all(cost.waited == cost.seconds for cost in costs)
        return {cost.order: cost.waited for cost in costs}

    assert waited(False) == {"DPT": 22, "DTP": 20, "PDT": 22, "PTD": 2, "TDP": 20, "TPD": 2}
    assert waited(True) == {"DPT": 42, "DTP": 20, "PDT": 42, "PTD": 2, "TDP": 20, "TPD": 2}


def test_gloo_makes_a_reduce_scatter_of_an_all_reduce() -> None:
    def dp(zero: int) -> float:
        return traffic(Degrees(data=4), hidden=8, sequence=8, microbatch_size=1, microbatches=5, layers_per_stage=1,
                       stage_parameters=4, bytes_per_element=1, zero=zero, backend=GLOO).dp / 3  # (D−1)/D S = 3

    assert [dp(zero) for zero in range(4)] == [2, 3, 11, 20]


def test_orders_are_equal_on_one_node() -> None:
    chosen, costs = choose_order(Degrees(2, 2, 2), Traffic(1, 1, 1), ranks_per_node=8)
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
