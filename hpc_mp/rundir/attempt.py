"""One attempt of a run: which hosts take part, where the ranks meet, and the fencing token that tells it from earlier ones.

Written once by whoever starts ranks, before they start. A requeued job has the same id and script; ranks of its earlier
start may live on, on a node that was cut off and came back. They carry another token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_mp.base.files import read_json, write_json

TOKEN = "HPC_MP_TOKEN"  # the environment variable in which a rank carries its token


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What ranks read when they start.

    Attributes:
        token: unlike that of any other start of this run (on Slurm: job id, dot, restart count).
        attempt: from 1; records of metrics.jsonl and ranks.jsonl carry it.
        hosts: the scheduler's name of each node of placement.json, in its order; none where only what starts ranks knows them.
        address: where ranks meet: rank 0's host; empty where only that knows it.
        port: on that host.
        end: unix seconds at which the scheduler ends the job; None without a limit.
        grace: seconds before ``end`` at which ranks save and stop.
    """

    token: str
    attempt: int
    hosts: tuple[str, ...]
    address: str
    port: int
    end: float | None = None
    grace: float = 0.0


def write_attempt(path: Path, record: AttemptRecord) -> None:
    """Publish it atomically. Raises OSError."""
    write_json(path, asdict(record))


def read_attempt(path: Path) -> AttemptRecord:
    """Raises OSError or ValueError when it is absent or broken."""
    try:
        tree = read_json(path)
        return AttemptRecord(**{**tree, "hosts": tuple(tree["hosts"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a start ({error})") from None
