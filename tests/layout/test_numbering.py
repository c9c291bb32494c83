"""The groups that programs make of rank numbers, by their own rules, lie on nodes where the order wants them."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import NUMBERINGS
from hpc_mp.layout.placement import Degrees, Placement, letters_of, numbered, place

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
