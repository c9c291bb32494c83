"""Tracebacks of a Python program: the traceback in a rank's last lines that explains its end.

It is not simply the last one. The fatal traceback is followed by complaints of threads, of the data loader's processes and of
the teardown. Exceptions that the program caught and logged may precede it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_mp.diagnosis.texts import kind_in_output
from hpc_mp.rundir.attempt import WORRIED, last_words

HEAD = re.compile(r"Traceback \(most recent call last\)(?::$| ─)")  # the second form is rich's
GROUP = re.compile(r"\s*\+ Exception Group Traceback ")
FRAME = re.compile(r'[>\s]*(?:│ )?(?:File "(?P<file>[^"]+)", line (?P<line>\d+)|(?P<rich>/[^:│]+):(?P<at>\d+) in )')
ERROR = re.compile(r"(?!Traceback )[^\W\d][\w.<>]*(?::(?: .*)?)?$")  # an exception's name and message
NAMED_SO = re.compile(r"[\w.<>]*(Error|Exception|Interrupt|Exit|Warning)(?::|$)")  # exceptions that may appear without a heading
MEMBER = re.compile(r"\s+\| (?P<said>\S.*)$")  # line of an exception group
RANK = re.compile(r"\[rank(\d+)\]: ?")  # torch's prefix of every line of an uncaught exception's traceback once ranks have met
OF_TAG = re.compile(r"[^\[]*\[(?:\d+,)?(\d+)\]<std")  # the rank in a prefix of mpirun or horovodrun
INSIDE = re.compile(r"[\s>│╭╰]")  # start of a line within a traceback
OF_LAUNCHER = re.compile(r"([\w.]+\.)?(ChildFailedError|SignalException)\b")  # no more facts than its table
# A failed child, which may have written the reason.
OF_CHILD = re.compile(r"([\w.]+\.)?(CalledProcessError|ProcessExitedException|ProcessExecutionError|ErrorReturnCode_\d+|"
                      r"UnexpectedExit|SIGTERMException)\b|RuntimeError: Horovod detected that one or more processes exited|"
                      r"Exception: process \d+ terminated with |RuntimeError: Engine core initialization failed|"
                      r"Exception: WorkerProc initialization failed")
# Prefixes of lines: from torchrun, mpirun or horovodrun, and srun; a host's name from pdsh and a rank from Hydra are only
# recognized by an error's first line behind them.
# Roles of torchrun, jobs of torchx, processes of vLLM and Ray, and vLLM's time.
TAG = re.compile(r"(?:\[(?!rank)[a-z_]+\d+\]: ?|[\w.-]+/\d+ (?=\[)(?:\[\d+\]: ?)?|\(\w[\w:.-]* pid=\d+(?:, ip=[\d.]+)?\) ?|"
                 r"ERROR \d\d-\d\d [\d:]{8} \[[^\]]+:\d+\] ?|"
                 r"(?:\w{3} \w{3} +\d+ [\d:]{8} \d{4})?\[[\d,]+\]<std\w+>: ?|\d+: )+")
TAGGED = re.compile(r"(?P<tag>(?:[A-Za-z][\w.-]*|\d+(?:\.\d+){3}): |\[\d+\] )(?:\[\w+\d\]: ?)*"
                    r"(?:[╭─ ]*Traceback \(most recent call last\)|terminate called |Fatal Python error: )")
IN_TABLE = re.compile(r"\s*traceback : (?=Traceback \(most recent call last\):)")
BLAMED = re.compile(r"\s*rank +: (\d+) \(local_rank: \d+\)")  # torchrun's entry in its ChildFailedError
ROOT = re.compile(r"\s*Root Cause \(first observed failure\)")
CHAINED = re.compile(r"(During handling of the above exception, another exception occurred|"
                     r"The above exception was the direct cause of the following exception):$")
BESIDE = re.compile(r"Exception in thread |Process \S+:$|Task exception was never retrieved|"
                    r"Error waiting on exit barrier")  # before a traceback that does not end the program
IGNORED = re.compile(r"Exception ignored |Error in |--- Logging error ---|Exception in atexit")
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
OF_NCCL = re.compile(r"NCCL error|unhandled cuda error")  # the next lines name the error
OF_NCCL_LAST = re.compile(r"^Last error:\s*\n\s*(\S.*)$", re.MULTILINE)
LONGEST = 200  # maximum number of lines of a traceback
MOST = 300  # maximum number of characters of an exception's message
MOST_TAGS = 64  # maximum number of hosts or ranks whose prefixes are recognized
STRAY = 5  # maximum number of foreign lines within a traceback
ORDERS = OWN, BESIDE_IT, OF_ANOTHER, TORN_DOWN = range(4)  # of tracebacks: the higher, the less it explains a program's end
# Maximum number of lines after an exception that is the reason: with Python's own exit code, and with another code or none.
BEHIND, BEHIND_OTHERS = 150, 25


@dataclass(frozen=True, slots=True)
class PythonError:
    """An uncaught exception, or one that was logged in the same form."""

    text: str  # ValueError: no such column
    place: str  # position in the program's own files, train.py:12; empty if unknown
    traceback: str  # the complete traceback
    rank: int | None = None  # its rank, if a launcher of ranks on a node reports it
    kind: str | None = None  # kind of the failure that it reports, a key of failures.KINDS; None if its text has none
    behind: int = 0  # number of lines after it
    of_child: bool = False  # True if it only reports the failure of a child process
    uncaught: bool = False  # True if torch has marked it as the end of a rank

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text

    @property
    def message(self) -> str:
        """The message with its place, and the rank that a launcher names."""
        return str(self) if self.rank is None else f"{self}, reported by its rank {self.rank}"


@dataclass(frozen=True, slots=True)
class TracebackBlock:
    """One traceback among lines: from ``begin`` to ``end``, the line of the exception. ``order``: one of ``ORDERS``."""

    begin: int
    end: int
    text: str
    order: int
    members: tuple[str, ...] = ()


def last_error(lines: Sequence[str], code: int = 1) -> PythonError | None:
    """Return the exception that ended the process that wrote these lines; None without one. ``code``: its exit code; Python's own
    for an exception is 1."""
    tagged = list(map(OF_TAG.match, lines))
    lines = without_tags(lines)
    marks = [RANK.match(line) for line in lines]
    owners = [mark or tag for mark, tag in zip(marks, tagged, strict=True)]
    plain = [line[mark.end():] if mark else line for mark, line in zip(marks, lines, strict=True)]
    blocks = list(_blocks(plain))
    near = [block for block in blocks if len(plain) - block.end <= (BEHIND if code == 1 else BEHIND_OTHERS)]
    alone = all(block.order >= OF_ANOTHER for block in near)
    if alone and code == 1 and not WORRIED.search(last_words(plain[:_of_launcher(plain, near)])):
        near = blocks  # buffered output of the program comes after it, and may be long
    chosen = _of_ranks(near, owners, plain) or next(
        (block for order in ORDERS for block in reversed(near) if block.order == order), None)
    if chosen is None:
        return None
    mark = owners[chosen.end] or next(filter(None, map(BLAMED.match, plain[chosen.begin:])), None)
    text, kind = chosen.text, _kind(chosen, plain)
    for before in reversed(blocks[:blocks.index(chosen)]):  # the exception that it arose from may be more specific
        if kind is not None or not any(map(CHAINED.match, plain[before.end:chosen.begin + 1])):
            break
        kind = _kind(before, plain)
        text = f"{text}, from {before.text}" if kind is not None else text
    frames = list(filter(None, map(FRAME.match, (line.lstrip("|+ ") for line in plain[chosen.begin:chosen.end]))))
    shown = plain[chosen.begin:chosen.end + 1]
    if len(shown) > LONGEST:
        shown = [*shown[:20], "…", *shown[20 - LONGEST:]]
    rank = int(mark[1]) if mark else None
    return PythonError(text, _place(frames), "\n".join(shown), rank, kind, behind=len(plain) - 1 - chosen.end,
                       of_child=chosen.order == OF_ANOTHER, uncaught=marks[chosen.end] is not None)


def without_tags(lines: Sequence[str]) -> list[str]:
    """Return the lines without the prefixes that launchers write."""
    tags = tuple(dict.fromkeys(match["tag"] for match in map(TAGGED.match, lines) if match))[:MOST_TAGS]
    bare = (line[line.index(" ") + 1:] if tags and line.startswith(tags) else line for line in lines)
    return list(_from_table([TAG.sub("", line, count=1) if TAG.match(line) else line for line in bare]))


def _from_table(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines. A traceback that torchrun's table has from a rank's error file is written as the rank would write it."""
    rank, inside = "", False
    for line in lines:
        entry = BLAMED.match(line)
        rank = f"[rank{entry[1]}]: " if entry else rank
        head = IN_TABLE.match(line)
        inside = head is not None or (inside and line.startswith("  "))
        yield f"{rank}{line[head.end():] if head else line[2:]}" if inside else line


def _of_launcher(lines: Sequence[str], blocks: Sequence[TracebackBlock]) -> int:
    """Return the line from which only launchers write, including the first of the last ``blocks``."""
    end = next((number for number, line in enumerate(lines) if OF_LAUNCHER.match(line)), len(lines))
    heads = [number for number, line in enumerate(lines[:end]) if HEAD.search(line)] if end < len(lines) else []
    return min([*heads[-1:], *(block.begin for block in blocks), len(lines)])


def _of_ranks(blocks: Sequence[TracebackBlock], owners: Sequence[re.Match[str] | None],
              lines: Sequence[str]) -> TracebackBlock | None:
    """Return the relevant exception if several ranks of a launcher ended with one: not from a rank that only noticed another's
    end, and preferably from the rank that the launcher saw end first. None for fewer than two ranks."""
    ended = {int(owner[1]): block for block in blocks if (owner := owners[block.end]) is not None}
    if len(ended) < 2:
        return None
    root = next((number for number, line in enumerate(lines) if ROOT.match(line)), len(lines))
    first = next(filter(None, map(BLAMED.match, lines[root:])), None)
    blamed = int(first[1]) if first else None
    return ended[min(ended, key=lambda rank: (_kind(ended[rank], lines) == "peer", rank != blamed, ended[rank].end))]


def _blocks(lines: Sequence[str]) -> Iterator[TracebackBlock]:
    """Yield all tracebacks, including tracebacks without their beginning or their heading (a SyntaxError)."""
    last: TracebackBlock | None = None
    for block in _unchained(lines):
        if last is not None and last.order == OF_ANOTHER and any(map(CHAINED.match, lines[last.end:block.begin + 1])):
            block = replace(block, order=OF_ANOTHER)  # a wrapper's message about its failed child
        last = block
        yield block


def _unchained(lines: Sequence[str]) -> Iterator[TracebackBlock]:
    """Yield all tracebacks, each without regard to the others."""
    begin: int | None = None  # start of the open one
    stray, group = 0, False
    for number, line in enumerate(lines):
        if HEAD.search(line) and not (group and MEMBER.match(line)):
            begin, stray, group = number, 0, GROUP.match(line) is not None
        elif group and begin is not None:
            if MEMBER.match(line) is None and not line.strip().startswith(("+", "|")):
                yield from _of_group(lines, begin, number)
                begin, group = None, False
        elif FRAME.match(line):
            begin = number if begin is None else begin
        elif begin is None or not line or INSIDE.match(line):
            continue
        elif ERROR.match(line) and not OF_LAUNCHER.match(line) and (HEAD.search(lines[begin]) or NAMED_SO.match(line)):
            order = OF_ANOTHER if OF_CHILD.match(line) else _order(lines, begin)
            yield TracebackBlock(begin, number, _message(lines, number), order)
            begin = None
        elif OF_LAUNCHER.match(line) or stray == STRAY or not HEAD.search(lines[begin]):
            begin = None
        else:
            stray += 1
    if group and begin is not None:
        yield from _of_group(lines, begin, len(lines))


def _of_group(lines: Sequence[str], begin: int, end: int) -> Iterator[TracebackBlock]:
    messages = [match["said"] for match in map(MEMBER.match, lines[begin:end]) if match and ERROR.match(match["said"])]
    if messages:
        inner = "; ".join(messages[1:])
        yield TracebackBlock(begin, end - 1, _cut(f"{messages[0]}: {inner}" if inner else messages[0]), _order(lines, begin),
                             tuple(messages))


def _message(lines: Sequence[str], number: int) -> str:
    """Return the message of the exception in this line: its first non-empty line, with NCCL's last error."""
    line = lines[number].rstrip()
    if line.endswith(":"):
        line += next((f" {more.strip()}" for more in lines[number + 1:number + 4] if more.strip()), "")
    last = OF_NCCL_LAST.search("\n".join(lines[number + 1:number + 9])) if OF_NCCL.search(line) else None
    return f"{_cut(line)}: {_cut(last[1])}" if last else _cut(line)


def _cut(line: str) -> str:
    return line if len(line) <= MOST else f"{line[:MOST]}…"


def _order(lines: Sequence[str], begin: int) -> int:
    """Return the precedence of a traceback: from the program itself, its thread or process, or a teardown."""
    before = lines[max(0, begin - 2):begin]
    return TORN_DOWN if any(map(IGNORED.match, before)) else BESIDE_IT if any(map(BESIDE.search, before)) else OWN


def _kind(block: TracebackBlock, lines: Sequence[str]) -> str | None:
    """Return the kind of failure. The lines after an error of NCCL explain it; after other errors they may be unrelated."""
    more = 8 if OF_NCCL.search(block.text) else 0
    return kind_in_output("\n".join([block.text, *block.members, *lines[block.end:block.end + 1 + more]]))


def _place(frames: Sequence[re.Match[str]]) -> str:
    places = [(frame["file"] or frame["rich"], frame["line"] or frame["at"]) for frame in frames]
    program_places = [place for place in places if not LIBRARY.search(place[0])] or places
    return f"{program_places[-1][0].rpartition('/')[2]}:{program_places[-1][1]}" if program_places else ""
