"""How well the localiser names what is bad in simulated clusters of 16 to 4,096 nodes, and how many rounds it takes.

Faults are planted as tests/doctor/planted.py says: none to nodes/32 bad nodes, rails and leaf uplinks, each with 20–80 % of its
bandwidth left; log-normal noise of 5 %, 1 % of samples lose 30–60 %; uplinks 1:1, 2:1 and 4:1; leaves known and unknown.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "doctor"))

from planted import SHARE, TAPERS, Outcome, cases, trial
from rich.console import Console
from rich.progress import track
from rich.table import Table


def row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Counts over some trials."""
    named, right, faults, found, covered = (sum(getattr(outcome.score, key) for outcome in outcomes)
                                            for key in ("named", "right", "faults", "found", "covered"))

    def share(part: int, whole: int) -> str:
        return f"{part}/{whole} = {part / whole:.2%}" if whole else "–"

    first = max((outcome.first for outcome in outcomes), default=0)
    retests = sorted(outcome.retests for outcome in outcomes)
    return (name, str(len(outcomes)), share(right, named), share(found, faults), share(covered, faults), str(first),
            f"{retests[len(retests) // 2]} ({retests[-1]})" if retests else "–")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = [*cases(arguments.trials)]
    with ProcessPoolExecutor() as pool:
        # The longest last cases first, so that no core waits for the other.
        outcomes = [*track(pool.map(trial, wanted[::-1]), total=len(wanted), description="trials", console=Console(stderr=True))]
    table = Table("clusters", "trials", "right of what is named", "named of what is bad", "named or in a set", "rounds at most",
                  "retests (most)")
    for nodes in SHARE:
        for known in (True, False):
            some = [outcome for outcome in outcomes if (outcome.case.nodes, outcome.case.known) == (nodes, known)]
            table.add_row(*row(f"{nodes:,} nodes, leaves {'known' if known else 'unknown'}", some))
    for taper in TAPERS:
        table.add_row(*row(f"uplinks {taper:.0f}:1", [outcome for outcome in outcomes if outcome.case.taper == taper]))
    table.add_row(*row("from 64 nodes on", [outcome for outcome in outcomes if outcome.case.nodes >= 64]))
    table.add_row(*row("all", outcomes))
    Console(width=150).print(table)
    for outcome in outcomes:
        said = outcome.score
        if said.right < said.named or said.covered < said.faults or outcome.first > outcome.limit:
            print(outcome)


if __name__ == "__main__":
    main()
