"""Turns, and the table of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rows import ROWS, Row

PLAIN, AGAIN = "plain", "plain again"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a row.

    Attributes:
        seconds: of a step, for each way that runs.
        difference: the largest difference of a loss from the plain process's, for each way.
        failed: ways that do not run, and why.
    """

    row: str
    number: int
    steps: int
    seconds: dict[str, float]
    difference: dict[str, float]
    failed: dict[str, str]

    @property
    def plain(self) -> float:
        return (self.seconds[PLAIN] + self.seconds[AGAIN]) / 2


def ratio(turn: Turn, way: str) -> float:
    """Tokens per second of a way over those of the plain processes before and after."""
    return turn.plain / turn.seconds[way]


def agrees(turns: Iterable[Turn], row: Row, way: str) -> bool:
    """True if the losses of a way are the plain process's, in the first turn of every start."""
    return all(turn.difference[way] <= row.tolerance for turn in turns if way in turn.difference)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):5.2f}  {min(values):.2f}-{max(values):.2f}"


def lines_of(turns: Mapping[str, Sequence[Turn]]) -> list[str]:
    """The table in lines."""
    lines = [f"{'':26}{'way':44}{'x plain  min-max':20}{'loss differs':>13}   ours / way  min-max"]
    for name, measured in turns.items():
        row, first = ROWS[name], name
        ours = _fastest(measured, row, row.ours)
        for way in row.ways:
            having = [turn for turn in measured if way in turn.seconds]
            if not having:
                why = next((turn.failed[way] for turn in measured if way in turn.failed), "skipped: no --deepspeed")
                lines.append(f"{first:26}{way:44}{why}")
            else:
                wrong = "" if agrees(having, row, way) else " !"
                both = [turn.seconds[way] / turn.seconds[ours] for turn in having if ours in turn.seconds]
                over = spread(both) if way != ours and both else ""
                differs = f"{max(turn.difference[way] for turn in having if way in turn.difference):.0e}{wrong}"
                lines.append(f"{first:26}{way:44}{spread([ratio(turn, way) for turn in having]):20}{differs:>13}   {over}")
            first = ""
        lines += [f"{'':26}{'our best / best peer':44}{best}" for best in [_best(measured, row)] if best]
        again = spread([turn.seconds[PLAIN] / turn.seconds[AGAIN] for turn in measured])
        lines.append(f"{'':26}{'A/A: plain again / plain':44}{again}   ({len(measured)} turns)")
    return lines


def _fastest(turns: Sequence[Turn], row: Row, ways: Iterable[str]) -> str:
    """The way of the best median; one with other losses does not count. Empty if none runs."""
    medians = {way: median(ratio(turn, way) for turn in turns if way in turn.seconds) for way in ways
               if any(way in turn.seconds for turn in turns) and agrees(turns, row, way)}
    return max(medians, key=medians.__getitem__, default="")


def _best(turns: Sequence[Turn], row: Row) -> str:
    """Our fastest way over the fastest peer, as the ratios of each turn."""
    ours, peer = _fastest(turns, row, row.ours), _fastest(turns, row, row.peers)
    both = [turn.seconds[peer] / turn.seconds[ours] for turn in turns if {peer, ours} <= turn.seconds.keys()]
    return f"{spread(both)}   ({ours} / {peer})" if both else ""
