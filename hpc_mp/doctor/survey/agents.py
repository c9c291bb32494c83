"""The coordinator's side of the agents: orders go to all agents, answers are gathered until a deadline."""

import itertools
import json
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, Self, TypeVar

from pydantic import TypeAdapter

Message = dict[str, Any]
T = TypeVar("T")

PIECE = 900  # srun passes on at most 1,024 bytes of a task's line at once, and another task's line may come between two parts
MARK = "hpc-mp-survey"  # a site's prolog may write to the same stream


def encode(message: Message) -> str:
    """Encode an order as one line for all agents."""
    return json.dumps(message, separators=(",", ":")) + "\n"


def pieces(rank: int, message: Message) -> Iterator[str]:
    """Yield the lines of an agent's message; all but the last are marked with ``+``."""
    text = json.dumps(message, separators=(",", ":"))
    for begin in range(0, len(text), PIECE):
        more = "+" if begin + PIECE < len(text) else "."
        yield f"{MARK} {rank} {more}{text[begin : begin + PIECE]}\n"


def read(kind: type[T], document: Any) -> T:
    """Return the dataclass whose fields an agent has sent. Raises ValueError if it is none."""
    return TypeAdapter(kind).validate_python(document)


class Joiner:
    """Assembler of the agents' messages, which ignores other lines between theirs."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}

    def add(self, line: str) -> tuple[int, Message] | None:
        """Return the rank and its message if ``line`` completes one, else None."""
        mark, _, rest = line.rstrip("\n").partition(" ")
        number, _, payload = rest.partition(" ")
        if mark != MARK or not number.isdigit() or payload[:1] not in ("+", "."):
            return None
        rank = int(number)
        text = self._parts.pop(rank, "") + payload[1:]
        if payload[0] == "+":
            self._parts[rank] = text
            return None
        with suppress(ValueError):  # a truncated line: the node died while writing it
            return rank, json.loads(text)
        return None


STRAGGLE_S = 4.0  # seconds that the slower half of the agents may take beyond 1.5 times the time of the faster half
POLL_S = 0.5
END_S = 5.0  # seconds for the agents to end after the last order
DRAIN_S = 1.0  # seconds after the end of a process in which the rest of its output is read


class AgentPool:
    """A context manager for agents started by one process (srun) or by one process each. ``words``: lines on standard error, from
    srun or a prolog."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._answers: queue.Queue[tuple[int, Message] | None] = queue.Queue()
        self._running = len(processes)
        self._numbers = itertools.count(1)
        self.words: list[str] = []
        self._ears: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for process in self._processes:
            assert process.stdout is not None and process.stderr is not None
            threading.Thread(target=self._listen, args=(process.stdout,), daemon=True).start()
            self._ears.append(threading.Thread(target=self._overhear, args=(process.stderr,), daemon=True))
            self._ears[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        end = time.monotonic() + END_S
        for process in self._processes:
            for stop in (process.terminate, process.kill):
                try:
                    process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    stop()
            process.wait()
        for ear in self._ears:  # the last lines may be pending; a process left behind may keep the stream open
            ear.join(DRAIN_S)

    @property
    def alive(self) -> bool:
        """True if any process is still running, as far as is known."""
        return self._running > 0

    def assemble(self, size: Callable[[Message], int], within: float, waiting: Callable[[str], None]) -> dict[int, Message]:
        """Return the first message of every agent; nothing if all processes end before the first one.

        The first agent may take any time: the job may be queued.

        Args:
            size: number of agents, from the first agent's message.
            within: seconds for the others after the first.
            waiting: called repeatedly with srun's last line until the first agent reports.
        """
        while self._running:
            first = self.gather(0, None, POLL_S)
            if first:
                (message,) = first.values()
                return first | self.gather(0, set(range(size(message))) - first.keys(), within, straggle=within)
            waiting(self.words[-1] if self.words else "")
        return {}

    def order(self, order: Message, awaited: Collection[int], within: float) -> dict[int, Message]:
        """Send an order and gather the answers until all of ``awaited`` have answered or ``within`` seconds are over. Once half
        of the agents have answered, the timeout for stragglers is shortened."""
        number = next(self._numbers)
        line = encode({"id": number, **order})
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # the process has ended: no answer will come
                process.stdin.write(line)
                process.stdin.flush()
        return self.gather(number, awaited, within)

    def gather(self, number: int, awaited: Collection[int] | None, within: float,
               straggle: float = STRAGGLE_S) -> dict[int, Message]:
        """Return the answers to order ``number``; 0 is the agents' first, unrequested message. ``awaited``: None = any agent."""
        begin = time.monotonic()
        end, answers = begin + within, dict[int, Message]()
        half = math.inf if awaited is None else (len(awaited) + 1) // 2
        while (not answers if awaited is None else not answers.keys() >= {*awaited}) and self._running:
            try:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if answer is None:
                self._running -= 1
            elif answer[1].get("id") == number:
                answers[answer[0]] = answer[1]
                if len(answers) == half:
                    end = min(end, begin + 1.5 * (time.monotonic() - begin) + straggle)
        return answers

    def _listen(self, lines: IO[str]) -> None:
        joiner = Joiner()
        for line in lines:
            answer = joiner.add(line)
            if answer is not None:
                self._answers.put(answer)
        self._answers.put(None)

    def _overhear(self, lines: IO[str]) -> None:
        self.words += (line.rstrip() for line in lines if line.strip())
