"""Reports of launchers about a failed process, at the end of their output: torchrun's table, the errors of accelerate, horovodrun
and DeepSpeed, the notes of mpirun and srun. What the process itself wrote comes before such a report."""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.base.assets import asset_table
from hpc_mp.base.exit_codes import NAMES, SIGNALS
from hpc_mp.diagnosis.texts import FILE
from hpc_mp.diagnosis.tracebacks import HEAD, NAMED_SO, OF_LAUNCHER, RANK, ROOT, without_tags

SHELL = 128  # a shell exits with this plus the number of the signal that ended its command
NEGATIVE = 256  # of the exit code -9 of a launcher that passes on its child's, as Python counts, 247 is left
BY_THEMSELVES = frozenset({4, 6, 7, 8, 9, 11})  # signals that end processes; exit codes like 255 have other meanings
BY_OTHERS = {-signal.SIGTERM: 2, -signal.SIGKILL: 1}  # by which launchers end the others: the higher, the likelier
BY_LAUNCHER = 100  # last lines in which a launcher reports its failed process
APART = 20  # lines between two reports, the first of which did not end the program
FOREIGN = 1  # most lines of other processes after the exception of a launcher written in Python
# An entry of torchrun's table. The root cause is the entry with the first time, which is in seconds.
ENTRY = re.compile(r"(?:time +: (?P<time>\S+)\n\s*host +: .*\n\s*)?"
                   r"rank +: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\n\s*exitcode +: (?P<code>-?\d+) ")
MESSAGES = tuple(map(re.compile, asset_table(FILE)["launchers"]["signs"]))  # about a failed process
# Lines with which reports may begin.
FIRST = re.compile(r"Sending process \d+ closing signal |Horovod detected that |BAD TERMINATION OF ONE|"
                   r"RANK \d+ PID \d+ RUNNING AT |^\s*rank +: \d+ \(local_rank: ")
RESTARTS = re.compile(r"will restart worker group")
OF_PYTHON = re.compile(r"(CalledProcessError|Exception): ")  # a caught one does not end the program
# Main processes of Lightning and SGLang kill themselves with SIGKILL then.
FORCED = re.compile(r"Forcefully terminating all other processes|Received sigquit from a child process")
# Exceptions of torchrun and Lightning, which then end with exit code 1.
ASKED = re.compile(r"SignalException: Process \d+ got signal: (?P<signal>\d+)|\bSIGTERMException\b")
OF_SLURM = re.compile(r"(\d+: )?(srun|slurmstepd\S*): ")
NUMBER = re.compile(r"(?:[\w.-]+/\d+ )?\[(?!rank)[a-z_]+(?P<local>\d+)\]: ?|"
                    r"(?:\w{3} \w{3} +\d+ [\d:]{8} \d{4})?\[(?:\d+,)?(?P<rank>\d+)\]<std\w+>: ?|\[?(?P<task>\d+)(?:: |\] )")
NAMED_RANK = re.compile(r"\bRank (\d+)\]")  # in messages of NCCL's watchdog


@dataclass(frozen=True, slots=True)
class LauncherBlame:
    """A process that a launcher saw fail; ``code`` as from ``subprocess``. ``rank``: its number in the launcher's world, if
    reported; ``local``: its number on its node."""

    code: int
    rank: int | None = None
    local: int | None = None

    def __str__(self) -> str:
        return f"its rank {self.rank}" if self.rank is not None else (
            "a process that it had started" if self.local is None else f"its local rank {self.local}")


@dataclass(frozen=True, slots=True)
class LauncherReport:
    """A launcher's report. ``begin``: number of its first line. ``blames``: the process that failed first, and others that failed
    in the same second."""

    begin: int
    blames: tuple[LauncherBlame, ...]


def report_of(lines: Sequence[str]) -> LauncherReport | None:
    """Return a launcher's report near the end of the output; None without one."""
    lines = without_tags(lines)
    first = max(0, len(lines) - BY_LAUNCHER)
    first = next((number + 1 for number in reversed(range(first, len(lines))) if RESTARTS.search(lines[number])), first)
    text = "\n".join(lines[first:])
    roots = list(ROOT.finditer(text))
    if roots:
        earlier = next((entry.end() for entry in ENTRY.finditer(text, roots[-2].end())), 0) if len(roots) > 1 else 0
        entries = list(ENTRY.finditer(text, earlier))
        root = next((entry for entry in entries if entry.start() >= roots[-1].end()), None)
        matches = [entry for entry in entries if root and entry["time"] == root["time"] is not None and entry is not root]
        matches, earliest = ([root, *matches], entries[0].start()) if root else ([], 0)
    else:
        matches = _last_messages(text)
        earliest = min((match.start() for match in matches), default=0)
    blames = tuple(filter(None, map(_blame, matches)))
    if not blames or (OF_PYTHON.match(matches[0][0]) and _foreign(text[matches[0].end():]) > FOREIGN):
        return None
    number = text.count("\n", 0, earliest)
    begin = next((first + at for at in range(max(0, number - APART), number) if FIRST.search(lines[first + at])), first + number)
    # Launchers end the processes that have not failed by certain signals, and do not keep the order.
    likeliest = min(blames, key=lambda blame: BY_OTHERS.get(blame.code, 0))
    return LauncherReport(_head(lines, begin, first), blames if roots else (likeliest,))


def _last_messages(text: str) -> list[re.Match[str]]:
    """Return the messages of the last report in a text, in their order; an earlier one did not end the program."""
    matches = [match for pattern in (ENTRY, *MESSAGES) for match in pattern.finditer(text)]
    matches.sort(key=lambda match: match.start())
    for number in reversed(range(1, len(matches))):
        if text.count("\n", matches[number - 1].end(), matches[number].start()) > APART:
            return matches[number:]
    return matches


def _foreign(text: str) -> int:
    """Return the number of lines that are neither Slurm's nor part of a traceback."""
    lines = [line for line in text.split("\n")[1:] if line.strip()]
    return sum(not (line[:1].isspace() or OF_SLURM.match(line) or HEAD.search(line) or NAMED_SO.match(line)
                    or line.startswith(("The above exception", "During handling"))) for line in lines)


def _blame(match: re.Match[str]) -> LauncherBlame | None:
    fields = {name: value for name, value in match.groupdict().items() if value is not None}
    killed = (fields.get("signal") or (signal.SIGKILL if "oom" in fields else None) or SIGNALS.get(fields.get("words", ""))
              or signal.Signals.__members__.get(f"SIG{fields.get('name')}"))
    if killed is None and "code" not in fields:
        return None
    rank, local = (int(fields[name]) if name in fields else None for name in ("rank", "local"))
    return LauncherBlame(passed_on(int(fields["code"])) if killed is None else -int(killed), rank, local)


def passed_on(code: int, by_launcher: bool = True) -> int:
    """Return the end of the child from the exit code of a shell that passes it on, or of a launcher; codes as from
    ``subprocess``."""
    if code - SHELL in NAMES:
        return SHELL - code
    return code - NEGATIVE if by_launcher and NEGATIVE - code in BY_THEMSELVES else code


def _head(lines: Sequence[str], begin: int, first: int) -> int:
    """Return the number of the first line of the launcher's own traceback around line ``begin``; else ``begin``."""
    for number in range(begin, first - 1, -1):
        if HEAD.search(lines[number]):
            return number
        if number < begin and NAMED_SO.match(RANK.sub("", lines[number], count=1)) and not OF_LAUNCHER.match(lines[number]):
            break
    return begin


def output_of(lines: Sequence[str], blame: LauncherBlame) -> list[str]:
    """Return the lines of a launcher's output that the process wrote, and those of which the process is unknown, without their
    prefixes."""
    prefixes = list(map(NUMBER.match, lines))
    tasks = [prefix["task"] for prefix in prefixes if prefix is not None and prefix["task"] is not None]
    numbered = 2 * len(tasks) > len(lines) and str(blame.rank) in tasks  # else they number nodes, or are no prefixes
    bare = without_tags(lines)
    marks = [_marks(prefix, numbered, text) for prefix, text in zip(prefixes, bare, strict=True)]
    lowest = min((mark for line in marks for mark in line), default=math.inf)
    on_first_node = blame.local is not None and lowest <= blame.local  # where local numbers are ranks
    rank = blame.local if blame.rank is None and on_first_node else blame.rank
    return [text for text, prefix, ranks in zip(bare, prefixes, marks, strict=True)
            if (rank is None or all(mark == rank for mark in ranks))
            and (blame.local is None or prefix is None or prefix["local"] in (None, str(blame.local)))]


def ranks_in(lines: Sequence[str]) -> list[int]:
    """Return the ranks that lines name as their writers."""
    return sorted({mark for line in without_tags(lines) for mark in _marks(None, False, line)})


def _marks(prefix: re.Match[str] | None, numbered: bool, text: str) -> list[int]:
    """Return the ranks that a line names as its writer. ``numbered``: a mere number in front is that of a rank."""
    fields = {} if prefix is None else prefix.groupdict()
    marks = (fields.get("rank"), fields.get("task") if numbered else None,
             *(match[1] for match in (RANK.match(text), NAMED_RANK.search(text)) if match))
    return [int(mark) for mark in marks if mark is not None]


def asked_to_end(lines: Sequence[str]) -> int | None:
    """Return the number of the signal for which a launcher ended itself; None without one."""
    text = "\n".join(lines[-BY_LAUNCHER:])
    match = next(reversed(list(ASKED.finditer(text))), None)
    if match is None or _foreign(text[match.end():]):
        return None
    return int(match["signal"] or signal.SIGTERM)
