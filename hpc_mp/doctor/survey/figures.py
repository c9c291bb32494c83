"""Figures of a survey: bandwidth matrix, bars per node, switches with marked suspects; as positions and colours, and drawn on a
terminal. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median
from types import SimpleNamespace

from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import data_rate
from hpc_mp.cluster.topology.model import natural
from hpc_mp.doctor.localise import LINK
from hpc_mp.doctor.survey.diagnosis import Diagnosis
from hpc_mp.doctor.survey.report import Report
from hpc_mp.report import colours
from hpc_mp.report.colours import Shade

MOST_CELLS = 256  # nodes; a larger matrix is unreadable
MOST_BARS = 48  # of more nodes only the slowest are shown
MOST_LEAVES = 48
TEXT_FROM = 22  # least pixels of a cell with a number
LABEL, MATRIX = 96, 640  # pixels
STOPS = ((0.0, (122, 10, 18)), (0.5, (214, 96, 48)), (0.8, (246, 196, 92)), (0.95, (158, 202, 225)), (1.1, (33, 102, 172)))
"""Share of the expected rate → colour: red to blue, told apart with any kind of colour vision."""
NOTHING = (58, 58, 58)  # no transfer succeeded


def matrix(report: Report) -> SimpleNamespace | None:
    """Return the bandwidth matrix, None if nothing was measured or there are too many nodes. ``side``: pixels of a cell;
    ``names``: rows (senders) and columns (receivers); ``marked``: the names with a fault. The text of a cell is the percent of
    the expected rate."""
    evidence, expected = report.evidence, _expected(report)
    if expected is None or len(evidence.nodes) > MOST_CELLS:
        return None
    side = min(52.0, MATRIX / len(evidence.nodes))
    rates = grouped(((sender, receiver), rate) for (sender, receiver, _), rate in report.rates.items())
    cells = []
    for (sender, receiver), by_rail in sorted(rates.items()):
        successes = [rate for rate in by_rail if rate is not None]
        worst = min(successes) if len(successes) == len(by_rail) else None
        share = None if worst is None else worst / expected
        tip = "no transfer succeeded" if worst is None else f"{data_rate(worst)}, {share:.0%} of what is expected"
        text = "×" if share is None else f"{share * 100:.0f}"
        cells.append(SimpleNamespace(row=sender, column=receiver, text=text if side >= TEXT_FROM else "", shade=shade(share),
                                     tip=f"{evidence.nodes[sender]} → {evidence.nodes[receiver]}: {tip}"))
    return SimpleNamespace(names=evidence.nodes, marked=faults_of(report.diagnoses).keys(), side=side, cells=cells)


def bars(report: Report) -> tuple[SimpleNamespace, ...]:
    """Return the bars of all nodes, or of the slowest if there are many, in node order: the median rate of a node's transfers,
    None if none succeeded, and its share of the expected rate."""
    expected = _expected(report)
    if expected is None:
        return ()
    rates: dict[int, list[float]] = {node: [] for node in range(len(report.evidence.nodes))}
    for (sender, receiver, _), rate in report.rates.items():
        for node in (sender, receiver):
            rates[node] += [] if rate is None else [rate]
    usual = {node: median(node_rates) if node_rates else None for node, node_rates in rates.items()}
    slowest = sorted(usual, key=lambda node: usual[node] or 0.0)[:MOST_BARS]
    faults = faults_of(report.diagnoses)
    rate_bars = []
    for node in sorted(slowest):
        rate, name = usual[node], report.evidence.nodes[node]
        share = None if rate is None else rate / expected
        fault = faults.get(name, "")
        rate_bars.append(SimpleNamespace(name=name, rate=rate, share=share or 0.0, fault=fault, shade=shade(share)))
    return tuple(rate_bars)


def switches(report: Report) -> SimpleNamespace:
    """Return the switch tree, with faulty links between two nodes listed separately; a leaf's fault is its uplink's, and its
    nodes are pairs of a name and a fault or "". Leaves with a fault are kept first; without a known topology one leaf has all."""
    evidence, faults = report.evidence, faults_of(report.diagnoses)
    members = grouped((evidence.leaves.get(node, ""), node) for node in (*evidence.nodes, *evidence.absent))
    leaves = [SimpleNamespace(name=name, fault=faults.get(name, ""),
                              nodes=tuple((node, faults.get(node, "")) for node in sorted(nodes, key=natural)))
              for name, nodes in members.items()]
    leaves.sort(key=lambda leaf: (not (leaf.fault or any(fault for _, fault in leaf.nodes)), natural(leaf.name)))
    links = tuple((diagnosis.subject, diagnosis.code) for diagnosis in report.diagnoses if diagnosis.code.startswith("link"))
    return SimpleNamespace(leaves=sorted(leaves[:MOST_LEAVES], key=lambda leaf: natural(leaf.name)), links=links,
                           left_out=len(leaves[MOST_LEAVES:]))


def faults_of(diagnoses: Sequence[Diagnosis]) -> dict[str, str]:
    """Return the code of the first fault by node or leaf; uncertain faults get a question mark."""
    faults: dict[str, str] = {}
    for diagnosis in diagnoses:
        if LINK not in diagnosis.subject:
            for member in diagnosis.members:
                faults.setdefault(member.partition(" rail ")[0], diagnosis.code + ("" if diagnosis.certain else "?"))
    return faults


def shade(share: float | None) -> Shade:
    """Return the colour of a fraction of the expected rate; None: no transfer succeeded."""
    return colours.shade(NOTHING if share is None else colours.mixed(STOPS, share))


def _expected(report: Report) -> float | None:
    return report.verdict.expected if report.verdict is not None and report.verdict.expected else None


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


def _heat_map(heat: SimpleNamespace) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0))
    table.add_column("")
    for name in heat.names:
        table.add_column(Text(f" {name} ", FAULT if name in heat.marked else ""), justify="center")
    cells = {(cell.row, cell.column): cell for cell in heat.cells}
    for row, name in enumerate(heat.names):
        drawn = [Text(f"{cell.text:^5}", Style(color=cell.shade.ink, bgcolor=cell.shade.fill)) if cell else Text("  ·  ", "dim")
                 for cell in (cells.get((row, column)) for column in range(len(heat.names)))]
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
