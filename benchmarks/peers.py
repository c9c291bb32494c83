"""Speed of our layouts beside other libraries' on a CPU, each over one plain process with one thread, in one run.

    python benchmarks/peers.py [--turns 7] [--row ZeRO] [--deepspeed PYTHON] [--json peers.json]

The ways of a row live at the same time and sleep until it is their turn; a turn lets each train some steps, plain transformers
before and after the others. A ratio is taken within a turn; shown are medians over turns. ``A/A`` is plain over plain.
The workload is in ``peer_ranks.py``. DeepSpeed is no dependency: ``--deepspeed`` names a Python that has it beside torch and
transformers. The file of ``--json`` gets a line for each turn; rows that are complete in it are not measured again.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import click

Turn = dict[str, float]  # way -> seconds of a step


@dataclass(frozen=True, slots=True)
class Row:
    """A layout: the number of ranks, the precision, our way and the others'."""

    ranks: int
    precision: str
    ours: str
    peers: tuple[str, ...]


ZERO = {0: ("DDP", "DeepSpeed 0"), 1: ("DDP, ZeroRedundancyOptimizer", "DeepSpeed 1"), 2: ("FSDP2, kept", "DeepSpeed 2"),
        3: ("FSDP2", "DeepSpeed 3")}
PIPELINES = ("torch 1F1B", "torch GPipe", "DeepSpeed pipeline")
ROWS = {f"ZeRO-{zero}": Row(2, "fp32", f"ours zero {zero}", peers) for zero, peers in ZERO.items()}
ROWS |= {"pp 2, 4 microbatches": Row(2, "fp32", "ours pp", PIPELINES),
         "tp 2": Row(2, "fp32", "ours tp", ("torch tensor", "DeepSpeed tensor")),
         "pp 2 × dp 2, ZeRO-1": Row(4, "fp32", "ours pp zero 1", ("torch 1F1B, DDP", "DeepSpeed pipeline, 1"))}
ROWS |= {f"bf16 ZeRO-{zero}": Row(2, "bf16", f"ours zero {zero}", tuple(peer for peer in ZERO[zero] if "DDP" not in peer))
         for zero in (1, 2, 3)}
ROWS |= {"bf16 pp 2, 4 microbatches": Row(2, "bf16", "ours pp", PIPELINES),
         "two threads": Row(1, "fp32", "two threads", ())}


@dataclass
class Way:
    """The processes of one way to train, which wait for numbers of steps."""

    name: str
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    answers: list[IO[str]] = field(default_factory=list)

    def start(self, row: Row, python: str, errors: Path) -> None:
        alone = self.name in ("plain", "two threads")
        world, threads = (1 if alone else row.ranks), "2" if self.name == "two threads" else "1"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        script, way = str(Path(__file__).with_name("peer_ranks.py")), "plain" if alone else self.name
        for rank in range(world):
            reading, writing = os.pipe()
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads,
                "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "ANSWERS": str(writing),
                "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
            with open(errors, "a") as log:
                self.ranks.append(subprocess.Popen([python, script, way, row.precision], env=environment, text=True,
                                                   stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing]))
            os.close(writing)
            self.answers.append(os.fdopen(reading))

    def answered(self) -> list[str]:
        """Return the next line of each rank; a rank that has ended has none."""
        return [answers.readline().strip() for answers in self.answers]

    def train(self, steps: int) -> tuple[float, float]:
        """Return the median seconds of a step, on the slowest rank, and the last loss."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        lines = [json.loads(line or "null") for line in self.answered()]
        if None in lines:
            raise ChildProcessError(self.name)
        losses = [loss for _, loss in lines if loss is not None]
        return max(median(seconds) for seconds, _ in lines), sum(losses) / len(losses)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(row: Row, ways: list[Way], turns: int, steps: int, log: IO[str], name: str) -> None:
    """Let the ways of a row take turns, and write a line of each turn."""
    everyone = {way.name: way for way in ways}
    for turn in range(turns):
        seconds: Turn = {}
        losses: dict[str, float] = {}
        for way in ways:
            seconds[way.name], losses[way.name] = way.train(steps)
        seconds["plain again"], _ = everyone["plain"].train(steps)
        log.write(json.dumps({"row": name, "seconds": seconds, "losses": losses}) + "\n")
        log.flush()
        print(f"    turn {turn + 1}: " + ", ".join(f"{way} {value * 1000:.0f} ms" for way, value in seconds.items()), flush=True)


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table: speeds over plain, and ours over the best peer, as medians over turns."""
    print(f"\n{'row':<28}{'turns':>6}{'ours':>7}{'A/A':>7}  {'over the best peer':<28}{'over all peers'}")
    for name, row in ROWS.items():
        turns = [line["seconds"] for line in lines if line["row"] == name]
        if not turns:
            continue
        plain = [(turn["plain"] + turn["plain again"]) / 2 for turn in turns]

        def speed(way: str, turns: list[Turn] = turns, plain: list[float] = plain) -> float:
            return median(one / turn[way] for one, turn in zip(plain, turns, strict=True))

        again = median(turn["plain"] / turn["plain again"] for turn in turns)
        peers = {peer: (median(turn[peer] / turn[row.ours] for turn in turns), speed(peer)) for peer in row.peers if peer in turns[0]}
        best = min(peers.items(), key=lambda item: item[1][0], default=None)
        words = f"{best[1][0]:.2f} ({best[0]} {best[1][1]:.2f})" if best else "-"
        rest = ", ".join(f"{peer} {ratio:.2f}" for peer, (ratio, _) in peers.items())
        print(f"{name:<28}{len(turns):>6}{speed(row.ours):>7.2f}{again:>7.2f}  {words:<28}{rest}")


@click.command()
@click.option("--turns", default=7)
@click.option("--steps", default=6, help="of a way in a turn")
@click.option("--row", "wanted", default="", help="only rows whose names contain this")
@click.option("--deepspeed", type=click.Path(exists=True), help="a Python that has DeepSpeed; without it DeepSpeed is left out")
@click.option("--json", "file", type=click.Path(path_type=Path), default=Path("peers.json"))
def main(turns: int, steps: int, wanted: str, deepspeed: str | None, file: Path) -> None:
    file.touch()
    for name, row in ROWS.items():
        done = sum(json.loads(line)["row"] == name for line in file.read_text().splitlines())
        if wanted not in name or done >= turns:
            continue
        print(f"{name}:", flush=True)
        names = ["plain", row.ours, *(peer for peer in row.peers if deepspeed or "DeepSpeed" not in peer)]
        ways = []
        try:
            for way in map(Way, names):
                ways.append(way)
                errors = file.with_suffix(f".{way.name.replace(' ', '-').replace(',', '')}.{row.precision}.log")
                way.start(row, deepspeed if deepspeed and "DeepSpeed" in way.name else sys.executable, errors)
                way.answered()
                try:
                    way.train(3)  # warms up
                except (ChildProcessError, BrokenPipeError):
                    ways.remove(way)
                    way.end()
                    print(f"    {way.name} does not run: {errors}", flush=True)
            with open(file, "a") as log:
                measure(row, ways, turns - done, steps, log, name)
        finally:
            for way in ways:
                way.end()
    show([json.loads(line) for line in file.read_text().splitlines()])


if __name__ == "__main__":
    main()
