"""Placements shared by several tests."""

from itertools import permutations

from hypothesis import strategies as st
from tables import table

from hpc_mp.layout.placement import Degrees, Placement, place

# 64 ranks, 8 per node: order | (nodes spanned, hops) for T P D, at T4 P4 D4 | T2 P4 D8 | T8 P4 D2
COSTS = table(__file__, "placements.toml", "costs")
COST_DEGREES = (Degrees(4, 4, 4), Degrees(2, 4, 8), Degrees(8, 4, 2))

FABRIC = """SwitchName=s1 Nodes=n[1,3]
SwitchName=s2 Nodes=n[2,4]
SwitchName=spine Switches=s[1-2]
"""


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Placement:
    tensor, pipeline, data, context = (draw(sizes) for _ in range(4))
    expert = draw(st.sampled_from([e for e in range(1, data * context + 1) if data * context % e == 0]))
    order = draw(st.sampled_from(["".join(letters) for letters in permutations("DPCT")]))
    per_node, world = draw(st.integers(1, 9)), tensor * pipeline * data * context
    by_hand = draw(st.permutations([rank // per_node for rank in range(world)]).map(tuple))
    rank_map = draw(st.sampled_from(["auto", "block", "cyclic", by_hand]))
    return place(Degrees(tensor, pipeline, data, context, expert), order, per_node, rank_map)
