"""Why ranks ended: one record per rank, and the one of them that explains the others.

When one rank dies or stands still, the others lose it, wait for it in vain, and are ended: most of what is written then is an
echo. ``KINDS`` holds all kinds of failure, those that bring others about before those that are brought about; among echoes
alone, who waits for whom decides (``hpc_mp.rundir.waits``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json, read_lines, write_json
from hpc_mp.layout.placement import RankPlace, from_dict
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.waits import Awaited, Standing, awaited, read_standings, standing_of


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Attributes:
    level: what brings others about is lower; of equal ones the earliest failure is the cause.
    text: what a rank, task, node or job of which it is found has done; empty where the message says it itself.
    """

    level: int
    text: str = ""

    @property
    def echo(self) -> bool:
        """Whether another rank's end or stand may have brought it about."""
        return self.level >= ECHO


ECHO = 10  # the level from which on another rank's end or stand may have brought a failure about
KINDS: dict[str, FailureKind] = {
    "memory": FailureKind(0, "ran out of memory"),
    "hardware": FailureKind(1, "has a hardware fault"),
    "node": FailureKind(2, "failed, says Slurm"),
    "orphaned": FailureKind(2, "lost the slurmstepd that had started it"),
    "unfit": FailureKind(3, "is not fit for this run"),
    "unwritable": FailureKind(3, "could not write checkpoints, and other nodes could"),
    "user": FailureKind(4, "refused its input"),
    "error": FailureKind(5, "failed"),
    "removed": FailureKind(5),
    "space": FailureKind(5, "found no space"),
    "storage": FailureKind(5, "had an error of its file system"),
    "crash": FailureKind(5),
    "signal": FailureKind(5),
    "exit": FailureKind(5),
    "ended": FailureKind(6),
    "launcher": FailureKind(7),
    "cancelled": FailureKind(8, "was ended by Slurm"),
    "supervisor": FailureKind(8),
    "early": FailureKind(ECHO - 1, "ended before the others"),
    "lost": FailureKind(ECHO, "lost contact"),
    "hang": FailureKind(ECHO + 1, "made no progress"),
    "silent": FailureKind(ECHO + 2, "gave no sign of life"),
    "straggled": FailureKind(ECHO + 3, "did not end with the others"),
    "network": FailureKind(ECHO + 4, "had a network error"),
    "peer": FailureKind(ECHO + 5, "lost another rank"),
    "vanished": FailureKind(ECHO + 6),
    "unknown": FailureKind(ECHO + 7),
}
BY_SOMEBODY = frozenset({-1, -2, -10, -12, -15})  # HUP, INT, USR1, USR2, TERM
BY_A_LIMIT = frozenset({-24, -25})  # on CPU time and file size: it would be met again
BY_ITSELF = frozenset({-4, -6, -8, -11})  # what code does to itself: ILL, ABRT, FPE, SEGV

# (kind, what a text looks like that speaks of it; None: it only names such a thing). The first that fits counts. Lines of
# slurmstepd: Slurm 22.05's sources and recorded ends of jobs; of the kernel: mm/oom_kill.c; of CUDA: cudaGetErrorString; of NCCL,
# gloo and torch: their sources. The numbers are Linux's errno, as Python, HDF5 and Rust write them: their words are in the
# language of the user.
_ERRNO = r"(?:\[Errno |errno ?= ?|\(os error )(?:%s)\b"
TEXTS: tuple[tuple[str | None, re.Pattern[str]], ...] = tuple((kind, re.compile(text)) for kind, text in (
    (None, r"\bhas no attribute '|cannot import name '|name '\w+' is not defined|^KeyError: "),
    ("network", r"ibv_reg_mr\w* failed"),  # says "Cannot allocate memory", and means the limit on locked memory
    ("memory", r"exceeded (virtual )?memory limit \(\d+ > \d+\), being killed"),
    ("memory", r"Exceeded (job|step) memory limit"),
    ("memory", r"Detected \d+ oom[-_]kill event"),
    ("memory", r"Out of memory: Kill|Memory cgroup out of memory|invoked oom-killer|oom-kill:constraint"),
    ("memory", r"memory\.events oom_kill [1-9]"),
    ("memory", r"(?<!\w)(torch\.|torch\.cuda\.)?OutOfMemoryError\b|"
               r"(?i:\b(cuda|gpuassert|hip|rocm|xpu|npu|mps)\w*\b.{0,60}\bout of memory\b|out of gpu memory)|"
               r"parallel_for failed: out of memory|Failed to CUDA (host )?[cm]alloc"),
    ("memory", r"(jax|tensorflow|onnxruntime).*[Ff]ailed to allocate (memory|\d+ bytes)|No available memory for the cache|"
               r"Free memory on device .* is less|\w_ALLOC_FAILED|StatusAllocFailed|cudaErrorMemoryAllocation|"
               r"(CUDA|HIP)_?(ERROR_OUT_OF_MEMORY|ErrorOutOfMemory)|OOM when allocating|"
               r"(?i:resource[_ ]exhausted: .{0,60}(out of memory|failed to allocate|attempting to reserve))"),
    ("memory", r"(?<!\w)(numpy\S*\.)?_?(Array|Arrow)?MemoryError\b|bad_alloc\b|(can't|[Cc]annot) allocate memory|"
               r"(Error: N|n)ot enough memory|memory allocation of \d+ bytes failed|" + _ERRNO % "12"),
    ("hardware", r"uncorrectable (ECC|NVLink) error|Uncorrectable ECC|fallen off the bus|GPU is lost|NVML: Driver/library|"
                 r"ECC_?UNCORRECTABLE|ECCUncorrectable|ECCNotCorrectable|NVMLError_(LibRm|ResetReq)|"
                 r"Unable to determine the device handle|NCCL error[\s\S]*Failed to bind NVLink SHARP"),
    ("hardware", r"GPU recovery action changed .* to 0x\w+ \((?!None)"),  # Xid 154
    ("hardware", r"no (CUDA|ROCm)-capable device is detected|No (CUDA|HIP) GPUs are available|busy or unavailable|"
                 r"(?i:\b(cuda|hip)\b.{0,20}\bunknown error)|CUDA driver initialization failed|"
                 r"Found no NVIDIA driver|over nvlink or a hardware error"),
    ("hardware", r"(?i:cuda|gpu).*\bError:? \(?(304|80[2-7]|999)\b|system not yet initialized|"
                 r"unsupported display driver / cuda driver|SYSTEM_NOT_READY|SystemNotReady|"
                 r"SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch"),
    ("hardware", r"\bSXid\b.*\bFatal\b|Machine check events|\[Hardware Error\]"),
    ("space", r"No space left on device|Disk quota exceeded|failed to extend /dev/shm|out of shared memory|"
              r"insufficient shared memory|creating shared memory segment /dev/shm|unable to allocate shared memory|"
              r"[Nn]ot enough (free )?disk space|[Dd]isk is full|\d requested and \d+ written|" + _ERRNO % "28|122"),
    ("storage", r"Stale (NFS )?file handle|\bInput/output error|Structure needs cleaning|Remote I/O error|"
                r"Cannot send after (transport endpoint|socket) shutdown|"
                r"PytorchStreamWriter failed|iostream error|disk I/O error|inline_container\.cc.*unexpected pos"),
    ("storage", r"^(?!.*(\b(slurmstepd|srun)\S*: |Dist\w+Error|/gloo/)).*"
                r"(Transport endpoint is not connected|Read-only file system)"),  # what Slurm tries in vain ends nothing
    ("storage", _ERRNO % r"5|30|37|70|74|107|108|116|117|121|5[12]\d"),  # beyond 511: NFS's own, which Linux has no words for
    ("storage", _ERRNO % r"19|6[12]|10[0-4]|11[0-3]" + r"[^:(]*: b?['\"]"),  # of a connection or device, of a named file
    ("signal", r"DataLoader worker \(pid.*\) is killed by signal: Killed"),
    ("peer", r"another task died|the coordinator task died|heartbeat timeout\. This indicates that the remote task"),  # of JAX
    ("network", r"\b(httpx|httpcore|aiohttp|botocore|requests|urllib3|http\.client)\.(\w+\.)*\w*(Timeout|Connect|Network|"
                r"(Read|Write)Error|Remote|Disconnect|Incomplete|Chunked|Payload)|EOF occurred in violation of protocol|"
                r"Timeout(Error)?: (The \w+ operation )?timed out$|[Cc]ouldn't reach (https?:|'.*' on the Hub)|"
                r"[Cc]ould not resolve host|Client error '429|Server error '50\d|HTTP Error (429|50\d)|: 50\d [A-Z]+ https?:|"
                r"\(SlowDown\)|Internet connection is on|Run initialization has timed out|communicating with wandb"),
    ("network", r"urlopen error|HTTPS?ConnectionPool|Max retries exceeded with url|failure in name resolution|"
                r"Name or service not known|No address associated with hostname|Remote end closed connection|"
                r"[Cc]heck your (internet )?connection|[Cc]ouldn't connect to|(429 Client|50\d Server) Error|\bUNAVAILABLE\b"),
    ("network", r"EADDRINUSE|[Aa]ddress already in use|Cannot assign requested address"),  # the next one has another port
    ("network", r"No route to host|Network is (unreachable|down)|Host is down|connection abort|Connection aborted|"
                + _ERRNO % r"99|10[0-3]|110|112|113"),
    ("network", r"Got completion from peer \S+ with status="),
    ("network", r"ncclSystemError|unhandled system error|ibv_\w+ failed"),
    ("peer", r"ProcessGroupNCCL's watchdog|due to collective timeout or exception|connect\(\) timed out"),
    ("peer", r"client socket has (failed|timed out)|Timed out after \d+ seconds waiting for clients|[Ww]ait timeout|"
             r"Socket Timeout|Timeout waiting for key|initializing process group in store.based barrier|Rendezvous\w*Error\b|"
             r"connect to the store|Did the remote server shutdown|[Ss]top_waiting response"),
    ("peer", r"Watchdog caught collective operation timeout|Timed out waiting|Application timeout caused pair closure|"
             r"ProcessGroup\w+ is aborted due to timeout|Barrier timed out|DEADLINE_EXCEEDED"),
    ("peer", r"connectFullMesh failed|failed to pass monitoredBarrier|Rank \d+ successfully reached monitoredBarrier"),
    ("peer", r"ncclRemoteError|remote process exited|NCCL communicator was aborted|Connection (was )?(closed|reset) by (remote )?"
             r"peer|MPI_ERR_PROC_\w+|" + _ERRNO % "32|104|111"),
    ("peer", r"Broken pipe|Socket closed|failed to recv, got 0 bytes|Connection refused|(Read|Write) error \["),
    ("network", r"Dist(Network|Store)Error"),  # whatever else torch has met on its way to the store
))

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1b\x7f]")
# Of echoes those of ranks that have waited for one that was there.
TIMED_OUT = re.compile(r"[Tt]imed? ?out|failed to pass monitoredBarrier|(missing|sending) heartbeats")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank, as it wrote it down itself or, if it could not, as whoever saw it end did.

    Attributes:
        node: the scheduler's name; ``host``: the machine's own.
        kind: a key of ``KINDS``.
        message: what it was, without who.
        time: unix seconds.
        attempt: from 1.
        place: its coordinates, ``(("dp", 0), …)``; empty when nobody has noted them.
        traceback: of a Python error; may be empty.
        nodes: those that it found lost; ``silent``: their beats stopped, else connections broke; ``ambiguous``: this node
            may be the lost one as well.
        standing: where it stood; None: nobody knows.
        of_node: whether it is the one command of a node, which numbers its ranks itself.
        inner: which of those it says has failed; None where it says nothing of that.
    """

    rank: int
    node: str
    kind: str
    message: str
    time: float
    attempt: int = 1
    host: str = ""
    pid: int = 0
    place: tuple[tuple[str, int], ...] = ()
    traceback: str = ""
    nodes: tuple[str, ...] = ()
    silent: bool = False
    ambiguous: bool = False
    standing: Standing | None = None
    of_node: bool = False
    inner: int | None = None

    def __str__(self) -> str:
        """The one wording: who, where, did what, and why. What is wrong with an input is said to whoever wrote it."""
        if self.kind == "user":
            return one_line(self.message)
        return sentence(f"node {self.node}" if self.of_node else who(self.rank, self.place, self.node), self.kind, self.message)


YEAR_3000 = 32_503_680_000  # unix seconds: what calendars can show
AXES = ("dp", "pp", "cp", "tp")


def coordinates(place: RankPlace) -> tuple[tuple[str, int], ...]:
    """Of a rank on all axes, as records hold them."""
    return tuple((axis, getattr(place, axis)) for axis in AXES)


def who(rank: int, place: Iterable[tuple[str, int]] = (), node: str | None = None) -> str:
    """``rank 3 (dp 0, pp 1, tp 1) on n2``."""
    shown = ", ".join(f"{axis} {at}" for axis, at in place if axis != "cp" or at)
    return f"rank {rank}" + (f" ({shown})" if shown else "") + (f" on {node}" if node else "")


def sentence(subject: str, kind: str, message: str) -> str:
    """What has failed, what it has done, and the evidence."""
    text, said = KINDS[kind].text, one_line(message)
    return " ".join(filter(None, (subject, text and f"{text}:" if said else text, said)))


def one_line(message: str) -> str:
    """A message of several lines, as CUDA's are, in one, without colours and the like: it is the last line of logs."""
    plain = CONTROL.sub("", message)
    return " ".join(line.strip() for line in plain.splitlines() if line.strip())


def precedence(kind: str, time: float) -> tuple[int, float]:
    """By which the cause comes first among failures; ``time``: unix seconds, infinite where it is not known."""
    return KINDS[kind].level, time


def kind_of_end(code: int, program: bool = False) -> str:
    """The kind of failure of a process that ended without a word; ``code`` as ``subprocess`` gives it.

    Args:
        program: whether it is somebody's program: a crash in its own native code, which in our engine speaks of the machine, is
            then the program's.
    """
    if program and code in BY_ITSELF:
        return "crash"
    return "exit" if code >= 0 or code in BY_A_LIMIT else "ended" if code in BY_SOMEBODY else "signal"


def kind_of(text: str) -> str | None:
    """The kind of failure that a text speaks of; None for most texts."""
    return next((kind for kind, pattern in TEXTS if pattern.search(text)), None)


def write_failure(run: RunDirectory, failure: RankFailure) -> None:
    """Raises OSError."""
    tree = asdict(failure)
    del tree["place"]
    write_json(run.failure(failure.attempt, failure.rank), tree | dict(failure.place))


def read_failure(path: Path) -> RankFailure:
    """Raises OSError or ValueError when it is absent or broken."""
    tree = read_json(path)
    try:
        standing = tree.get("standing")
        found = RankFailure(
            int(tree["rank"]), str(tree["node"]), tree["kind"] if tree["kind"] in KINDS else "error", str(tree["message"]),
            float(tree["time"]), int(tree.get("attempt", 1)), str(tree.get("host", tree["node"])), int(tree.get("pid", 0)),
            tuple((axis, int(tree[axis])) for axis in AXES if axis in tree), str(tree.get("traceback", "")),
            tuple(map(str, tree.get("nodes", ()))), bool(tree.get("silent")), bool(tree.get("ambiguous")),
            standing_of(standing) if standing else None, bool(tree.get("of_node")),
            int(tree["inner"]) if tree.get("inner") is not None else None)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no record of a rank's end ({error})") from None
    if not 0 <= found.time < YEAR_3000:
        raise ValueError(f"no record of a rank's end (time = {found.time})")
    return found


def read_failures(run: RunDirectory, attempt: int | None = None) -> list[RankFailure]:
    """Of all ranks whose end is known, by rank; ``attempt``: None for all attempts.

    What is broken is left out, and so is the end of a rank that has begun anew since in the same attempt.
    """
    begun = {(line["attempt"], line["rank"]): line for line in _announced(run)}
    found = []
    for path in run.failure.found(*(() if attempt is None else (attempt,))):
        with suppress(OSError, ValueError, TypeError):
            failure = read_failure(path)
            start = begun.get((failure.attempt, failure.rank), {})
            if failure.time >= float(start.get("time", 0)):
                known = failure.place or tuple((axis, int(start[axis])) for axis in AXES if axis in start)
                found.append(replace(failure, place=known))
    return found


def root_cause(failures: Sequence[RankFailure], standings: Iterable[Standing], places: Sequence[RankPlace],
               nodes: Sequence[str]) -> RankFailure | None:
    """The failure that explains the others; None when there is none.

    Args:
        failures: of ranks whose end is known; ``standings``: of ranks that stood still when they were last seen.
        places: of all ranks; ``nodes``: the name of every node of the placement.
    """
    first = min(failures, key=lambda failure: precedence(failure.kind, failure.time), default=None)
    if first is not None and KINDS[first.kind].level < ECHO:
        return first
    stood = {standing.rank: standing for standing in standings}
    stood |= {failure.rank: failure.standing for failure in failures if failure.standing is not None}
    given_up = min((failure.time for failure in failures if failure.kind in ("hang", "lost")), default=math.inf)
    stood = {rank: standing for rank, standing in stood.items() if standing.since < given_up}  # who moves later was waited for
    end = awaited(stood.values(), [place.rank for place in places] or list(stood))
    return first if end is None else _awaited(end, {failure.rank: failure for failure in failures}, stood, places, nodes)


def _awaited(end: Awaited, failures: dict[int, RankFailure], stood: dict[int, Standing], places: Sequence[RankPlace],
             nodes: Sequence[str]) -> RankFailure:
    """The failure of the rank for which all others waited, whether it could write or not."""
    own, standing = failures.get(end.rank), stood.get(end.rank)
    at = next((place for place in places if place.rank == end.rank), None)
    node = own.node if own else nodes[at.node] if at and at.node < len(nodes) else ""
    others = f"rank{'s' if len(end.by) > 1 else ''} {', '.join(map(str, end.by))} waited for it"
    accusers = [failure for failure in failures.values() if failure.kind == "lost" and node in failure.nodes]
    if own is not None and own.kind not in ("straggled", "peer"):
        kind, text = own.kind, own.message
    elif accusers:
        kind, text = "lost", accusers[0].message
    elif standing is not None:
        kind, text = "hang", str(standing)
    else:
        kind, text = "silent", "it was stopped, is gone, or is stuck in native code"
    moment = own.time if own else max([*(each.time for each in stood.values()), *(each.time for each in failures.values())])
    known = coordinates(at) if at else own.place if own else ()
    blamed = accusers[0].nodes if accusers and kind == "lost" else own.nodes if own else ()
    return RankFailure(end.rank, node, kind, f"{text}; {others}", moment, place=known, nodes=blamed, standing=standing,
                       traceback=own.traceback if own and kind == own.kind else "")


def judged(run: RunDirectory, attempt: int, nodes: Sequence[str] | None = None) -> RankFailure | None:
    """The failure that explains an attempt, from what its ranks have left; None when they have left nothing.

    Args:
        nodes: the name of every node of the placement; None: as the ranks have announced them.
    """
    try:
        places: Sequence[RankPlace] = from_dict(read_json(run.of_attempt(attempt).placement)).ranks
    except (OSError, ValueError, TypeError, AttributeError, HpcMpError):  # the records are there all the same
        places = ()
    return root_cause(read_failures(run, attempt), read_standings(run, attempt), places,
                      nodes if nodes is not None else _nodes(run, attempt, places))


def _announced(run: RunDirectory) -> list[dict[str, Any]]:
    """The lines of ``ranks.jsonl`` that tell of a rank of an attempt."""
    with suppress(OSError):
        return [line for line in read_lines(run.ranks) if isinstance(line, dict)
                and isinstance(line.get("attempt"), int) and isinstance(line.get("rank"), int)]
    return []


def _nodes(run: RunDirectory, attempt: int, places: Sequence[RankPlace]) -> list[str]:
    """The names of the nodes, of which each rank has written its own."""
    names_given = {line["rank"]: str(line.get("node", "")) for line in _announced(run) if line["attempt"] == attempt}
    names = {place.node: names_given[place.rank] for place in places if names_given.get(place.rank)}
    return [names.get(node, f"node{node}") for node in range(max((place.node for place in places), default=-1) + 1)]
