"""Placement: the golden tables of SageMaker's letter orders, their identities, cost, picture and command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hpc_mp.cli.main import cli
from hpc_mp.errors import HpcMpError
from hpc_mp.placement import (
    ORDERS,
    Degrees,
    Placement,
    Traffic,
    busiest_link,
    choose_order,
    from_dict,
    normalize_order,
    place,
    spans,
    to_dict,
    traffic,
)
from hpc_mp.placement.cost import node_loads
from hpc_mp.placement.picture import picture

GOLDEN = Path(__file__).parent / "golden"

# T = P = D = 2: order | tp | pp | dp (SageMaker's rdp) | mp (T × P) | tp_dp (SageMaker's dp)
GROUPS = """
DPT | 01 23 45 67 | 02 13 46 57 | 04 15 26 37 | 0123 4567 | 0145 2367
DTP | 02 13 46 57 | 01 23 45 67 | 04 15 26 37 | 0123 4567 | 0246 1357
PDT | 01 23 45 67 | 04 15 26 37 | 02 13 46 57 | 0145 2367 | 0123 4567
PTD | 02 13 46 57 | 04 15 26 37 | 01 23 45 67 | 0246 1357 | 0123 4567
TDP | 04 15 26 37 | 01 23 45 67 | 02 13 46 57 | 0145 2367 | 0246 1357
TPD | 04 15 26 37 | 02 13 46 57 | 01 23 45 67 | 0246 1357 | 0145 2367
"""

# 64 ranks, 8 a node: order | (nodes spanned, hops) for T P D, at T4 P4 D4 | T2 P4 D8 | T8 P4 D2
COSTS = """
DPT | 1,0 2,1 4,3 | 1,0 1,0 8,7 | 1,0 4,3 2,1
PDT | 1,0 4,3 2,1 | 1,0 4,3 2,1 | 1,0 4,3 2,1
PTD | 2,1 4,3 1,0 | 2,1 4,3 1,0 | 2,1 4,3 1,0
DTP | 2,1 1,0 4,3 | 1,0 1,0 8,7 | 4,3 1,0 2,1
TDP | 4,3 1,0 2,1 | 2,1 1,0 4,3 | 8,7 1,0 1,0
TPD | 4,3 2,1 1,0 | 2,1 4,3 1,0 | 8,7 1,0 1,0
"""
COST_DEGREES = (Degrees(4, 4, 4), Degrees(2, 4, 8), Degrees(8, 4, 2))


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


@pytest.mark.parametrize("row", rows(GROUPS), ids=lambda row: row[0])
def test_groups_of_all_six_orders(row: list[str]) -> None:
    order, *cells = row
    groups = place(Degrees(2, 2, 2), order).groups
    assert set(groups) == {"tp", "pp", "dp", "mp", "tp_dp"}
    for name, cell in zip(("tp", "pp", "dp", "mp", "tp_dp"), cells, strict=True):
        assert groups[name] == tuple(tuple(map(int, group)) for group in cell.split()), name


@pytest.mark.parametrize(("order", "expected"), [
    ("DPT", [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]),
    ("PTD", [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]),
])
def test_rank_rows_of_the_sagemaker_documentation(order: str, expected: list[tuple[int, int, int]]) -> None:
    assert [(p.dp, p.pp, p.tp) for p in place(Degrees(2, 2, 2), order).ranks] == expected


def test_pipelines_without_tensor_parallelism() -> None:
    degrees = Degrees(pipeline=2, data=4)
    assert place(degrees, "cluster").groups["pp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert place(degrees, "spread").groups["pp"] == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("row", rows(COSTS), ids=lambda row: row[0])
def test_nodes_spanned_and_hops_on_64_ranks(row: list[str]) -> None:
    order, *cells = row
    for degrees, cell in zip(COST_DEGREES, cells, strict=True):
        reach = spans(place(degrees, order, ranks_per_node=8))
        found = " ".join(f"{reach[axis].nodes},{reach[axis].hops}" for axis in ("tp", "pp", "dp"))
        assert found == cell, degrees


sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Placement:
    tensor, pipeline, data, context = (draw(sizes) for _ in range(4))
    expert = draw(st.sampled_from([e for e in range(1, data * context + 1) if data * context % e == 0]))
    order = draw(st.sampled_from(["".join(letters) for letters in permutations("DPCT")]))
    return place(Degrees(tensor, pipeline, data, context, expert), order, draw(st.integers(1, 9)))


@given(layouts())
def test_ranks_are_an_axis_permutation_of_an_arange(placement: Placement) -> None:
    d = placement.degrees
    ranges = {"D": range(d.data), "P": range(d.pipeline), "C": range(d.context), "T": range(d.tensor)}
    grid = product(*(ranges[letter] for letter in placement.order))  # the right-most varies fastest
    for rank, (at, coordinates) in enumerate(zip(placement.ranks, grid, strict=True)):
        assert at.rank == rank == at.node * placement.ranks_per_node + at.local_rank
        assert {"D": at.dp, "P": at.pp, "C": at.cp, "T": at.tp} == dict(zip(placement.order, coordinates, strict=True))


@given(layouts())
def test_group_identities(placement: Placement) -> None:
    d, groups = placement.degrees, placement.groups
    world = d.world
    # dp_size = world / pp, rdp_size = world / (pp · tp), mp_size = pp · tp (context 1; else per context rank)
    wanted = {"tp": d.tensor, "pp": d.pipeline, "dp": world // (d.pipeline * d.tensor * d.context),
              "mp": d.pipeline * d.tensor, "tp_dp": world // (d.pipeline * d.context), "cp": d.context, "ep": d.expert}
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


@given(layouts())
def test_json_round_trip(placement: Placement) -> None:
    again = from_dict(json.loads(json.dumps(to_dict(placement))))
    assert again == placement
    assert again.groups == placement.groups


def test_expert_groups_are_consecutive_blocks() -> None:
    groups = place(Degrees(tensor=2, data=4, expert=2), "DPT").groups
    assert groups["ep"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    across = place(Degrees(tensor=1, pipeline=2, data=2, context=2, expert=4), "DPCT").groups
    assert across["ep"] == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_last_node_may_be_part_filled() -> None:
    placement = place(Degrees(tensor=2, pipeline=2, data=3), "DPT", ranks_per_node=8)
    assert placement.nodes == 2
    assert [(p.node, p.local_rank) for p in placement.ranks[7:]] == [(0, 7), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_context_goes_directly_before_tensor() -> None:
    assert [normalize_order(order, context=2) for order in ("DPT", "cluster", "spread", "PTD", "CDPT")] == [
        "DPCT", "DPCT", "CTPD", "PCTD", "CDPT"]
    assert normalize_order("DPT") == "DPT"


@pytest.mark.parametrize(("order", "remedy"), [
    ("dpt", "write DPT"), ("dpct", "write DPCT"), ("Cluster", "use cluster"), ("DDP", "use cluster"),
    ("", "use cluster"), ("DPTE", "use cluster"),
])
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
    {}, [], {"order": "DPT", "degrees": {"tensors": 1}, "ranks_per_node": 1, "ranks": []},
])
def test_what_is_no_placement_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(HpcMpError, match="is not a placement"):
        from_dict(tree)


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
    chosen, costs = choose_order(placement.degrees, Traffic(*weights), placement.ranks_per_node)
    loads = {order: busiest_link(place(placement.degrees, order, placement.ranks_per_node), Traffic(*weights))
             for order in (cost.order for cost in costs)}
    assert loads[chosen] == min(loads.values())
    first = next(iter(loads))
    assert first == normalize_order("DPT", placement.degrees.context)
    assert chosen == first or loads[chosen] < loads[first]  # ties: DPT


def test_orders_are_equal_on_one_node() -> None:
    chosen, costs = choose_order(Degrees(2, 2, 2), Traffic(1, 1, 1), ranks_per_node=8)
    assert chosen == "DPT"
    assert {cost.seconds for cost in costs} == {0.0}


def rendered(placement: Placement, width: int = 80) -> str:
    console = Console(width=width, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(placement))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def test_picture() -> None:
    text = rendered(place(Degrees(tensor=2, pipeline=2, data=3), "cluster", 4))
    assert text == (GOLDEN / "placement.txt").read_text(encoding="utf-8")


def test_picture_colours_stages_and_tensor_groups() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        console.print(picture(place(Degrees(tensor=2, pipeline=2, data=2), "DPT")))
    cells = re.findall(r"\x1b\[([\d;]+)m *(\d) d", capture.get())
    assert {int(rank): style for style, rank in cells} == {  # cyan, bold yellow: every second tensor group is bold
        0: "36", 1: "36", 2: "1;33", 3: "1;33", 4: "36", 5: "36", 6: "1;33", 7: "1;33"}


def test_picture_is_bounded_and_fits_80_columns() -> None:
    text = rendered(place(Degrees(8, 8, 8), "DPT", 8))
    assert "… and 48 more nodes" in text
    assert "node 15" in text and "node 16" not in text
    assert max(map(len, text.splitlines())) <= 80


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["placement", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_prints_tables_and_marks_the_order() -> None:
    text = run("--tp", "2", "--pp", "4", "--dp", "8", "--order", "spread")
    assert "64 ranks on 8 nodes, order TPD" in text
    marked = [line.split() for line in text.splitlines() if line.startswith("→")]
    assert [line[1] for line in marked] == ["TPD"]
    table = {line.replace("→", " ").split()[0]: line for line in text.splitlines() if "(" in line and "/" in line}
    for order, _, cell, _ in rows(COSTS):
        assert " ".join(f"({pair.replace(',', ', ')})" for pair in cell.split()) in " ".join(table[order].split())


def test_command_prints_one_json_document() -> None:
    tree = json.loads(run(
        "--tp", "2", "--pp", "2", "--dp", "2", "--cp", "2", "--ep", "4", "--ranks-per-node", "4", "--json"))
    assert tree["order"] == "DPCT"
    assert tree["nodes"] == 4
    assert set(tree["ranks"][0]) == {"rank", "node", "local_rank", "dp", "pp", "cp", "tp"}
    assert set(tree["groups"]) == {"tp", "pp", "dp", "mp", "tp_dp", "cp", "ep"}
    assert tree["cost"] == tree["orders"]["DPCT"]
    assert from_dict(tree) == place(Degrees(2, 2, 2, 2, 4), "cluster", 4)


@pytest.mark.parametrize("arguments", ["--tp 0", "--order dpt", "--dp 2 --ep 3", "--ranks-per-node -1"])
def test_command_refuses_wrong_input(arguments: str) -> None:
    result = CliRunner().invoke(cli, ["placement", *arguments.split()])
    assert isinstance(result.exception, HpcMpError)


def test_command_exits_2_without_traceback_and_imports_no_torch() -> None:
    code = ("import sys\nfrom hpc_mp.cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n")

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "placement", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = start("--tp", "2", "--dp", "2")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "[]")
    bad = start("--order", "dpt")
    assert (bad.returncode, bad.stdout.splitlines()[-1]) == (2, "[]")
    assert bad.stderr == ("hpc-mp: order = 'dpt': must be cluster, spread, or a permutation of the letters DPT or "
                          "DPCT. Write DPT.\n")
