"""Symptoms of a failure, of ranks, tasks, nodes or the job, found in each source of evidence.

The symptom that explains the others is chosen in ``classify``.
"""

import re
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from hpc_mp.base.exit_codes import ending
from hpc_mp.diagnosis import lines as parsed
from hpc_mp.diagnosis.ends import Symptom, awaited_in_vain, given_up, words_of_end
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.not_begun import never_begun
from hpc_mp.diagnosis.tracebacks import last_error
from hpc_mp.diagnosis.watchdogs import collective_timeout
from hpc_mp.rundir.attempt import last_words
from hpc_mp.rundir.failures import KINDS, kind_of_end
from hpc_mp.rundir.outcome import STOPPED

# The text of an exception may be more specific than its kind: lack of memory, a broken GPU.
MORE_EXACT = frozenset({"memory", "hardware", "space", "storage", "network"})
NO_LIBRARY = ("is listed by srun, but this Slurm cannot load it. Use another one from `srun --mpi=list`, or ask your "
              "administrators for its library")
SLURMS = re.compile(r"srun: |slurmstepd: |hpc-mp: |\d+: hpc-mp: ")  # lines of srun's log that are not mpirun's
OF_A_GPU = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL", re.IGNORECASE)
LOST_PMIX = 14  # Open MPI's exit code for a rank whose PMIx server is gone
# Messages of MPICH and Intel MPI, of Cray's MPI, of older releases of both, and of Open MPI. The first also reports errors
# inside of MPI.
ABORTED = re.compile(r"\bAbort ?\((-?\d+)\)(?:(?: on node \d+)? \(rank|: Fatal)|application called MPI_Abort\(\w+, (-?\d+)\)|"
                     r"^with errorcode (-?\d+)\.$")
CALLED = "MPI_Abort"  # in the message of a rank that ended the others deliberately
SIGKILLED = re.compile(r"SIGKILL|signal: Killed|ran out of memory|Out Of Memory")
LAST_LINES = 1000  # last lines of a rank's log in which a program's messages concern its end


def found_in(evidence: Evidence) -> list[Symptom]:
    """Return all symptoms that show a failure by themselves."""
    sources = (_records, _hang, _unended, _watchdogs, _early, _srun, _nodes, _log_lines, never_begun)
    return [symptom for source in sources for symptom in source(evidence)]


def _records(evidence: Evidence) -> Iterator[Symptom]:
    for failure in evidence.failures:
        reported = parsed.sign(failure.message) if failure.kind in ("error", "memory", "storage") else None
        kind = reported if reported in MORE_EXACT else failure.kind
        if evidence.by_mpirun and failure.kind == "exit" and failure.message.startswith(ending(LOST_PMIX)):
            kind = "peer"  # it may end some milliseconds before the rank whose end it noticed
        own = evidence.program and KINDS[kind].level <= KINDS["error"].level
        yield Symptom(kind, failure.message, failure.node, failure.rank, None, failure.time, failure.nodes, own, failure.inner)


def _hang(evidence: Evidence) -> Iterator[Symptom]:
    if evidence.hang is not None:
        place = evidence.places.get(evidence.hang.rank) if evidence.hang.rank is not None else None
        text = f"{evidence.hang}{_plugin_says(evidence)}"
        yield Symptom("hang", text, evidence.hosts[place.node] if place else None, evidence.hang.rank)


def _plugin_says(evidence: Evidence) -> str:
    """Return the first complaint of Slurm's MPI plugin; empty without one."""
    lines = chain(*evidence.logs.values()) if evidence.program else ()
    match = next(filter(None, map(parsed.MPI_PLUGIN_SAYS.search, lines)), None)
    return f"; Slurm reports {match[1]!r}" if match else ""


def _unended(evidence: Evidence) -> Iterator[Symptom]:
    """Yield nodes that no longer answer srun or do not know the step: they died, and some have rebooted."""
    if evidence.unended:
        yield Symptom("lost", "it did not report the end of its tasks to srun, which ended all others", lost=evidence.unended)


def given_up_inside(evidence: Evidence) -> Iterator[Symptom]:
    """Yield ranks that have not ended although their last output is a traceback: MPI and NCCL may wait as Python exits."""
    for place in evidence.places.values():
        host = evidence.hosts[place.node]
        cause = given_up(evidence.lines_of_task(host, evidence.task_of(place.rank)), evidence.of_node)
        if cause is not None:
            yield replace(cause, host=host, rank=place.rank, own=True)


def awaited_in_vain_by_all(evidence: Evidence, symptoms: Sequence[Symptom]) -> Iterator[Symptom]:
    """Yield the rank that all others gave up waiting for, including ranks that were ended before their own timeout."""
    if evidence.of_node:
        return
    complaints = {symptom.rank: symptom.text for symptom in symptoms if symptom.rank is not None and symptom.kind == "peer"}
    if not complaints:
        return
    for place in evidence.places.values():
        lines = evidence.lines_of_task(evidence.hosts[place.node], evidence.task_of(place.rank))
        error = last_error(lines, code=0)
        if place.rank not in complaints and error is not None and error.kind == "peer":
            complaints[place.rank] = str(error)
    missing = awaited_in_vain(complaints, evidence.places)
    if missing is not None:
        rank, text = missing
        yield Symptom("hang", text, evidence.hosts[evidence.places[rank].node], rank)


def _watchdogs(evidence: Evidence) -> Iterator[Symptom]:
    """Yield a collective of a program that did not end, as NCCL reports it."""
    if not evidence.program or evidence.of_node:  # the output of a node's ranks is not separated by rank
        return
    lines = {place.rank: evidence.lines_of_task(evidence.hosts[place.node], evidence.task_of(place.rank))[-LAST_LINES:]
             for place in evidence.places.values()}
    timeout = collective_timeout(lines, len(evidence.places))
    if timeout is not None:
        place = evidence.places.get(timeout.apart) if timeout.apart is not None else None
        yield Symptom("hang", str(timeout), evidence.hosts[place.node] if place else None, timeout.apart)


def _early(evidence: Evidence) -> Iterator[Symptom]:
    """Yield a task that had ended successfully by itself when the others failed or hung."""
    improper = next((match for line in evidence.srun if (match := parsed.IMPROPER.search(line))), None)
    if improper is not None and (place := evidence.places.get(int(improper[1]))) is not None:
        yield Symptom("early", "without MPI_Finalize", evidence.hosts[place.node], place.rank)
    end = parsed.completed_first(evidence.srun)
    if end is not None and not evidence.by_mpirun:  # a task of a node ends well as soon as mpirun's daemon does
        yield Symptom("early", "with exit code 0, while the others kept running", end.host,
                      evidence.rank_of(end.host, end.tasks[0]), end.tasks[0])


def _srun(evidence: Evidence) -> Iterator[Symptom]:
    """Yield symptoms from srun's messages about ends of tasks and slurmstepd's messages about the end of the job."""
    for end in parsed.task_ends(evidence.srun):
        yield from _end(end, evidence) if not evidence.by_mpirun else _end_of_node(end, evidence)
    for line in evidence.srun:
        if failed := parsed.NODE_FAILURE.search(line):
            yield Symptom("node", line.strip(), failed[1] or failed[2])
        elif task := parsed.TASK_NOT_LAUNCHED.match(line):
            yield Symptom("node", line.strip(), evidence.host_of_task(int(task[1])))
        elif (daemon := parsed.DAEMON_LOST.match(line)) and daemon[1] in evidence.hosts:
            yield Symptom("lost", f"mpirun has lost its daemon on {daemon[1]}", lost=(daemon[1],))
        elif (cancelled := parsed.CANCELLED.search(line)) is not None:
            yield Symptom("node" if cancelled[2].startswith("NODE FAILURE") else "cancelled", line.strip())
        elif parsed.JOB_CANCELLED.search(line):
            yield Symptom("cancelled", line.strip())
        elif (plugin := parsed.MPI_PLUGIN.search(line)) is not None:
            yield Symptom("user", f"slurm.mpi = {plugin[1]!r}: {NO_LIBRARY}")


def _end_of_node(end: parsed.TaskEnd, evidence: Evidence) -> Iterator[Symptom]:
    """Yield symptoms of the task in which mpirun or its daemon ran: it reports on ranks without a record."""
    if end.code is None:
        yield Symptom("memory", end.line.strip(), end.host)
    elif end.code < 0:
        yield Symptom(kind_of_end(end.code, evidence.program), ending(end.code), end.host)
    elif end.code > 0 and end.code != STOPPED and not evidence.failures and not any(map(parsed.DAEMON_LOST.match, evidence.srun)):
        yield from _exceptions(evidence)
        last_output = last_words([line for line in evidence.srun if not SLURMS.match(line)])
        suffix = f"; its last words: {last_output}" if last_output else ""
        yield Symptom("launcher", f"{ending(end.code)} (mpirun's code){suffix}", end.host)


def _exceptions(evidence: Evidence) -> Iterator[Symptom]:
    """Yield symptoms of ranks that mpirun ended before their own errors could end them."""
    for place in evidence.places.values():
        host = evidence.hosts[place.node]
        lines = evidence.lines_of_task(host, place.rank)  # each rank has its own log then
        if last_error(lines) is not None:
            yield replace(words_of_end(lines, 1, program=True), host=host, rank=place.rank, own=True)


def _end(end: parsed.TaskEnd, evidence: Evidence) -> Iterator[Symptom]:
    if parsed.not_started(evidence.logs.get(end.host, ())) is not None:  # then the code is slurmstepd's
        return
    for task in end.tasks:
        rank = evidence.rank_of(end.host, task)
        if end.code is None:
            yield Symptom("memory", end.line.strip(), end.host, rank, task)
        elif end.code < 0 or evidence.is_silent(end, rank):
            lines = evidence.lines_of_task(end.host, task)
            cause = words_of_end(lines, end.code, program=evidence.program, of_node=evidence.of_node)
            broken = next(filter(None, map(parsed.xid, lines[-LAST_LINES:])), None) if OF_A_GPU.search(cause.text) else None
            if evidence.program and broken:
                cause = replace(cause, kind="hardware", text=f"{broken}; {cause.text}")
            yield replace(cause, host=end.host, rank=rank, task=task, own=evidence.program)


def _nodes(evidence: Evidence) -> Iterator[Symptom]:
    for host, state in evidence.states.items():
        if state.startswith("down") or state.endswith("*"):  # the star: it does not answer
            yield Symptom("node", f"its state is {state}", host)


def srun_complaint(evidence: Evidence) -> str:
    """Return srun's last complaint."""
    complaints = (line for line in reversed(evidence.srun) if line.startswith(("srun: error:", "srun: fatal:")))
    return next((f"the only message is {line!r}" for line in complaints), "no message gives a reason")


def vanished(evidence: Evidence) -> Iterator[Symptom]:
    """Yield the hosts that neither a rank nor srun mentions, while all others report lost peers: a failure and quick return,
    unnoticed by Slurm."""
    if not evidence.failures or any(failure.kind != "peer" for failure in evidence.failures):
        return
    mentioned_hosts = {failure.node for failure in evidence.failures} | {end.host for end in parsed.all_ends(evidence.srun)}
    silent = tuple(host for host in evidence.hosts if host not in mentioned_hosts)
    if silent and 2 * len(silent) < len(evidence.hosts):
        yield Symptom("lost", f"no report from {', '.join(silent)} when all others lost a peer", lost=silent)


def _log_lines(evidence: Evidence) -> Iterator[Symptom]:
    for line in evidence.srun:
        if (kind := parsed.sign(line)) is not None:
            yield _line(kind, line, None, evidence)
    for host, lines in chain(evidence.logs.items(), evidence.kernel.items()):
        theirs = evidence.program and lines is evidence.logs.get(host)  # its output may mention anything; _end reports its end
        strangers = () if theirs else _strangers(host, lines, evidence)
        for line in lines:
            if line not in strangers and not (theirs and "slurmstepd" not in line) and (kind := parsed.sign(line)) is not None:
                yield _line(kind, line, host, evidence)


def _strangers(host: str, lines: Sequence[str], evidence: Evidence) -> Collection[str]:
    """Return kernel lines about a process outside of the job: it belongs to another job or user, or no rank there was killed.
    A kernel reports each process in several lines, one of them with the cgroup."""
    killed = {line: int(match[1] or match[2]) for line in lines if (match := parsed.KILLED_PID.search(line))}
    ours: dict[int, bool] = {}
    for line, pid in killed.items():
        job, user = parsed.KILLED_IN_JOB.search(line), parsed.KILLED_USER.search(line)
        if (host, pid) in evidence.pids or job is not None:
            ours[pid] = job is None or job[1] == evidence.job
        elif user is not None and evidence.user is not None and int(user[1] or user[2]) != evidence.user:
            ours.setdefault(pid, False)
    if any(pid not in ours for pid in killed.values()) and not any(  # no process of the job there ended as by the kernel
            symptom.host == host and SIGKILLED.search(symptom.text) for symptom in (*_srun(evidence), *_records(evidence))):
        ours = {**dict.fromkeys(killed.values(), False), **ours}
    return [line for line in lines if not ours.get(killed.get(line, 0), True) or ("invoked oom-killer" in line and killed)]


def _line(kind: str, line: str, host: str | None, evidence: Evidence) -> Symptom:
    label = parsed.LABEL.match(line)
    text = label[2] if label else line.strip()
    fault = parsed.xid(text)
    task = int(label[1]) if label and "slurmstepd" not in text else None  # slurmstepd's lines carry a node's first task
    if "being killed" in text:
        task = evidence.largest
    rank = evidence.rank_of(host, task)
    if (pid := parsed.KILLED_PID.search(text)) and host is not None:
        rank = evidence.pids.get((host, int(pid[1] or pid[2])))
    return Symptom(kind, fault or text, host, rank, task)


def ended_by_mpi(evidence: Evidence) -> list[Symptom]:
    """Return the ranks that made PMIx or PMI end their step. It ends the step by SIGKILL before srun reports any end."""
    ends = list(parsed.all_ends(evidence.srun)) if evidence.by_mpi and not evidence.hang else []
    if any(end.code == -signal.SIGTERM for end in ends):  # Slurm does so if a user ends the step
        return []
    own = [(end.code, symptom) for end in ends if end.code and end.code > 0 for symptom in _end(end, evidence)]
    own += [(1, symptom) for symptom in sorted(_aborted(evidence), key=lambda symptom: CALLED not in symptom.text) if ends]
    named = ([symptom for _, symptom in own if symptom.kind != "exit"]
               or [symptom for code, symptom in own if code != LOST_PMIX][:1])
    killed = any(end.code == -signal.SIGKILL for end in ends)  # their order does not show which was the first
    raised = list(given_up_inside(evidence)) if killed and not named else []  # MPI killed it before its end was recorded
    text = f"lost one of its ranks, which {ending(-signal.SIGKILL)}, and MPI ended the others{_plugin_says(evidence)}"
    return named or raised or ([Symptom("signal", text)] if killed else [])


def _aborted(evidence: Evidence) -> Iterator[Symptom]:
    """Yield ranks whose MPI reports that it aborts all, with its code. PMI2 kills the ranks before srun can report an end."""
    for place in evidence.places.values():
        lines = evidence.lines_of_task(evidence.hosts[place.node], evidence.task_of(place.rank))[-LAST_LINES:]
        match = next(filter(None, map(ABORTED.search, reversed(lines))), None)
        if match is not None:
            cause = words_of_end(lines, int(match[1] or match[2] or match[3] or 1) % 256 or 1, program=True)
            yield replace(cause, host=evidence.hosts[place.node], rank=place.rank, own=True)


def step_cancelled(evidence: Evidence) -> Symptom | None:
    """Return the symptom of a program that did not fail but whose step was cancelled. slurmstepd reports any step that srun
    ends."""
    lines = chain(evidence.srun, *evidence.logs.values()) if evidence.program else ()
    line = next((match[0] for match in map(parsed.STEP_CANCELLED.search, lines) if match), None)
    return None if line is None else Symptom("cancelled", f"{line}: its step was cancelled (scancel)")


def last_error_line(evidence: Evidence) -> Symptom | None:
    """Return the last line that looks like a Python error: from ranks, else from srun; None without one."""
    for host, lines in chain(evidence.logs.items(), ((None, evidence.srun),)):
        for line in reversed(lines):
            label = parsed.LABEL.match(line)
            if parsed.PYTHON_ERROR.match(label[2] if label else line):
                return _line("error", line, host, evidence)
    return None
