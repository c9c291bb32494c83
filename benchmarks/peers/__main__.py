"""Tokens per second of ours and of its peers, relative to one plain process with one thread, in alternating turns.

    .venv/bin/python benchmarks/peers --deepspeed VENV/bin/python --json peers.jsonl     # started again, it goes on

The workload is a Llama of 10 M parameters, 8 sequences of 128 tokens a step, torch's fused AdamW in all ways, one thread per
rank, gloo. With bf16 all ways keep fp32 masters, the plain process too. The processes of all ways of a row live through its turns
and sleep in a read while another way runs; in a turn each way trains ``--steps`` steps, of which the first do not count. All ways
train the same samples from the same values; ``!`` marks a way whose losses in the first turn are not the plain process's.

DeepSpeed is no dependency: ``--deepspeed`` names the interpreter of an environment that has it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from group import Failed, Group
from rank import WARM_UP
from rows import ROWS, Row
from table import AGAIN, PLAIN, Turn, lines_of
from workload import SAMPLES, TOKENS, Layout

Result = TypeVar("Result")


def measured(name: str, row: Row, numbers: range, steps: int, pythons: dict[str, str], directory: Path) -> Iterator[Turn]:
    """Start all ways of a row, and yield its turns. ``pythons``: the interpreter of each way that can run."""
    with ExitStack() as stack:
        groups: dict[str, Group] = {}
        failed: dict[str, str] = {}
        for way, python in pythons.items():
            layout = Layout(precision=row.layout.precision) if way in (PLAIN, AGAIN) else row.layout
            groups[way] = Group(way, layout, python, directory)
            stack.callback(groups[way].close)

        def attempt(way: str, action: Callable[[], Result]) -> Result | None:
            """Return what an action of a way returns; end the ways that fail, which would disturb others."""
            try:
                return action()
            except Failed as error:
                groups[way].close()
                if way in (PLAIN, AGAIN):
                    sys.exit(f"{name}: the plain process failed: {error}")
                failed[way] = str(error)
                return None

        for way, group in groups.items():
            attempt(way, group.wait)
        for turn, number in enumerate(numbers):
            running = [way for way in pythons if way not in failed and way not in (PLAIN, AGAIN)]
            first = turn % max(1, len(running))  # another way comes first in each turn
            trained = {way: attempt(way, partial(groups[way].train, steps))
                       for way in (PLAIN, *running[first:], *running[:first], AGAIN)}
            seconds = {way: result[0] for way, result in trained.items() if result is not None}
            losses = {way: result[1] for way, result in trained.items() if result is not None}
            difference = {way: max(abs(a - b) for a, b in zip(losses[way], losses[PLAIN], strict=True))
                          for way in losses} if turn == 0 else {}
            yield Turn(name, number, steps, seconds, difference, dict(failed))


def read(file: Path | None) -> dict[str, list[Turn]]:
    """The turns that a file has already."""
    turns: dict[str, list[Turn]] = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            turn = Turn(**json.loads(line))
            turns.setdefault(turn.row, []).append(turn)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help=f"of a way in a turn; the first {WARM_UP} do not count")
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--json", type=Path, help="gets a line after each turn; turns that it has are not measured again")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="the interpreter of an environment with DeepSpeed 0.19")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    turns = read(arguments.json)
    chosen = {name: row for name, row in ROWS.items() if arguments.rows in name}
    with tempfile.TemporaryDirectory() as directory:
        for name, row in chosen.items():
            done = turns.setdefault(name, [])
            ways = [way for way in row.ways if arguments.deepspeed or not way.startswith("DeepSpeed")]
            pythons = {way: arguments.deepspeed if way.startswith("DeepSpeed") else sys.executable
                       for way in (PLAIN, *ways, AGAIN)}
            numbers = range(len(done), arguments.turns)
            for turn in measured(name, row, numbers, arguments.steps, pythons, Path(directory)) if numbers else ():
                done.append(turn)
                if arguments.json is not None:
                    with arguments.json.open("a") as file:
                        print(json.dumps(asdict(turn)), file=file)
                speeds = ", ".join(f"{way} {SAMPLES * TOKENS / seconds:.0f}" for way, seconds in turn.seconds.items())
                print(f"{name}, turn {turn.number + 1}: tokens/s {speeds}", file=sys.stderr, flush=True)
    print("\n".join(lines_of({name: turns[name] for name in chosen if turns[name]})))


if __name__ == "__main__":
    main()
