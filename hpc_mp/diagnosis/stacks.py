"""Stacks of a program's hung ranks: read from text, with the one rank that the others wait for.

The text is the output of Python's faulthandler, with a header line for each process. In a hang, all ranks wait in a collective
except one: that rank is the cause, whether it is in a data loader, on a file system or in another collective.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hpc_mp.diagnosis.tracebacks import LIBRARY
from hpc_mp.rundir.layout import RunDirectory

PROCESS = re.compile(r"rank (?P<rank>\d+), pid (?P<pid>\d+), (?P<state>.*?): ")
THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
MAIN = re.compile(r'Current thread|.*"MainThread"')
FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
ABORTED = "Fatal Python error: Aborted"
DUMP = re.compile(r"Fatal Python error: (Aborted|Segmentation fault|Bus error|Illegal instruction|Floating[- ]point exception)$")

# Functions in which a rank waits for others: some by name in any file, others by name in the files of communication libraries.
# The names are torch.distributed's; deepspeed, accelerate and similar libraries keep them.
COLLECTIVE = re.compile(r"_?(?:all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|broadcast|(?:monitored_)?barrier)\w*$")
LIBRARIES = re.compile(r"/(torch/distributed|deepspeed/comm|horovod|mpi4py|jax)/")
WAITS = re.compile(r"(?:batch_)?i?(?:send|recv)\b|(?:reduce|gather|scatter)(?:_object)?(?:_list)?$|wait$|init_process_group$|"
                   r"_?rendezvous\w*$|_store_based_barrier$|new_group$|destroy_process_group$")
BACKWARD = re.compile(r"/torch/autograd/\S+ (\S*backward|grad)$")  # DDP and FSDP reduce in it, in threads without Python frames

STUCK = re.compile(r"state [DTt]\b")

SHOWN = 3  # number of places in a verdict


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack; ``file`` as Python writes it."""

    file: str
    line: int
    function: str

    @property
    def name(self) -> str:
        """The function without its class, which py-spy writes before it."""
        return self.function.rpartition(".")[2]

    @property
    def waits(self) -> bool:
        """True if a rank in this call waits for other ranks."""
        return (COLLECTIVE.match(self.name) is not None or self.is_backward
                or (LIBRARIES.search(self.file) is not None and WAITS.match(self.name) is not None))

    @property
    def is_backward(self) -> bool:
        """True if the call computes gradients, rather than importing torch."""
        return BACKWARD.search(f"{self.file} {self.name}") is not None

    @property
    def short(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, slots=True)
class RankStack:
    """The position of one rank. ``frames``: frames of its main thread, the innermost first; empty if Python has not written them.
    ``state``: state of its process, as the kernel names it. ``pid``: process id on its node."""

    rank: int
    frames: tuple[Frame, ...]
    state: str = ""
    pid: int = 0

    @property
    def waits(self) -> bool:
        """True if it waits for other ranks."""
        return self._operation() is not None

    @property
    def known(self) -> bool:
        """True if its position is known: from Python, or because the kernel reports it stopped or waiting for a disk."""
        return bool(self.frames) or STUCK.match(self.state) is not None

    def __str__(self) -> str:
        """Return the position in words: ``train.py:52 in all_reduce``."""
        if not self.frames:
            return f"no Python frames, its process in {self.state}"
        inner = list(takewhile(lambda frame: LIBRARY.search(frame.file), self.frames))
        program_frame = self.frames[len(inner)] if len(inner) < len(self.frames) else self.frames[0]
        operation = self._operation()
        if operation is not None:
            return f"{program_frame.short} in {'backward' if operation.is_backward else operation.name}"
        function = "" if program_frame.name == "<module>" else f" in {program_frame.name}"
        leaf = f", calling {inner[0].name} ({inner[0].short})" if inner and program_frame is not inner[0] else ""
        return f"{program_frame.short}{function}{leaf}"

    def _operation(self) -> Frame | None:
        """Return the outermost of the waiting calls, up to the program's own innermost call."""
        inner = list(takewhile(lambda frame: LIBRARY.search(frame.file), self.frames))
        waiting = [frame for frame in self.frames[:len(inner) + 1] if frame.waits]
        return waiting[-1] if waiting else None


def _calls(lines: Sequence[str]) -> list[Frame]:
    """Return the calls of the thread at the start of these lines, up to the empty line after it. Other output may intervene."""
    matches = map(FRAME.match, takewhile(bool, lines))
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match]


def main_thread(lines: Sequence[str]) -> tuple[Frame, ...]:
    """Return the frames of a process's main thread; else of the last one, since faulthandler writes the main thread last."""
    heads = [number for number, line in enumerate(lines) if THREAD.match(line)]
    main = next((number for number in heads if MAIN.match(lines[number])), heads[-1] if heads else None)
    return tuple(_calls(lines[main + 1:])) if main is not None else ()


def aborted(lines: Sequence[str]) -> list[str]:
    """Return faulthandler's output in a log at the last SIGABRT: from its heading to the last call."""
    begin = next((number for number in reversed(range(len(lines))) if lines[number].startswith(ABORTED)), None)
    if begin is None:
        return []
    output = lines[begin + 1:]
    end = next((number for number in reversed(range(len(output))) if FRAME.match(output[number])), -1)
    return list(output[:end + 1])


def before_dump(lines: Sequence[str]) -> list[str]:
    """Return the output of a process before Python's last stack, which it writes at a fatal signal."""
    begin = _dump(lines)
    return list(lines if begin is None else lines[:begin])


def crash_place(lines: Sequence[str]) -> str:
    """Return Python's position at a fatal signal, ``train.py:12 in step``; empty if it has not written one."""
    begin = _dump(lines)
    frames = main_thread(lines[begin + 1:]) if begin is not None else ()
    return str(RankStack(0, frames)) if frames else ""


def _dump(lines: Sequence[str]) -> int | None:
    return next((number for number in reversed(range(len(lines))) if DUMP.match(lines[number])), None)


def before_abort(lines: Sequence[str]) -> list[str]:
    """Return the output of a rank before its stack at SIGABRT."""
    return list(takewhile(lambda line: not line.startswith(ABORTED), lines))


def read_stacks(run: RunDirectory) -> list[RankStack]:
    """Return the stacks of all inspected ranks, by rank."""
    return [stack for path in run.rank_stack.found()
            for stack in _of_rank(path.read_text(encoding="utf-8", errors="replace").splitlines())]


def _of_rank(lines: Sequence[str]) -> list[RankStack]:
    """Return the stack of the rank's first process with Python frames, else of its first process."""
    heads = [(number, match) for number, line in enumerate(lines) if (match := PROCESS.match(line))]
    ends = [number for number, _ in heads[1:]] + [len(lines)]
    stacks = [RankStack(int(match["rank"]), main_thread(lines[number:end]), match["state"], int(match["pid"]))
              for (number, match), end in zip(heads, ends, strict=True)]
    return [next((stack for stack in stacks if stack.frames), stacks[0])] if stacks else []


def standing_apart(stacks: Sequence[RankStack], first: int | None) -> int | None:
    """Return the rank that the others wait for; None if it cannot be determined. ``first``: the rank that fell silent before all
    others; None if unknown."""
    stacks = [stack for stack in stacks if stack.known]
    apart = [stack.rank for stack in stacks if not stack.waits]
    if not 0 < len(apart) < len(stacks):
        places = Counter(map(str, stacks)).most_common()  # all wait, or no rank in a known way: find the one at another place
        largest = places[0] if places else ("", 0)
        apart = [stack.rank for stack in stacks if str(stack) != largest[0]] if 2 * largest[1] > len(stacks) else []
    if first in apart:
        return first
    return apart[0] if 0 < 2 * len(apart) < len(stacks) or len(apart) == 1 else None


def sentence_of(stacks: Sequence[RankStack], rank: int | None) -> str:
    """Return the positions of the ranks in one line, ``rank`` first; empty if no position is known."""
    if not any(stack.frames for stack in stacks):
        return ""
    places: dict[str, list[int]] = {}
    for stack in sorted(stacks, key=lambda stack: (stack.rank != rank, stack.rank)):
        places.setdefault(str(stack), []).append(stack.rank)
    parts = [f"{numbers(ranks)}: {place}" for place, ranks in places.items()]
    return "; ".join(parts[:SHOWN]) + (f"; others elsewhere ({len(parts) - SHOWN} places)" if len(parts) > SHOWN else "")


def numbers(ranks: Iterable[int]) -> str:
    """Format ranks: ``rank 3``, ``ranks 0, 1, 5-9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [part for low, high in runs for part in ([f"{low}-{high}"] if high > low + 1 else map(str, range(low, high + 1)))]
    return f"rank{'s' if runs and (len(runs) > 1 or runs[0][0] != runs[0][1]) else ''} {', '.join(parts)}"
