"""Ranks whose clock is that of a machine with known figures: the engine trains for real, and its clock counts what that machine
would take. Other work on this machine changes nothing.

``PACE`` in the environment, JSON: ``passes``, seconds of each pipeline rank's computations in a step, of ``microbatches``;
``after``, of what follows them; ``message``, of a message; ``folder``, where ranks note when they send. Faults: ``slow``, rank →
factor; ``links``, "0-1" → seconds of a message there; ``pace``, factor of all computations. Each is multiplied with a random
factor, of ``seed`` and ``jitter``. As a program this is ``hpc-mp`` with these ranks.
"""

import functools
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BACK = 2  # a backward takes so many forwards


@dataclass
class Clock:
    rank: int
    passes: list[float]
    microbatches: int
    after: float
    message: float
    folder: str
    pace: float = 1.0
    slow: dict[str, float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    jitter: float = 0.0
    now: float = 1e9

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.rank}")

    def compute(self, stage: int, forwards: int) -> None:
        seconds = self.passes[stage] / self.microbatches * forwards / (1 + BACK)
        self.now += seconds * self.pace * self.slow.get(str(self.rank), 1.0) * self.random.lognormvariate(0, self.jitter)

    def note(self, sender: int, receiver: int, payload: str, microbatch: int) -> Path:
        return Path(self.folder, f"{sender}-{receiver}-{payload}-{microbatch}")

    def received(self, sender: int, note: Path) -> None:
        link = f"{min(sender, self.rank)}-{max(sender, self.rank)}"
        self.now = max(self.now, float(note.read_text()) + self.links.get(link, self.message))


def rank(job_file: Path) -> int:
    import torch

    import hpc_mp.train.rank.main
    from hpc_mp.train.device import readback
    from hpc_mp.train.parallel.collectives import known_to_all
    from hpc_mp.train.pipeline import pipeline
    from hpc_mp.train.pipeline.messages import Messages
    from hpc_mp.train.step import engine

    clock = Clock(int(os.environ["SLURM_PROCID"]), **json.loads(os.environ["PACE"]))
    readback.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    pipeline.time = SimpleNamespace(time=lambda: clock.now)  # type: ignore[assignment]
    agree = engine.agree

    def computing(original: Any, forwards: int) -> Any:
        def compute(self: Any, step: Any, action: Any) -> None:
            original(self, step, action)
            clock.compute(action.stage, forwards)

        return compute

    send_, arrive_ = Messages.send, Messages.arrive

    def send(self: Any, action: Any) -> None:
        message = self._produced[action]
        receiver = self._channels.ranks[self._placement[message.receiver]]
        clock.note(clock.rank, receiver, message.payload, message.microbatch).write_text(repr(clock.now))
        send_(self, action)

    def arrive(self: Any, action: Any) -> None:
        message = self.awaited(action)
        arrive_(self, action)
        if message is not None:
            sender = self._channels.ranks[self._placement[message.sender]]
            clock.received(sender, clock.note(sender, clock.rank, message.payload, message.microbatch))

    def agreed(*given: Any) -> Any:
        times = known_to_all(torch.tensor([clock.now], dtype=torch.float64), given[-1])
        clock.now = float(times.max()) + clock.after
        return agree(*given)

    passes: Any = pipeline.Pipeline
    passes._forward, passes._backward = computing(passes._forward, 1), computing(passes._backward, BACK)
    Messages.send, Messages.arrive = send, arrive  # type: ignore[method-assign]
    engine.agree = agreed
    return hpc_mp.train.rank.main.main(job_file)


if __name__ == "__main__":
    import dataclasses

    import hpc_mp.launch.backends.local
    import hpc_mp.report.conclude
    from hpc_mp.cli.main import main
    from hpc_mp.launch.backends import BACKENDS

    hpc_mp.report.conclude.MEASURES = 0.0  # a tiny model says nothing of a real device, but of this one
    start = functools.partial(hpc_mp.launch.backends.local.start, entry="paced:rank")
    BACKENDS["local"] = dataclasses.replace(BACKENDS["local"], start=start)
    main()
