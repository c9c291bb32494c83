"""The ranks of a way: processes that live through all turns of a row, and sleep while others run."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from workload import Layout

PATIENCE_S = 300.0  # for a start with a compilation, and for a turn on a busy machine


class Failed(Exception):
    """A way that does not run, with the last words of a rank."""


class Group:
    """The ranks of a way, once started.

    Args:
        python: the interpreter that has what the way needs.
        directory: gets the ranks' standard errors, and what DeepSpeed compiles: the lock that an ended build leaves in the user's
            own cache would make all ranks wait for ever.
    """

    def __init__(self, way: str, layout: Layout, python: str, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [python, str(Path(__file__).with_name("rank.py")), way, json.dumps(asdict(layout))]
        self.logs = [directory / f"{way}-{rank}.log" for rank in range(layout.ranks)]
        self.ranks, self.answers = [], [b""] * layout.ranks
        for rank, log in enumerate(self.logs):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "LOCAL_SIZE": str(layout.ranks),
                "LOCAL_WORLD_SIZE": str(layout.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(layout.threads), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0",
                "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
                "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
            with log.open("w") as errors:
                self.ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                   stderr=errors))

    def train(self, steps: int) -> tuple[float, list[float]]:
        """Train steps; return the median seconds of one, on the slowest rank, and the losses of all."""
        for rank in self.ranks:
            try:
                rank.stdin.write(f"{steps}\n".encode())
                rank.stdin.flush()
            except BrokenPipeError:
                raise Failed(self._last_words()) from None
        answers = [json.loads(line) for line in self.wait()]
        losses = zip(*(answer["losses"] for answer in answers), strict=True)
        return (max(answer["seconds"] for answer in answers),
                [fmean(loss for loss in step if loss is not None) for step in losses])

    def wait(self) -> list[bytes]:
        """Return the next line of every rank. Raises Failed when a rank has ended, or none comes for long."""
        until = time.monotonic() + PATIENCE_S
        while not all(answer.endswith(b"\n") for answer in self.answers):
            waiting = {rank.stdout.fileno(): number for number, rank in enumerate(self.ranks)
                       if not self.answers[number].endswith(b"\n")}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
            for descriptor in ready:
                if not (data := os.read(descriptor, 1 << 16)):
                    raise Failed(self._last_words(waiting[descriptor]))
                self.answers[waiting[descriptor]] += data
            if not ready:
                raise Failed(f"no answer within {PATIENCE_S:.0f} s: {self._last_words()}")
        answers, self.answers = self.answers, [b""] * len(self.ranks)
        return answers

    def close(self) -> None:
        """End the ranks: their input ends."""
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # it has ended already
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            rank.stdout.close()

    def _last_words(self, rank: int = 0) -> str:
        lines = [line for line in self.logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-25:]), file=sys.stderr)
        return lines[-1][:200] if lines else "no message"
