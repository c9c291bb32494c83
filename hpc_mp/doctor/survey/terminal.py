"""Figures of a survey for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hpc_mp.base.text import data_rate
from hpc_mp.doctor.survey.figures import Matrix, MatrixCell, bars, matrix, switches
from hpc_mp.doctor.survey.report import Report

MOST_COLUMNS = 24  # nodes of the largest matrix that fits a terminal
BAR = 40  # characters of a bar at the expected rate
FAULT = Style(color="red", bold=True)


def pictures(report: Report) -> Iterator[RenderableType]:
    """Yield the switches with marked suspects, the matrix if it fits, and bars relative to the expected rate."""
    yield _tree(report)
    heat = matrix(report)
    if heat is not None and len(heat.names) <= MOST_COLUMNS:
        yield Text("\nPercent of the expected rate, from row to column")
        yield _heat_map(heat)
    if report.verdict is not None and report.verdict.expected:
        yield Text(f"\nMedian rate of every node; the mark stands at the expected {data_rate(report.verdict.expected)}")
        yield _bars(report)


def _heat_map(heat: Matrix) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0))
    table.add_column("")
    for name in heat.names:
        table.add_column(Text(f" {name} ", FAULT if name in heat.marked else ""), justify="center")
    cells = {(cell.row, cell.column): cell for cell in heat.cells}
    for row, name in enumerate(heat.names):
        drawn = [_cell(cells.get((row, column))) for column in range(len(heat.names))]
        table.add_row(Text(f"{name} ", FAULT if name in heat.marked else ""), *drawn)
    return table


def _bars(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for bar in bars(report):
        line = "█" * round(min(bar.share, 1.2) * BAR)
        drawn = Text.assemble((line[:BAR].ljust(BAR), bar.shade.fill), "│", (line[BAR:], bar.shade.fill))
        rate = "nothing" if bar.rate is None else data_rate(bar.rate)
        table.add_row(Text(bar.name, FAULT if bar.fault else ""), drawn, rate, Text(bar.fault, FAULT))
    return table


def _cell(cell: MatrixCell | None) -> Text:
    if cell is None:
        return Text("  ·  ", "dim")
    return Text(f"{cell.text:^5}", Style(color=cell.shade.ink, bgcolor=cell.shade.fill))


def _tree(report: Report) -> Tree:
    drawing = switches(report)
    root = Tree(Text("spine" if len(drawing.leaves) > 1 else "switches are not known" if drawing.leaves[0].name == "" else ""))
    for leaf in drawing.leaves:
        branch = root.add(_marked(leaf.name, leaf.fault)) if leaf.name else root
        well = [name for name, fault in leaf.nodes if not fault]
        if well:
            branch.add(Text(" ".join(well)))
        for name, fault in leaf.nodes:
            if fault:
                branch.add(_marked(name, fault))
    for subject, code in drawing.links:
        root.add(_marked(subject, code))
    if drawing.left_out:
        root.add(Text(f"and {drawing.left_out} leaves without a fault", "dim"))
    return root


def _marked(name: str, fault: str) -> Text:
    return Text(f"✗ {name}  {fault}", FAULT) if fault else Text(name)
