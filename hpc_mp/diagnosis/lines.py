"""Patterns of single log lines: of srun and slurmstepd, of the kernel, of CUDA, NCCL and Python."""

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpc_mp.base.exit_codes import SIGNALS
from hpc_mp.cluster.node.xids import NEEDS, blamed
from hpc_mp.diagnosis.texts import kind_in_output

# The kernel's message about a process killed for lack of memory; only newer kernels give the cgroup and the user.
KILLED_PID = re.compile(r"Kill(?:ed)? process (\d+)|\boom-kill:.*\bpid=(\d+)")
KILLED_IN_JOB = re.compile(r"\btask_memcg=\S*/job_(\d+)\b")
KILLED_USER = re.compile(r"\boom-kill:.*\buid=(\d+)|\bUID:(\d+)\b")

# The last line of an interpreter, or of its starter, that lacks a module; and the last line of any Python error.
NOT_INSTALLED = re.compile(r"(ModuleNotFoundError|\S*python\S*): No module named \S+$")
PYTHON_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)(: .*)?$|Fatal Python error: ")
NO_DEVICE = re.compile(r"no (CUDA|ROCm)-capable device is detected|No (CUDA|HIP) GPUs are available|Found no NVIDIA driver")
NO_USE = re.compile(NO_DEVICE.pattern + "|busy or unavailable|system not yet initialized|unsupported display driver|"
                    r"forward compatibility was attempted|OS call failed")
CANNOT_START = frozenset({126, 127})  # of shells and env: not executable, or not found

# slurmstepd's reason for the end of a whole job.
CANCELLED = re.compile(r"\*\*\* (?:JOB \d+|STEP \S+) ON (\S+) CANCELLED AT \S+ DUE TO ([A-Z ]+?)(?:,| \*\*\*)")
JOB_CANCELLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE TO SIGNAL \w+ )?\*\*\*", re.IGNORECASE)
STEP_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ (?:DUE TO SIGNAL \w+ )?\*\*\*", re.IGNORECASE)
STEP_ASKED = re.compile(r"slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT ")  # at SIGTERM and SIGKILL
NODE_LOST = re.compile(r"srun: error: Node failure on \S+|DUE TO NODE FAILURE")
NODE_FAILURE = re.compile(r"Node failure on (\S+)|[Ll]aunch .*failed on node (\S+):")
TASK_NOT_LAUNCHED = re.compile(r"srun: error: task (\d+) launch failed: ")
# Open MPI's mpirun, releases 4 and 5, about the node of a daemon that it lost.
DAEMON_LOST = re.compile(r"^ *Remote daemon *: \S+ on node (\S+)")

MPI_PLUGIN = re.compile(r"srun: error: Invalid MPI type '(\w+)'")
# slurmstepd's messages about ranks that may wait in MPI_Init forever; MPICH with PMI2 causes the last two at every start.
MPI_PLUGIN_SAYS = re.compile(r"\berror: +(mpi/pm\w+: (?!no value for key|value not properly terminated).+)")

# An MPI that does not know the launcher: Open MPI 4 and 5, MPICH 4 and 5. After ALONE, each rank continues by itself.
ALONE = re.compile(r"No PMIx server was reachable|no-pmix-but$")
UNMET_MPI = re.compile(ALONE.pattern + r"|not built with SLURM's PMI support|unsupported PMI version|launcher not compatible|"
                       r"PMI[2X]?_Init\S* (?:failed|returned)|OPAL ERROR: Unreachable in file")
IMPROPER = re.compile(r"(?:prterun|mpirun|mpiexec|orterun) has exited due to process rank (\d+) with PID \d+ on")  # of Open MPI

# slurmstepd's messages about tasks that never began: the image lacks the command, or pyxis could not make a container of the
# image. Lines of enroot's log are among them, indented further. Recorded with pyxis 0.24, enroot 4.1 and Slurm 22.05.
_STEPD = re.compile(r"^ *\d+: slurmstepd\S*: error: (.+)$")
_LACKS = re.compile(r"execve\(\): (\S+): (?:No such file or directory|Permission denied)$")
_NO_PLUGIN = "Failed to invoke spank plugin stack"
_PYXIS = re.compile(r"pyxis: (?! |child |printing |couldn't create enroot|container (?:was not|start failed|exited too))(.+)")
_ENROOT = re.compile(r"pyxis:  +(?!\[INFO\]|Parallel unsquashfs|\d+ inodes|created \d)(?:\[ERROR\] )?(\S.*)")
_FATAL = re.compile(r"FATAL: {3}(.+)")  # last line of an apptainer or singularity that could not make a container
LABEL = re.compile(r"^ *(\d+): (.*)$")  # from srun --label: the task number
_PYXIS_ENDED = re.compile(r"pyxis: child \d+ terminated with signal (\d+)$")

OWN = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE})  # never caused by another task's end
_END = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$")
_COMPLETED = re.compile(r"srun: (?:\S+ )*?(\S+): tasks? ([\d,-]+): Completed$")
_LAUNCHED = re.compile(r"launching (?:StepId=)?(\S+) on host \S+, \d+ tasks: \[?([\d,-]+)")  # of srun --verbose
OURS = "hpc-mp: "  # prefix of our own lines in the job script's log: they may quote an earlier attempt
HANG_ENDED = f"{OURS}the ranks hang and are ended"  # in srun's log, before their ends
OTHERS_ENDED = f"{OURS}a rank has failed, and the others are ended"
_ABORTED = re.compile(r"Terminating (?:StepId|job step)|Job step aborted|forcing job termination|Force Terminated|"
                      + f"{HANG_ENDED}|{OTHERS_ENDED}")
_EXIT = re.compile(r"Exited with exit code (\d+)")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """Tasks (Slurm's numbers, not ranks) of one host with the same end. ``code``: negative for a signal, None for lack of memory.
    ``echo``: True if srun had already begun to end the step."""

    host: str
    tasks: tuple[int, ...]
    code: int | None
    line: str
    echo: bool = False


def unmet_mpi(lines: Iterable[str], pattern: re.Pattern[str] = UNMET_MPI) -> str | None:
    """Return the reason why a program's ranks did not meet by MPI, and the remedy; None if no line reports it."""
    line = next(filter(pattern.search, lines), None)
    text = re.sub(r"^ *\d+: ", "", line or "").strip()
    return None if line is None else (
        f'its MPI does not know the launcher of the ranks ({text}). Set slurm.mpi = "pmix" for Open MPI, "pmi2" for MPICH and '
        'Intel MPI, or "mpirun" with the mpirun of that MPI on PATH; `srun --mpi=list` lists what this Slurm supports')


def task_ends(lines: Iterable[str]) -> Iterator[TaskEnd]:
    """Return the ends of tasks that srun reports, the earliest first, without echoes."""
    return (end for end in all_ends(lines) if end.code is None or not end.echo)


def all_ends(lines: Iterable[str]) -> Iterator[TaskEnd]:
    """Yield the ends of tasks that srun reports, the earliest first."""
    aborted = False
    for line in lines:
        aborted = aborted or _ABORTED.search(line) is not None
        match = _END.search(line)
        if match is None:
            continue
        how = match[3]
        exited = _EXIT.fullmatch(how)
        if exited is None and how not in SIGNALS and how != "Out Of Memory":
            continue
        code = None if how == "Out Of Memory" else int(exited[1]) if exited else -SIGNALS[how]
        yield TaskEnd(match[1], _numbers(match[2]), code, line, aborted and code not in OWN)


def completed_first(lines: Iterable[str]) -> TaskEnd | None:
    """Return the first tasks that ended successfully, if srun reports it (``--verbose``) and others then failed or were ended."""
    first = None
    for line in lines:
        if _ABORTED.search(line) or ((match := _END.search(line)) is not None and match[3] != "Completed"):
            return first
        if first is None and (done := _COMPLETED.search(line)) is not None:
            first = TaskEnd(done[1], _numbers(done[2]), 0, line)
    return None


def gave_up(lines: Iterable[str]) -> bool:
    """Return True if srun left its last step before it knew the end of every task. Its code 0 is then not a task's: it waits
    KillWait and two seconds for tasks that it has ended, and not at all for tasks that Slurm has lost."""
    step, running = "", set[int]()
    for line in lines:
        if (launched := _LAUNCHED.search(line)) is not None:
            if launched[1] != step:
                step, running = launched[1], set()
            running.update(_numbers(launched[2]))
        elif (end := ended_there(line)) is not None:
            running.difference_update(end[1])
    return bool(running)


def ends_step(line: str) -> bool:
    """Return True if srun reports in this line that it ends the remaining tasks of its step."""
    return _ABORTED.search(line) is not None


def ended_there(line: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the host and the tasks whose end, of any kind, srun reports in this line; None for other lines."""
    match = _END.search(line) or _COMPLETED.search(line)
    return (match[1], _numbers(match[2])) if match is not None else None


def first_code(lines: Iterable[str]) -> int | None:
    """Return the code of the task that ended first. srun's own code is the greatest, and 143 if it ended the others."""
    return next((end.code for end in task_ends(lines) if end.code != 0), None)


@dataclass(frozen=True, slots=True)
class TasksRefused:
    """The reason why tasks of a node never began. ``reason``: message of slurmstepd, pyxis and enroot, or apptainer. ``lacks``:
    the missing command. ``signal``: the signal that ended pyxis' own work; None if no signal did."""

    reason: str
    lacks: str | None = None
    signal: int | None = None


def not_started(lines: Iterable[str]) -> TasksRefused | None:
    """Return the reason in a node's log for which slurmstepd or the container could not start tasks; None without one."""
    lines = list(lines)
    messages = [match[1] for line in lines if (match := _STEPD.match(line))]
    lacking = next((match for text in messages if (match := _LACKS.match(text))), None)
    if lacking is not None:
        return TasksRefused(lacking[0], lacks=lacking[1])
    if _NO_PLUGIN not in messages:
        return _no_container(lines)
    pyxis = [match[1] for text in messages if (match := _PYXIS.match(text))]
    enroot = [match[1] for text in messages if (match := _ENROOT.match(text))]
    ended = next((int(match[1]) for text in messages if (match := _PYXIS_ENDED.match(text))), None)
    parts = dict.fromkeys((*pyxis[:1], *enroot[:1], *enroot[-1:]))
    return TasksRefused(": ".join(parts) or _NO_PLUGIN, signal=ended)


def _no_container(lines: Iterable[str]) -> TasksRefused | None:
    """Return apptainer's reason if it is the last line of every task of a node: then none has begun in its container."""
    last = {match[1]: match[2] for line in lines if (match := LABEL.match(line)) and not _STEPD.match(line)}
    fatal = [_FATAL.fullmatch(line) for line in last.values()]
    return TasksRefused(fatal[0][1]) if fatal and fatal[0] is not None and all(fatal) else None


def xid(line: str) -> str | None:
    """Return the meaning of an Xid after which a GPU needs a reset or repair; None for other lines."""
    fault = next(iter(blamed([line])), None)
    if fault is None:
        return None
    name = "" if fault.number is None else f"Xid {fault.number} of "
    return f"{name}GPU {fault.bus}".rstrip() + f" ({fault.meaning}; it needs a {NEEDS[fault.action]})"


def sign(line: str) -> str | None:
    """Return the kind of failure that a line reports; None for a line without one."""
    return "hardware" if xid(line) is not None else kind_in_output(line)


def _numbers(text: str) -> tuple[int, ...]:
    """Parse ``0-1,4`` to (0, 1, 4). A range longer than any job is cut."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            numbers += range(int(low), min(int(high or low), int(low) + (1 << 17)) + 1)
    return tuple(numbers)
