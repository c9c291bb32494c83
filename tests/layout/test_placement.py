"""Placement: the golden tables of SageMaker's letter orders, their identities, cost, and the groups that programs make."""

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import COST_DEGREES, COSTS, layouts, rows
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import NUMBERINGS
from hpc_mp.layout import placement as placing
from hpc_mp.layout.placement import Degrees, Placement, from_dict, letters_of, normalize_order, numbered, place, to_dict

GOLDEN = Path(__file__).parents[1] / "golden"

# T = P = D = 2: order | tp | pp | dp (SageMaker's rdp) | mp (T × P) | tp_dp (SageMaker's dp)
GROUPS = table(__file__, "placement.toml", "groups")


@pytest.mark.parametrize("row", rows(GROUPS), ids=lambda row: row[0])
def test_groups_of_all_six_orders(row: list[str]) -> None:
    order, *cells = row
    groups = place(Degrees(2, 2, 2), order).groups
    assert set(groups) == {"tp", "pp", "dp", "mp", "tp_dp"}
    for name, cell in zip(("tp", "pp", "dp", "mp", "tp_dp"), cells, strict=True):
        assert groups[name] == tuple(tuple(map(int, group)) for group in cell.split()), name


@pytest.mark.parametrize("row", rows(COSTS), ids=lambda row: row[0])
def test_nodes_spanned_and_hops_on_64_ranks(row: list[str]) -> None:
    order, *cells = row
    for degrees, cell in zip(COST_DEGREES, cells, strict=True):
        reach = placing.reach_of(place(degrees, order, ranks_per_node=8))
        assert " ".join(f"{reach[axis].nodes},{reach[axis].hops}" for axis in ("tp", "pp", "dp")) == cell, degrees


@given(layouts())
def test_ranks_are_an_axis_permutation_of_an_arange(placement: Placement) -> None:
    d = placement.degrees
    ranges = {"D": range(d.data), "P": range(d.pipeline), "C": range(d.context), "T": range(d.tensor)}
    grid = product(*(ranges[letter] for letter in placement.order))  # the right-most varies fastest
    for rank, (at, coordinates) in enumerate(zip(placement.ranks, grid, strict=True)):
        assert at.rank == rank
        assert {"D": at.dp, "P": at.pp, "C": at.cp, "T": at.tp} == dict(zip(placement.order, coordinates, strict=True))


@given(layouts())
def test_ranks_lie_on_nodes_as_the_map_says(placement: Placement) -> None:
    nodes, per_node = -(-placement.degrees.world // placement.ranks_per_node), placement.ranks_per_node
    node_of = {"auto": lambda rank: rank // per_node, "block": lambda rank: rank // per_node, "cyclic": lambda rank: rank % nodes}
    for at in placement.ranks:
        said = placement.rank_map[at.rank] if isinstance(placement.rank_map, tuple) else node_of[placement.rank_map](at.rank)
        assert at.node == said
    for node in range(nodes):  # local ranks count up with the ranks of a node, and fit
        local = [at.local_rank for at in placement.ranks if at.node == node]
        assert local == list(range(len(local)))
        assert 0 < len(local) <= per_node
    assert placement.nodes == nodes
    block = place(placement.degrees, placement.order, per_node)
    assert placement.groups == block.groups  # a map moves ranks, it changes no coordinate


@given(layouts())
def test_group_identities(placement: Placement) -> None:
    d, groups = placement.degrees, placement.groups
    world = d.world
    # dp_size = world / pp, rdp_size = world / (pp · tp), mp_size = pp · tp (context 1; else per context rank)
    wanted = {"tp": d.tensor, "pp": d.pipeline, "dp": world // (d.pipeline * d.tensor * d.context),
              "mp": d.pipeline * d.tensor, "tp_dp": world // (d.pipeline * d.context), "cp": d.context, "ep": d.expert,
              "edp": world // (d.pipeline * d.tensor * d.expert)}
    for name, members in groups.items():
        assert {len(group) for group in members} == {wanted[name]}
        assert sorted(rank for group in members for rank in group) == list(range(world))
        assert all(list(group) == sorted(group) for group in members)
        assert list(members) == sorted(members)
    assert ("cp" in groups, "ep" in groups) == (d.context > 1, d.expert > 1)
    of = {name: {rank: set(group) for group in members for rank in group} for name, members in groups.items()}
    for rank in range(world):
        assert of["tp"][rank] | of["dp"][rank] <= of["tp_dp"][rank]
        assert of["tp"][rank] | of["pp"][rank] <= of["mp"][rank]
        assert of["tp"][rank] & of["dp"][rank] & of["pp"][rank] == {rank}
        if "ep" in groups:
            at = placement.ranks[rank]
            assert all((placement.ranks[r].pp, placement.ranks[r].tp) == (at.pp, at.tp) for r in of["ep"][rank])
            assert of["ep"][rank] & of["edp"][rank] == {rank}


@given(layouts())
def test_json_round_trip(placement: Placement) -> None:
    again = from_dict(json.loads(json.dumps(to_dict(placement))))
    assert again == placement
    assert again.groups == placement.groups


def test_expert_groups_are_consecutive_blocks() -> None:
    assert place(Degrees(tensor=2, data=4, expert=2), "DPT").groups["ep"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    across = place(Degrees(tensor=1, pipeline=2, data=2, context=2, expert=4), "DPCT").groups
    assert across["ep"] == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_context_goes_directly_before_tensor() -> None:
    assert [normalize_order(order, context=2) for order in ("DPT", "cluster", "spread", "PTD", "CDPT")] == [
        "DPCT", "DPCT", "CTPD", "PCTD", "CDPT"]
    assert normalize_order("DPT") == "DPT"


@pytest.mark.parametrize(("order", "remedy"), table(__file__, "placement.toml", "wrong_orders"))
def test_wrong_orders_are_refused(order: str, remedy: str) -> None:
    with pytest.raises(HpcMpError) as caught:
        normalize_order(order)
    assert remedy == caught.value.remedy[: len(remedy)]


def test_wrong_degrees_are_refused() -> None:
    with pytest.raises(HpcMpError, match=r"tensor = 0: must be at least 1"):
        Degrees(tensor=0)
    with pytest.raises(HpcMpError, match=r"expert = 3: does not divide data\(2\) × context\(2\) = 4"):
        Degrees(data=2, context=2, expert=3)
    with pytest.raises(HpcMpError, match="ranks_per_node = 0"):
        place(Degrees(), "DPT", ranks_per_node=0)


@pytest.mark.parametrize("tree", [
    {}, [], {"order": "DPT", "degrees": {"tensors": 1}, "ranks_per_node": 1, "ranks": []}])
def test_what_is_no_placement_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(HpcMpError, match="is not a placement"):
        from_dict(tree)


SIZES = st.sampled_from((1, 2, 3))
DEGREES = st.builds(Degrees, tensor=SIZES, pipeline=SIZES, data=SIZES, context=SIZES)


def of_megatron(degrees: Degrees) -> dict[str, set[tuple[int, ...]]]:
    """As Megatron-LM's RankGenerator does with its default order: strides from the first name on."""
    sizes = {"tp": degrees.tensor, "cp": degrees.context, "dp": degrees.data, "pp": degrees.pipeline}
    names = list(sizes)
    strides = {name: prod(sizes[other] for other in names[:at]) for at, name in enumerate(names)}

    def groups(name: str) -> set[tuple[int, ...]]:
        others = [range(sizes[other]) for other in names if other != name]
        bases = [sum(at * strides[other] for at, other in zip(index, [o for o in names if o != name], strict=True))
                 for index in product(*others)]
        return {tuple(base + at * strides[name] for at in range(sizes[name])) for base in bases}

    return {name: groups(name) for name in names}


def of_deepspeed(degrees: Degrees) -> dict[str, set[tuple[int, ...]]]:
    """As ProcessTopology does: a rank for each product of the axes pipe, data, model, in its order."""
    ranks = {at: rank for rank, at in enumerate(product(range(degrees.pipeline), range(degrees.data), range(degrees.tensor)))}

    def groups(axis: int) -> set[tuple[int, ...]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for at, rank in ranks.items():
            found.setdefault(at[:axis] + at[axis + 1:], []).append(rank)
        return set(map(tuple, found.values()))

    return {"pp": groups(0), "dp": groups(1), "tp": groups(2)}


def own_groups(placement: Placement) -> dict[str, set[tuple[int, ...]]]:
    return {name: set(groups) for name, groups in placement.groups.items()}


@given(DEGREES, st.sampled_from(("auto", "cluster", "spread", "PDT", "TDP")), st.integers(1, 8))
def test_the_program_finds_its_own_groups(degrees: Degrees, order: str, ranks_per_node: int) -> None:
    """Whatever order they lie in: a program makes them of numbers alone."""
    found = own_groups(numbered(degrees, "megatron", order, ranks_per_node))
    for name, groups in of_megatron(degrees).items():
        assert found.get(name, groups) == groups, name
    if degrees.context == 1:
        deepspeed = own_groups(numbered(degrees, "deepspeed", order, ranks_per_node))
        assert {name: deepspeed[name] for name in ("pp", "dp", "tp")} == of_deepspeed(degrees)


@given(DEGREES, st.sampled_from(tuple(NUMBERINGS)), st.sampled_from(("cluster", "spread", "PDT", "TDP")), st.integers(1, 8))
def test_coordinates_lie_where_the_order_has_them(degrees: Degrees, numbering: str, order: str, ranks_per_node: int) -> None:
    wanted = {(each.dp, each.pp, each.cp, each.tp): each.node for each in place(degrees, order, ranks_per_node).ranks}
    found = numbered(degrees, numbering, order, ranks_per_node)
    assert {(each.dp, each.pp, each.cp, each.tp): each.node for each in found.ranks} == wanted
    assert [each.rank for each in found.ranks] == list(range(degrees.world))
    seats = {(each.node, each.local_rank) for each in found.ranks}
    assert len(seats) == degrees.world and max(local for _, local in seats) < ranks_per_node


def test_pipelines_inside_a_node_for_a_program_that_numbers_data_before_them() -> None:
    degrees = Degrees(tensor=2, pipeline=2, data=2)
    as_numbered = numbered(degrees, "megatron", "auto", 4)
    assert [each.node for each in as_numbered.ranks] == [0, 0, 0, 0, 1, 1, 1, 1] and as_numbered.order == "PDT"
    assert [each.node for each in numbered(degrees, "megatron", "cluster", 4).ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert numbered(degrees, "megatron", "PDT", 4).rank_map == "auto", "nothing is moved where the orders agree"
    assert [each.node for each in numbered(degrees, "DPT", "auto", 4, (1, 1, 0, 0, 1, 1, 0, 0)).ranks] == [1, 1, 0, 0, 1, 1, 0, 0]


def test_letters() -> None:
    assert [letters_of(name) for name in NUMBERINGS] == ["PDT"] * 4
    assert [letters_of(name, 2) for name in NUMBERINGS] == ["PDCT"] * 4 and letters_of("DPT", 2) == "DPCT"
    with pytest.raises(HpcMpError):
        letters_of("megatrom")
