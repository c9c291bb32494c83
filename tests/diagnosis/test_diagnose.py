"""Why a start died: recorded and real-looking ends, what goes before what, and any text at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering import job
from watchdog_words import said as watchdog_said

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Evidence, Hang
from hpc_mp.diagnosis.lines import first_code, gave_up, sign, task_ends, xid
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_json
from hpc_mp.rundir.failures import ECHO, KINDS, RankFailure
from hpc_mp.rundir.records import RankStart, line_of
from hpc_mp.rundir.standings import Standing, Wait
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.gather import ScriptLog, gather

HOSTS = ("n1", "n2", "n3", "n4")
PLACES = {place_.rank: place_ for place_ in place(Degrees(tensor=2, pipeline=2, data=2), "DPT", 2).ranks}
JOB = Evidence(code=143, places=PLACES, hosts=HOSTS, supervisor_host="n1", run=RunDirectory(Path("/run")))

# What srun 22.05.8 writes after a task of its own accord has ended, recorded on four hosts.
ENDS_OTHERS = (
    "srun: launch/slurm: _step_signal: Terminating StepId=9.0",
    "srun: error: n3: task 4: Terminated",
    "srun: error: n1: tasks 0-1: Terminated",
    "srun: error: n4: tasks 6-7: Terminated",
    "srun: error: n2: tasks 2-3: Terminated",
    "srun: Force Terminated StepId=9.0",
)
def said(rank: int, node: str, kind: str, message: str, time: float, nodes: tuple[str, ...] = (), standing: Standing | None = None
         ) -> RankFailure:
    return RankFailure(rank, node, kind, message, time, nodes=nodes, standing=standing)


def stands(rank: int, *awaited: int, passed: int = 7, number: int = 7) -> Standing:
    """In the n-th message of a group with others, having come to so many of them."""
    wait = Wait("all_reduce", awaited, "group 1", number) if awaited else None
    return Standing(rank, 50.0, 40.0, 0.0, 4, 0, "forward (stage.py:7)", wait, {"group 1": passed})


PEER = said(0, "n1", "peer", "RuntimeError: [gloo] Connection closed by peer [10.77.0.13]:4711", 50.0)
WATCHDOG = "2: [rank2]:[E1120] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"


def srun(first: str, *before: str) -> Evidence:
    return replace(JOB, srun=(*before, first, *ENDS_OTHERS), failures=(PEER,))


def died(rank: int, kind: str, message: str, *nodes: str) -> Evidence:
    return replace(JOB, failures=(PEER, said(rank, HOSTS[rank // 2], kind, message, 40.0, nodes)),
                   srun=(f"srun: error: {HOSTS[rank // 2]}: task {rank}: Exited with exit code 1", *ENDS_OTHERS))


def log(host: str, *lines: str) -> Evidence:
    return replace(JOB, logs={host: lines}, failures=(PEER,), srun=ENDS_OTHERS)


def kernel(host: str, *lines: str) -> Evidence:
    return replace(JOB, kernel={host: lines}, failures=(PEER,), srun=("srun: error: n3: task 5: Aborted", *ENDS_OTHERS))


OVER_LIMIT = replace(  # recorded: JobAcctGatherParams=OverMemoryKill; the label is that of the node's first task
    JOB, code=137, failures=(PEER,),
    srun=("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", "srun: error: n4: tasks 6-7: Killed",
          "srun: launch/slurm: _step_signal: Terminating StepId=1.0", "srun: error: n2: tasks 2-3: Killed",
          "srun: error: n1: tasks 0-1: Killed", "srun: error: n3: tasks 4-5: Killed",
          "slurmstepd-n1: error: Exceeded job memory limit"),
    logs={"n3": ("4: slurmstepd-n3: error: StepId=1.0 exceeded memory limit (376565760 > 314572800), being killed",),
          "n1": ("0: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-20T11:06:31 ***",)})
NODE_KILLED = replace(  # recorded
    JOB, srun=("srun: error: Node failure on n3", "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
               "srun: got SIGCONT", "srun: forcing job termination", "srun: error: n2: tasks 2-3: Terminated",
               "slurmstepd-n1: error: *** JOB 13 ON n1 CANCELLED AT 2026-11-20T11:07:31 DUE TO NODE FAILURE, SEE SLURMCTLD LOG "
               "FOR DETAILS ***"), failures=(PEER,), states={"n1": "allocated", "n3": "down*"})
SCANCEL = replace(  # recorded
    JOB, srun=("srun: forcing job termination", "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
               "srun: got SIGCONT", "srun: error: n1: tasks 0-1: Terminated",
               "slurmstepd-n1: error: *** JOB 11 ON n1 CANCELLED AT 2026-11-20T11:07:07 ***"))
XID_79 = "[ 4242.42] NVRM: Xid (PCI:0000:c6:00): 79, pid=1101234, name=python, GPU has fallen off the bus."
RANK_5 = "rank 5 (dp 1, pp 0, tp 1) on n3"

NO_PYTHON = "2: env: ‘/no/python’: No such file or directory"
NO_PACKAGE = "3: ModuleNotFoundError: No module named 'torch'"
DONE = "srun: launch/slurm: _task_finish: n2: task 3: Completed"
BOOM = ("4: step 1", "5: Traceback (most recent call last):", '5:   File "/home/ann/train.py", line 7, in <module>',
        '5:   File "/opt/py/lib/python3.11/site-packages/x.py", line 99, in f', "5:     raise ValueError('boom')",
        "5: ValueError: boom", "4: step 2")


def everywhere(code: int) -> tuple[str, ...]:
    """Recorded with a program that is on no host: srun ends the step after the first, and all others end so too."""
    first, *others = (f"srun: error: n{host}: tasks {2 * host - 2}-{2 * host - 1}: Exited with exit code {code}"
                      for host in (3, 4, 2, 1))
    return first, "srun: launch/slurm: _step_signal: Terminating StepId=2.0", *others


# (name, evidence, kind, nodes to blame, words of the message)
ENDINGS = [
    ("over the limit", OVER_LIMIT, "memory", (), "node n3 (ranks 4, 5) ran out of memory: slurmstepd-n3: error: StepId=1.0"),
    ("over the limit, one rank per node", replace(OVER_LIMIT, places={r: p for r, p in PLACES.items() if p.local_rank == 0}),
     "memory", (), "rank 4 (dp 1, pp 0, tp 0) on n3 ran out of memory"),
    ("over it, by what ranks held", replace(OVER_LIMIT, resident={3: 9_000_000_000, 4: 600_000_000, 5: 3_210_000_000}), "memory",
     (), f"{RANK_5} ran out of memory: slurmstepd-n3: error: StepId=1.0 exceeded memory limit (376565760 > 314572800), being "
     "killed; it held the most memory of the 2 ranks there, 2.99 GiB"),
    ("over it, with accounting", replace(OVER_LIMIT, largest=5), "memory", (), f"{RANK_5} ran out of memory"),
    ("cgroup", srun("srun: error: n3: task 5: Out Of Memory",
                    "slurmstepd: error: Detected 1 oom_kill event in StepId=12.1. Some of the step tasks have been OOM Killed."),
     "memory", (), f"{RANK_5} ran out of memory"),
    ("cgroup, old words", srun("srun: error: n3: task 5: Killed",
                               "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=370626.0. Some of your processes "
                               "may have been killed by the cgroup out-of-memory handler."), "memory", (), RANK_5),
    ("kernel, by process", replace(kernel("n3", "[99.1] Out of memory: Killed process 4711 (python) total-vm:1kB"),
                                   pids={("n3", 4711): 5}), "memory", (), RANK_5),
    ("memory.events", replace(kernel("n3", "memory.events oom_kill 1"), srun=("srun: error: n3: task 5: Killed", *ENDS_OTHERS)),
     "memory", (), RANK_5),
    ("MemoryError", died(5, "error", "MemoryError: "), "memory", (), RANK_5),
    ("GPU memory", died(5, "error", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), "memory", (), RANK_5),
    ("a rank says so", died(5, "memory", "grew beyond what the node has"), "memory", (), RANK_5),
    ("numpy", died(5, "error", "_ArrayMemoryError: Unable to allocate 8.00 TiB for an array"), "memory", (), RANK_5),
    ("Xid 79", kernel("n3", XID_79), "hardware", ("n3",), "Xid 79 of GPU 0000:c6:00 (the GPU has fallen off the bus"),
    ("Xid before Python", replace(died(5, "error", "RuntimeError: CUDA error: unknown"), kernel={"n3": (XID_79,)}),
     "hardware", ("n3",), "n3"),
    ("memory before Xid", replace(kernel("n3", XID_79), logs=OVER_LIMIT.logs), "memory", (), "n3"),
    ("Xid 31 is the program's", replace(died(5, "error", "RuntimeError: CUDA error: an illegal memory access"),
                                        kernel={"n3": ("NVRM: Xid (PCI:0000:c6:00): 31, pid=1, MMU Fault",)}),
     "error", (), RANK_5),
    ("ECC", died(5, "error", "RuntimeError: CUDA error: uncorrectable ECC error encountered"), "hardware", ("n3",), RANK_5),
    ("NVSwitch", kernel("n2", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Fatal, Link 32"), "hardware", ("n2",), "n2"),
    ("Xid 154", kernel("n2", "NVRM: Xid (PCI:0000:c6:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset "
                             "Required)"), "hardware", ("n2",), "n2"),
    ("node killed", NODE_KILLED, "node", ("n3",), "node n3 (ranks 4, 5) failed according to Slurm: srun: error: Node failure"),
    ("node failure, newer words", srun("srun: error: Node failure on n4"), "node", ("n4",), "n4"),
    ("only its state", replace(JOB, states={"n1": "allocated", "n2": "mixed*"}, failures=(PEER,)), "node", ("n2",), "mixed*"),
    ("launch failed", replace(JOB, srun=("srun: error: Task launch for StepId=3.1 failed on node n2: Communication connection "
                                         "failure",)), "node", ("n2",), "n2"),
    ("one node unfit", replace(JOB, code=2, srun=("hpc-mp: n3: the run directory /scratch/r cannot be seen",)),
     "unfit", ("n3",), "node n3 (ranks 4, 5) is unfit for this run: the run directory"),
    ("all nodes unfit", replace(JOB, code=2, srun=tuple(f"hpc-mp: {host}: /tmp/x is a symbolic link" for host in HOSTS)),
     "user", (), "n1: /tmp/x is a symbolic link"),
    ("wrong input", died(5, "user", "data.files: match nothing. Mend it."), "user", (), "data.files: match nothing. Mend it."),
    ("an exception", died(5, "error", "ValueError: boom"), "error", (), f"{RANK_5} failed: ValueError: boom"),
    ("disk full", log("n2", "3: OSError: [Errno 28] No space left on device: 'log'"), "space", (), "on n2"),
    ("SIGKILL by nobody", srun("srun: error: n3: task 5: Killed"), "signal", (), f"{RANK_5} was killed by SIGKILL"),
    ("SIGSEGV", srun("srun: error: n3: task 5: Segmentation fault (core dumped)"), "signal", (), "SIGSEGV"),
    ("SIGBUS", srun("srun: error: n3: task 5: Bus error"), "signal", (), "/dev/shm is full"),
    ("SIGABRT", srun("srun: error: n3: task 5: Aborted"), "signal", (), "SIGABRT"),
    ("SIGTERM by somebody", srun("srun: error: n3: task 5: Terminated"), "ended", (), "SIGTERM"),
    ("a limit on CPU time", srun("srun: error: n3: task 5: CPU time limit exceeded"), "exit", (), "SIGXCPU"),
    ("a limit on a file", srun("srun: error: n3: task 5: File size limit exceeded"), "exit", (), "SIGXFSZ"),
    ("exit without a word", replace(srun("srun: error: n3: task 5: Exited with exit code 1"),
                                    logs={"n3": ("5: ImportError: no module named foo", "4: hello", "5: ")}),
     "exit", (), f"{RANK_5} ended with exit code 1; its last words: ImportError: no module named foo"),
    ("exit without a word, on all nodes", replace(JOB, srun=everywhere(1)), "exit", (), "rank 4 (dp 1, pp 0, tp 0) on n3 ended"),
    ("no Python on one node", replace(srun("srun: error: n2: tasks 2-3: Exited with exit code 127"), logs={"n2": (NO_PYTHON,)}),
     "unfit", ("n2",), "node n2 (ranks 2, 3) is unfit for this run: rank 2 ended with exit code 127; its last words: env: "),
    ("no right to it on one node", srun("srun: error: n2: tasks 2-3: Exited with exit code 126"), "unfit", ("n2",), "code 126"),
    ("no Python on two nodes", srun("srun: error: n2: tasks 2-3: Exited with exit code 127", "srun: error: n3: tasks 4-5: Exited "
                                    "with exit code 127"), "unfit", ("n3", "n2"), "(ranks 4, 5) is unfit"),
    ("no Python anywhere", replace(JOB, srun=everywhere(127), logs={"n2": (NO_PYTHON,)}), "user", (), "slurm.python"),
    ("no package on one node", replace(srun("srun: error: n2: task 3: Exited with exit code 1"), logs={
        "n2": ("3: Traceback (most recent call last):", NO_PACKAGE), "n1": (NO_PACKAGE.replace("3:", "0:"),)}),
     "unfit", ("n2",), "rank 3 ended with exit code 1; its last words: ModuleNotFoundError: No module named 'torch'"),
    ("no package of ours on one node", replace(srun("srun: error: n2: task 3: Exited with exit code 1"),
                                               logs={"n2": ("3: /opt/py/bin/python3: No module named hpc_mp",)}),
     "unfit", ("n2",), "No module named hpc_mp"),
    ("no package anywhere", replace(JOB, srun=everywhere(1), logs={
        host: tuple(f"{task}: ModuleNotFoundError: No module named 'torch'" for task in (2 * i, 2 * i + 1))
        for i, host in enumerate(HOSTS)}), "user", (), "lacks what ranks need: rank 4 ended with exit code 1"),
    ("a package that is missed in vain", replace(died(3, "error", "ValueError: boom"), logs={"n2": (NO_PACKAGE,)}),
     "error", (), "ValueError: boom"),
    ("scancel", SCANCEL, "cancelled", (), "JOB 11"),
    ("time limit", replace(JOB, srun=("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T11:07:07 DUE TO TIME LIMIT "
                                      "***",)),
     "cancelled", (), "DUE TO TIME LIMIT"),
    ("lost", died(0, "lost", "no sign of life for 30 s", "n3"), "lost", ("n3",), "node n3 lost: rank 0 (dp 0, pp 0, tp 0) on n1"),
    ("a cut node accuses the others", replace(JOB, failures=(said(0, "n1", "lost", "30 s", 2.0, ("n3",)),
                                                             said(4, "n3", "lost", "30 s", 1.0, ("n1", "n2", "n4")),
                                                             said(2, "n2", "lost", "30 s", 3.0, ("n3",)))),
     "lost", ("n3",), "n3"),
    ("halves", replace(JOB, failures=tuple(said(2 * i, host, "lost", "30 s", 1.0, ("n3", "n4") if i < 2 else ("n1", "n2"))
                                           for i, host in enumerate(HOSTS))), "lost", ("n3", "n4"), "nodes n3, n4 lost"),
    ("hang", died(0, "hang", "no step within 1800 s"), "hang", (), "rank 0"),
    ("NCCL's network", log("n2", "3: n2:77:99 [1] NCCL WARN NET/IB : Got completion from peer 10.0.0.3<42> with status=12 "
                                 "opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3"), "network", (), "hca mlx5_3"),
    ("memlock", log("n2", "3: Call to ibv_reg_mr failed with error Cannot allocate memory"), "network", (), "ibv_reg_mr"),
    ("a node that was back at once", replace(JOB, failures=(PEER,), srun=tuple(line for line in ENDS_OTHERS if "n3" not in line)),
     "lost", ("n3",), "no report from n3"),
    ("only peers", replace(JOB, failures=(PEER,), srun=ENDS_OTHERS), "peer", (), "lost another rank"),
    ("watchdog", log("n2", WATCHDOG), "peer", (), "rank"),
    ("a rank without a word for which others waited", replace(JOB, srun=ENDS_OTHERS, failures=(
        said(0, "n1", "hang", "Hung: no step", 50.0, standing=stands(0, 1, 2)),
        said(1, "n1", "hang", "Hung: no step", 49.0, standing=stands(1, 0, 2)))),
     "silent", (), "rank 2 (dp 0, pp 1, tp 0) on n2 gave no sign of life: it was stopped, is gone, or is stuck in native code; "
     "ranks 0, 1 waited for it"),
    ("a rank that stood elsewhere", replace(JOB, srun=ENDS_OTHERS, failures=(
        said(0, "n1", "hang", "Hung: no step", 50.0, standing=stands(0, 5)),), standings=(stands(5, passed=6),)),
     "hang", (), f"{RANK_5} made no progress: it is in forward (stage.py:7) of step 4 and waits for no rank; rank 0 waited"),
    ("a traceback of nobody's", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), logs={"n3": BOOM}),
     "error", (), f"{RANK_5} failed: ValueError: boom (train.py:7)"),
    ("a traceback that speaks of a peer", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), logs={
        "n3": (*BOOM[:-2], "5: [rank5]: RuntimeError: Connection closed by peer [10.77.0.13]:4711")}), "peer", (),
     "lost another"),
    ("out of a GPU's memory", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), logs={
        "n3": (*BOOM[:-2], "5: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")}), "memory", (), RANK_5),
    ("one that ended alone", srun("srun: error: n3: task 5: Exited with exit code 1", DONE), "exit", (), "exit code 1"),
    ("one that ended alone, and its peers", replace(JOB, srun=(DONE, *ENDS_OTHERS), failures=(PEER,)), "early", (),
     "rank 3 (dp 0, pp 1, tp 1) on n2 ended before the others: with exit code 0"),
    ("one that ended alone, and silence", replace(JOB, srun=(DONE, *ENDS_OTHERS), hang=Hang(61.0, 0)), "early", (), "rank 3"),
    ("silence", replace(JOB, srun=ENDS_OTHERS, hang=Hang(61.0, 5, 5)), "hang", (),
     f"{RANK_5} made no progress: it was the first to fall silent, and no rank has printed a line for 61 s"),
    ("a plug-in for MPI without its library",
     replace(JOB, code=1, srun=("srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types",)), "user", (),
     "slurm.mpi = 'pmix': is listed by srun, but this Slurm cannot load it"),
    ("a slurmstepd that was killed", replace(JOB, failures=(PEER, said(4, "n3", "orphaned", "process 71 was killed", 51.0)),
                                             unended=("n3",), srun=("srun: error: n1: tasks 0-1: Exited with exit code 1",)),
     "orphaned", ("n3",), "rank 4 (dp 1, pp 0, tp 0) on n3 lost the slurmstepd that had started it: process 71"),
    ("a node that does not tell of its ends", replace(JOB, srun=ENDS_OTHERS, failures=(PEER,), unended=("n3",)), "lost", ("n3",),
     "node n3 lost: the job lost contact: it did not report the end of its tasks to srun"),
    ("silence, and what Slurm says of MPI", replace(JOB, program=True, srun=ENDS_OTHERS, hang=Hang(300.0, None), logs={
        "n2": ("2: slurmstepd-n2: error:  mpi/pmix_v4: pmixp_coll_belong_chk: n2 [1]: x.c:280: No process controlled by it",)}),
     "hang", (), "; Slurm reports 'mpi/pmix_v4: pmixp_coll_belong_chk: n2 [1]: x.c:280: No process controlled by it'"),
    ("silence of all at once", replace(JOB, srun=ENDS_OTHERS, hang=Hang(61.0, None)), "hang", (), "the job made no progress"),
    ("SIGSEGV, and srun was told of the end before (PMIx)", replace(srun(
        "srun: Force Terminated StepId=3.1", "srun: error: n4: task 7: Killed",
        "srun: error: n3: task 5: Segmentation fault"), program=True),
     "crash", (), "rank 5 on n3 was killed by SIGSEGV"),
    ("SIGSEGV of a program", replace(srun("srun: error: n3: task 5: Segmentation fault (core dumped)"), program=True),
     "crash", (), "rank 5 on n3 was killed by SIGSEGV"),
    ("SIGKILL of a program", replace(srun("srun: error: n3: task 5: Killed"), program=True), "signal", (), "SIGKILL"),
    ("old words of a program", replace(srun("srun: error: n3: task 5: Exited with exit code 3"), program=True, logs={
        "n3": ("5: CUDA out of memory, trying a smaller batch", *100 * ("5: step",))}), "exit", (), "its last words: step"),
    ("NCCL's watchdogs", replace(JOB, program=True, srun=("srun: error: n1: tasks 0-1: Aborted (core dumped)",), logs={
        host: [f"{task}: {line}" for task in tasks for line in watchdog_said(task)]
        for host, tasks in (("n1", (0, 1)), ("n2", (2, 3)), ("n3", (4,)), ("n4", (6, 7)))}), "hang", (),
     "rank 5 on n3 made no progress: ranks 0-4, 6, 7 waited for it 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ("a C++ exception of a program", replace(srun("srun: error: n3: task 5: Aborted"), program=True, logs={
        "n3": ("5: terminate called after throwing an instance of 'c10::Error'", "5:   what():  no such kernel", "5: ...")}),
     "crash", (), "was killed by SIGABRT (native code aborted): no such kernel"),
    ("what a program's rank misses", replace(srun("srun: error: n2: task 3: Exited with exit code 1"), program=True, logs={
        "n2": ("3: Traceback (most recent call last):", '3:   File "/home/ann/train.py", line 3, in <module>', NO_PACKAGE)}),
     "error", (), "rank 3 on n2 failed: ModuleNotFoundError: No module named 'torch' (train.py:3)"),
    ("harmless words of a program, and its exception", replace(
        srun("srun: error: n3: task 5: Exited with exit code 1"), program=True,
        logs={"n1": ("0: torch.OutOfMemoryError: caught", "1: No space left on device, going on"),
              "n3": (f"4: {XID_79}", "5: CUDA out of memory, a smaller batch", *BOOM)}), "error", (), "boom (train.py:7)"),
    ("memory that a program has got over, and its exception", replace(
        srun("srun: error: n1: task 1: Exited with exit code 1", "srun: error: n3: task 5: Exited with exit code 1"),
            program=True,
        logs={"n1": ("1: Traceback (most recent call last):", '1:   File "/x/t.py", line 1, in f', "1: MemoryError"),
            "n3": BOOM}),
     "error", (), "boom (train.py:7)"),
    ("an Xid in the words of the rank that fails of CUDA", replace(
        srun("srun: error: n3: task 5: Exited with exit code 1"), program=True,
        logs={"n3": (f"5: {XID_79}", *BOOM[:-2], "5: RuntimeError: CUDA error: unspecified launch failure")}),
     "hardware", ("n3",), "Xid 79 of GPU 0000:c6:00"),
    ("a GPU that is not there", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        "n3": (*BOOM[:-2], "5: RuntimeError: No CUDA GPUs are available")}), "hardware", ("n3",), "No CUDA GPUs are available"),
    ("no GPU on any host", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        **{host: (f"{2 * i}: RuntimeError: No CUDA GPUs are available",) for i, host in enumerate(HOSTS)},
        "n3": (*BOOM[:-2], "5: RuntimeError: No CUDA GPUs are available")}), "error", (), "No CUDA GPUs are available"),
    ("a program's stale file", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        "n3": (*BOOM[:-2], "5: OSError: [Errno 116] Stale file handle: 'data.bin'")}), "storage", (), "had a file system error"),
    ("echoes wrapped up, and one that lives on with its exception", replace(
        srun("srun: error: n1: task 0: Exited with exit code 1"), program=True,
        logs={"n1": ("0: ERROR:root:step failed: Connection closed by peer", "1: step 3"), "n3": BOOM[1:6]}),
     "error", (), "rank 5 on n3 failed: ValueError: boom (train.py:7); it was still running"),
    ("one for which all others have waited", replace(JOB, program=True, srun=("srun: error: n1: task 0: Exited with exit code 1",
        ),
     logs={host: [f"{task}: {line}" for task in tasks for line in (
         "Traceback (most recent call last):", '  File "/x/t.py", line 1, in f',
             "RuntimeError: Timed out waiting 6000ms for recv")]
         for host, tasks in (("n1", (0, 1)), ("n2", (2, 3)), ("n3", (4,)), ("n4", (6, 7)))}), "hang", (),
     "rank 5 on n3 made no progress: ranks 0-4, 6, 7 gave up waiting for it: RuntimeError: Timed out waiting 6000ms"),
    ("nothing", JOB, "unknown", (), "the job ended with exit code 143, and no message gives a reason"),
]
# Recorded with PMIx of Slurm 22.05 and mpi4py: rank 2 of four on two nodes ended alone, and PMIx had the others killed.
MPI = replace(JOB, program=True, by_mpi=True, srun=(
    "srun: Complete StepId=2.0+0 received", "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
    "srun: error: n2: task 3: Exited with exit code 1", "srun: error: n2: task 2: Killed", "srun: error: n1: tasks 0-1: Killed"),
    logs={"n1": ("0: slurmstepd-n1: error: *** STEP 2.1 ON n1 CANCELLED AT 2026-11-26T12:06:20 ***",)})
OF_TASK_3 = tuple(line.replace("5:", "3:", 1) for line in BOOM[1:-1])
# Recorded with PMI2 of Slurm 22.05 and MPICH 5.0: srun tells of kills alone. The other wordings stand for those of Cray MPICH
# (its own beginning of the line), of MPICH 3 and 4.
PMI2 = replace(MPI, srun=(*MPI.srun[:2], "srun: error: n2: tasks 2-3: Killed", "srun: error: n1: tasks 0-1: Killed"))
ABORT = "Abort({0}) on node {1} (rank {1} in comm 0): "
CALLS = "application called MPI_Abort(MPI_COMM_WORLD, {0}) - process {1}"
BY_PMI2 = [  # (what has happened, log by host, kind, words of the verdict)
    ("an exception", {"n2": (*OF_TASK_3, "3: " + ABORT.format(1, 3) + CALLS.format(1, 3))}, "error",
     "rank 3 on n2 failed: ValueError: boom (train.py:7)"),
    ("MPI_Abort", {"n2": ("3: " + ABORT.format(7, 3) + CALLS.format(7, 3),)}, "exit",
     "rank 3 on n2 ended with exit code 7; its last words: Abort(7)"),
    ("MPI_Abort of an old MPICH", {"n2": ("2: " + CALLS.format(3, 2),)}, "exit", "rank 2 on n2 ended with exit code 3"),
    ("a negative code", {"n1": ("1: " + ABORT.format(-1, 1) + CALLS.format(-1, 1),)}, "exit",
     "rank 1 on n1 ended with exit code 255"),
    ("an error of MPI as it begins", {"n2": ("3: Abort(270133775): Fatal error in internal_Init_thread: Other",)}, "exit",
     "rank 3 on n2 ended with exit code 15"),
    ("an error of MPI, and of one that has lost it", {
        "n1": ("0: " + ABORT.format(15, 0) + "Fatal error in internal_Barrier: Unknown error class",),
        "n2": ("2: " + ABORT.format(7, 2) + CALLS.format(7, 2),)}, "exit", "rank 2 on n2 ended with exit code 7"),
    ("an error of Cray's MPI", {"n2": (
        "2: MPICH ERROR [Rank 2] [job id 2.1] [now] [n2] - Abort(672797967) (rank 2 in comm 0): Fatal error in PMPI_Isend: Other",
        "2: MPIDI_UCX_send(95)...: returned failed request (Connection reset by peer)")}, "peer", "rank 2 on n2"),
    ("no word of a rank", {}, "signal", "the job lost one of its ranks, which was killed by SIGKILL"),
]
# Words of a kernel that several jobs share: newer ones write the first line of these before the last.
KILL = "[99.2] Out of memory: Killed process {0} (python) total-vm:1kB, UID:{1} pgtables:1kB"
IN_JOB = ("[99.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,oom_memcg=/slurm/uid_7/job_{1},"
          "task_memcg=/slurm/uid_7/job_{1}/step_0/task_0,task=python,pid={0},uid=7")
INVOKED = "[99.1] python invoked oom-killer: gfp_mask=0x1100cca"


def beside_boom(*kernel_words: str, end: str = "Exited with exit code 1", log_: tuple[str, ...] = BOOM) -> Evidence:
    """Rank 5 of a program of user 7, in job 42, fails on a node whose kernel has killed something."""
    return replace(srun(f"srun: error: n3: task 5: {end}"), program=True, logs={"n3": log_}, kernel={"n3": kernel_words},
                   job="42", user=7)


SHARED = [
    ("another user's process killed", beside_boom(INVOKED, KILL.format(11, 8)), "error", (), "boom (train.py:7)"),
    ("another job's", beside_boom(IN_JOB.format(11, 41), KILL.format(11, 7)), "error", (), "boom (train.py:7)"),
    ("somebody's, when no rank was killed", beside_boom(KILL.format(11, 7)), "error", (), "boom (train.py:7)"),
    ("an old kernel's words of somebody", beside_boom("[9.1] Out of memory: Kill process 11 (java) score 9"), "error", (),
     "boom"),
    ("another user's, and a rank that was killed", beside_boom(KILL.format(11, 8), end="Killed", log_=()), "signal", (),
     "rank 5 on n3 was killed by SIGKILL"),
    ("another job's, and a rank that was killed", beside_boom(IN_JOB.format(11, 4), KILL.format(11, 7), end="Killed", log_=()),
     "signal", (), "rank 5 on n3 was killed by SIGKILL"),
    ("a rank's", beside_boom(KILL.format(11, 7), end="Killed", log_=()), "memory", (), "rank 5 on n3 ran out of memory"),
    ("a loader's process of the job", beside_boom(IN_JOB.format(11, 42), KILL.format(11, 7)), "memory", (), "n3"),
    ("the cgroup's count of the job", beside_boom("memory.events oom_kill 1"), "memory", (), "n3"),
    ("of two the job's", beside_boom(INVOKED, IN_JOB.format(11, 41), KILL.format(11, 7), IN_JOB.format(12, 42)), "memory", (),
     "pid=12"),
    ("MPI, an exception", replace(MPI, logs={**MPI.logs, "n2": OF_TASK_3}), "error", (),
     "rank 3 on n2 failed: ValueError: boom (train.py:7)"),
    ("MPI, an exception, and one who noticed before", replace(MPI, srun=(
        *MPI.srun[:2], "srun: error: n1: task 0: Exited with exit code 14", *MPI.srun[2:4]), logs={"n2": OF_TASK_3}),
     "error", (), "rank 3 on n2 failed: ValueError: boom (train.py:7)"),
    ("MPI_Abort", replace(MPI, srun=(*MPI.srun[:2], "srun: error: n2: task 3: Exited with exit code 7", MPI.srun[4]), logs={
        "n2": ("3: application called MPI_Abort(MPI_COMM_WORLD, 7) - process 3",)}), "exit", (),
     "rank 3 on n2 ended with exit code 7; its last words: application called MPI_Abort"),
    *((f"PMI2 has all killed: {name}", replace(PMI2, logs={**MPI.logs, **logs}), kind, (), words)
      for name, logs, kind, words in BY_PMI2),
    ("MPI, a kill", replace(MPI, srun=(*MPI.srun[:2], *MPI.srun[3:])), "signal", (), "the job lost one of its ranks, which was "
     "killed by SIGKILL (the system ran out of memory, or another process killed it), and MPI ended the others"),
    ("MPI, a kill, and one whose server was gone", replace(MPI, srun=(
        *MPI.srun[:2], "srun: error: n1: task 0: Exited with exit code 14", "srun: error: n2: tasks 2-3: Killed")), "signal", (),
     "the job lost one of its ranks"),
    ("MPI, a step that somebody ended", replace(MPI, srun=(*MPI.srun[:2], "srun: error: n2: tasks 2-3: Terminated")), "cancelled",
     (), "its step was cancelled"),
    ("MPI, memory", replace(MPI, logs={"n2": (*OF_TASK_3[:-1], "3: MemoryError")}), "memory", (),
     "rank 3 on n2 ran out of memory"),
    ("mpirun's code, and the exception of a rank that it has ended", replace(
        JOB, program=True, by_mpirun=True, srun=("srun: error: n1: task 0: Exited with exit code 1",), logs={"n2": OF_TASK_3}),
     "error", (), "rank 3 on n2 failed: ValueError: boom (train.py:7)"),
    ("GPUs that no host can use", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        **{host: (f"{2 * i}: RuntimeError: Error 803: system has unsupported display driver",) for i, host in enumerate(HOSTS)},
        "n3": (*BOOM[:-2], "5: RuntimeError: Error 803: system has unsupported display driver / cuda driver combination")}),
     "error", (), "Error 803"),
    ("GPUs that no host's driver supports", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        **{host: (f"{2 * i}: RuntimeError: Error 804: forward compatibility was attempted",) for i, host in enumerate(HOSTS)},
        "n3": (*BOOM[:-2], "5: RuntimeError: CUDA: Error 804: forward compatibility was attempted on non supported HW")}),
     "error", (), "Error 804"),
    ("JAX's ranks that miss one", replace(JOB, program=True, srun=tuple(
        f"srun: error: n{host}: tasks {2 * host - 2}-{2 * host - 1}: Aborted" for host in (1, 2, 4)), logs={
        host: tuple(f"{task}: F0926 17:26:32.07 77 client.h:77] Terminating process because the coordinator detected missing "
                    "heartbeats. This most likely indicates that another task died" for task in (2 * i, 2 * i + 1))
        for i, host in enumerate(HOSTS) if host != "n3"}, hang=Hang(60.0, 5)), "hang", (), "rank 5"),
    ("GPUs that one host cannot use", replace(srun("srun: error: n3: task 5: Exited with exit code 1"), program=True, logs={
        "n3": (*BOOM[:-2], "5: RuntimeError: Error 802: system not yet initialized")}), "hardware", ("n3",), "Error 802"),
    ("a watchdog before the stacks of all threads", replace(JOB, program=True, srun=("srun: error: n1: task 0: Aborted",), logs={
        host: [f"{task}: {line}" for task in tasks for line in (*watchdog_said(task), *300 * ("frame #1: clone",))]
        for host, tasks in (("n1", (0, 1)), ("n2", (2, 3)), ("n3", (4,)), ("n4", (6, 7)))}), "hang", (),
     "rank 5 on n3 made no progress: ranks 0-4, 6, 7 waited for it"),
    ("who alone waits for NCCL's id", replace(JOB, program=True, srun=("srun: error: n1: task 1: Exited with exit code 1",),
     logs={"n1": (*(line.replace("5:", "1:", 1) for line in BOOM[1:5]), "1: torch.distributed.DistBackendError: [1] is setting "
                  "up NCCL communicator and retrieving ncclUniqueId from [0], but store->get('0') got error: Socket Timeout")}),
     "hang", (), "rank 0 on n1 made no progress: rank 1 gave up waiting for it"),
]
# The same, where a line of a log is all that there is: any finding goes before it.
LAST_RESORT = [
    ("a Python error of nobody's", replace(JOB, logs={"n2": ("2: warming up", "3: ImportError: cannot import name 'x' from 'y'",
                                                             "3: bye")}),
     "error", (), "rank 3 (dp 0, pp 1, tp 1) on n2 failed: ImportError: cannot import name 'x' from 'y'"),
    ("Python itself", replace(JOB, logs={"n9": ("0: Fatal Python error: init_fs_encoding: failed",)}),
     "error", (), "task 0 on n9 failed: Fatal Python error: init_fs_encoding"),
    ("a Python error of mpirun's", replace(JOB, srun=("numpy.linalg.LinAlgError: Singular matrix", "mpirun ended")),
     "error", (), "the job failed: numpy.linalg.LinAlgError: Singular matrix"),
    ("a step that somebody ended", replace(JOB, program=True, srun=ENDS_OTHERS, logs={
        "n3": ("4: slurmstepd-n3: error: *** STEP 54.1 ON n3 CANCELLED AT 2026-11-25T14:50:20 ***",)}), "cancelled", (),
     "the job was ended by Slurm: *** STEP 54.1 ON n3 CANCELLED AT 2026-11-25T14:50:20 ***: its step was cancelled"),
    ("no Python error", replace(JOB, logs={"n2": ("2: Error rates: none", "2: no ValueError: here")}), "unknown", (), "reason"),
]
RETRIED = {"hardware", "storage", "node", "unfit", "signal", "ended", "cancelled", "lost", "hang", "silent", "network", "peer",
           "orphaned"}


@pytest.mark.parametrize(("evidence", "kind", "nodes", "words"), [
    pytest.param(*rest, id=name) for name, *rest in (*ENDINGS, *SHARED, *LAST_RESORT)
])
def test_endings(evidence: Evidence, kind: str, nodes: tuple[str, ...], words: str) -> None:
    found = classify(evidence)
    assert (found.kind, found.nodes, found.retry) == (kind, nodes, kind in RETRIED)
    assert words in found.message
    assert "\n" not in found.message


def test_every_kind_has_an_ending() -> None:
    # said by the launcher, of emulated nodes, in the history alone, when a run has ended, by the job script, of saves
    elsewhere = {"launcher", "straggled", "vanished", "removed", "supervisor", "unwritable"}
    assert {kind for _, _, kind, _, _ in ENDINGS} | elsewhere == set(KINDS) == set(KINDS)


EXPLAINED = [evidence for _, evidence, kind, _, _ in ENDINGS if KINDS[kind].level < ECHO or kind in ("lost", "network")]


@given(st.sampled_from(EXPLAINED), st.sampled_from([0, 1, 6, 7]), st.floats(0, 100), st.booleans())
def test_an_echo_changes_nothing(evidence: Evidence, rank: int, time: float, logged: bool) -> None:
    """A peer that waited in vain, before or after, in a record or a log; not the very rank that ended without a word."""
    echo = said(rank, HOSTS[rank // 2], "peer", "DistBackendError: NCCL timeout: ncclRemoteError: remote process exited", time)
    more = replace(evidence, failures=(echo, *evidence.failures))
    if logged:
        more = replace(more, logs={"n9": (WATCHDOG,), **more.logs})
    assert classify(more) == classify(evidence)


APART = [end for end in ENDINGS if end[2] not in ("silent", "hang")]  # who waits for whom is said by all ranks of one attempt


@given(st.sampled_from(APART), st.sampled_from(APART))
def test_the_stronger_of_two_explains(one: tuple, other: tuple) -> None:
    """Records, kernel and states of two ends together; a word from a rank that ended without one is the exception."""
    first, second = (replace(end[1], srun=(), logs={}) for end in (one, other))
    both = replace(first, failures=first.failures + second.failures, kernel={**first.kernel, **second.kernel},
                   pids={**first.pids, **second.pids},
                   states={**first.states, **second.states}, hang=first.hang or second.hang,
                   unended=first.unended or second.unended)
    strongest = min((classify(first).kind, classify(second).kind), key=list(KINDS).index)
    if not (set(first.kernel) & set(second.kernel) or set(first.states) & set(second.states)):
        assert classify(both).kind == strongest


LINES = st.lists(st.one_of(st.text(max_size=60), st.sampled_from([*ENDS_OTHERS, XID_79, WATCHDOG, *OVER_LIMIT.srun])), max_size=8)


@given(LINES, st.dictionaries(st.sampled_from(HOSTS), LINES.map(tuple)), st.dictionaries(st.text(max_size=4), LINES.map(tuple)),
       st.integers(-64, 255))
def test_any_text(lines: list[str], logs: dict, kernel_: dict, code: int) -> None:
    found = classify(replace(JOB, code=code, srun=tuple(lines), logs=logs, kernel=kernel_))
    assert found.retry == KINDS[found.kind].retry


@given(st.lists(st.from_regex(r"srun: error: n[1-4]: tasks? [0-9,-]{1,12}: [A-Z][a-z ]{1,20}[0-9]{0,3}", fullmatch=True)))
def test_any_end_of_tasks(lines: list[str]) -> None:
    for end in task_ends(lines):
        assert end.line in lines


def test_the_first_code_is_the_cause() -> None:
    """srun's own code is 143 once it has ended the other tasks (recorded with a task that exits with 75)."""
    assert first_code(("srun: error: n3: task 5: Exited with exit code 75", *ENDS_OTHERS)) == 75
    assert first_code(ENDS_OTHERS) is None
    assert [end.tasks for end in task_ends(("srun: error: n2: tasks 0-1,3: Killed",))] == [(0, 1, 3)]


STEP = ("srun: launching StepId=2.1 on host n1, 2 tasks: [0-1]", "srun: launching StepId=2.1 on host n2, 2 tasks: [2-3]")
ENDED = "srun: Job step aborted: Waiting up to 4 seconds for job step to finish."
TOLD = tuple(f"srun: launch/slurm: _task_finish: {tasks}: Completed" for tasks in ("n2: tasks 2-3", "n1: tasks 0-1"))


@pytest.mark.parametrize(("lines", "without"), [
    ((*STEP, ENDED, "srun: error: Timed out waiting for job step to complete"), True),
    ((*STEP, TOLD[0], ENDED), True),
    ((*STEP, "hpc-mp: the ranks hang and are ended"), True),
    ((*STEP, *TOLD, "srun: launching StepId=2.2 on host n1, 1 tasks: [0]", ENDED), True),
    ((*STEP, *TOLD), False),
    ((*STEP, ENDED, *TOLD), False),
    ((*STEP, *TOLD, "hpc-mp: the ranks hang and are ended", ENDED), False),  # a process that a rank has left behind
    ((*STEP, TOLD[0], ENDED, "srun: error: n1: tasks 0-1: Killed"), False),
    ((*STEP, ENDED, "srun: launching StepId=2.2 on host n1, 1 tasks: [0]"), False),
    (STEP, False),  # as with an srun that is not verbose: its code is all that there is
    ((ENDED,), False),
])
def test_srun_gives_up_on_tasks(lines: tuple[str, ...], without: bool) -> None:
    """srun 22.05 then ended with 0 (recorded: ranks were killed whose children went on writing into their output)."""
    assert gave_up(lines) is without


def test_xid() -> None:
    assert xid(XID_79) == ("Xid 79 of GPU 0000:c6:00 (the GPU has fallen off the bus; it needs a reboot)")
    assert xid("NVRM: Xid (PCI:0000:c6:00): 13, Graphics Exception") is None
    assert xid("NVRM: Xid (0000:03:00): 48, DBE") is not None
    assert xid("NVRM: Xid (PCI:0000:c6:00): 999, ?") is None
    assert xid("NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2)") is None
    assert xid("NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Fatal XC0 i0 Link 13 (0x00000004)") is not None
    assert xid("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0xffff:1863)") == (
        "GPU 0000:01:00 (the driver could not initialise it (RmInitAdapter); it needs a reboot)")


def test_harmless_lines_say_nothing() -> None:
    lines = ("NCCL INFO cudaMemoryError handling enabled", "step 3 loss 2.0", "memory.events oom_kill 0", "out of memory? no")
    assert [sign(line) for line in lines] == [None] * len(lines)


def attempt(run: RunDirectory) -> AttemptContext:
    given, record = Allocation("7", 0, HOSTS, "lab", None), AttemptRecord("7.0.1", 1, HOSTS, "n1", 10000, "s")
    return AttemptContext(run, job(), place(Degrees(tensor=2, pipeline=2, data=2), "DPT", 2), given, record=record, host_order="")


def test_gather(tmp_path: Path) -> None:
    """From the files of a run and the answers of Slurm to rank, host and coordinates."""
    run = create_run(tmp_path, "job")
    logs = {"srun.log": OVER_LIMIT.srun[:-1], "node-n3.log": OVER_LIMIT.logs["n3"],
            "kernel-n3.log": ("memory.events oom_kill 0",)}
    for name, lines in logs.items():
        (run.log / name).write_text("".join(f"{line}\n" for line in lines))
    script = run.path / "slurm-7.log"
    script.write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***\n")  # of an earlier start
    since = ScriptLog(script, script.stat().st_size)
    with open(script, "a") as file:
        file.write("".join(f"{line}\n" for line in OVER_LIMIT.srun[-1:]))
    run.ranks.write_text(line_of(RankStart(1, 5, "n3", "n3", 0.0, pid=99)) + "\n")
    write_json(run.failure(1, 0), {"rank": 0, "node": "n1", "kind": "peer", "message": "gone", "time": 1.0})
    write_json(run.failure(2, 5), {"rank": 5, "node": "n3", "kind": "error", "message": "another attempt's", "time": 1.0})
    asked = []

    def slurm(argv: tuple[str, ...]) -> str:
        asked.append(argv[0])
        return {"sinfo": "n1|allocated|none\nn3|allocated|none\n", "sacct": "5\n"}[argv[0]]

    evidence = gather(attempt(run), 137, since, slurm)
    assert evidence.srun == OVER_LIMIT.srun
    assert evidence.pids == {("n3", 99): 5}
    assert [failure.rank for failure in evidence.failures] == [0]
    assert classify(evidence).rank == 5
    assert classify(evidence).log == str(run.node_log("n3"))
    assert asked == ["sinfo", "sacct"]


@pytest.mark.parametrize("last", [(), ("bye",)])
def test_a_rank_that_another_one_has_drowned(last: tuple[str, ...], tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    with open(run.node_log("n3"), "w") as log:
        log.write("".join(f"{line}\n" for line in BOOM))
        log.writelines(f"4: {'x' * 1000}\n" for _ in range(2000))
        log.writelines(f"5: {word}\n" for word in last)
    run.srun_log.write_text("".join(f"{line}\n" for line in ("srun: error: n3: task 5: Exited with exit code 1", *ENDS_OTHERS)))

    def silent(argv: tuple[str, ...]) -> str:
        raise CommandFailed("no Slurm here")

    spec = job(job={"nodes": 4, "ranks_per_node": 2, "device": "cpu"}, program={"command": ["x"]})
    found = classify(gather(replace(attempt(run), spec=spec), 1, None, silent))
    assert "ValueError: boom (train.py:7)" in found.message


def test_gather_finds_nothing(tmp_path: Path) -> None:
    def silent(argv: tuple[str, ...]) -> str:
        raise CommandFailed("no Slurm here")

    assert classify(gather(attempt(RunDirectory(tmp_path)), 1, None, silent)).kind == "unknown"


# srun's words of the tasks of two nodes of which rank 2 of mpirun has ended: the daemon's end is no rank's, nor is mpirun's.
MPIRUN = ("srun: launch/slurm: _task_finish: n2: task 1: Completed",
          "mpirun: there are not enough slots", "srun: error: n1: task 0: Exited with exit code 213",
          "srun: launch/slurm: _step_signal: Terminating StepId=9.0")


def test_under_mpirun_the_rank_that_has_said_so_is_the_cause_and_no_task_of_a_node() -> None:
    ended = replace(JOB, code=213, srun=MPIRUN, program=True, by_mpirun=True,
                    failures=(said(2, "n2", "exit", "ended with exit code 4", 40.0),))
    found = classify(ended)
    assert (found.kind, found.rank, found.node) == ("exit", 2, "n2")
    assert found.log == "/run/log/rank-00002.log"
    silent = replace(ended, failures=())
    cause = classify(silent)
    assert (cause.kind, cause.rank, cause.node) == ("launcher", None, "n1")
    assert cause.message.endswith("exit code 213 (mpirun's code); its last words: mpirun: there are not enough slots"), cause
    assert classify(replace(silent, by_mpirun=False)).rank == 0, "of srun's own ranks a task is one"


@pytest.mark.parametrize(("end", "words"), [
    ("crash", "was killed by SIGSEGV"), ("exit", "ended with exit code 3"), ("signal", "was killed by SIGKILL"),
    ("exit", "ended with exit code 1; its last words: boom")])
def test_a_rank_of_mpirun_that_notices_an_end_may_end_before_it(end: str, words: str) -> None:
    """Open MPI ends it with 14, some milliseconds before or after the rank that it has lost."""
    lost = [said(rank, node, "exit", f"ended with exit code 14{more}", 39.99) for rank, node, more in (
        (0, "n1", ""), (3, "n2", "; its last words: and MPI will try to terminate your MPI job as well)"))]
    ended = replace(JOB, code=213, srun=MPIRUN, program=True, by_mpirun=True, failures=(*lost, said(2, "n2", end, words, 40.0)))
    found = classify(ended)
    assert (found.kind, found.rank, found.node) == (end, 2, "n2"), found
    alone = classify(replace(ended, failures=(said(0, "n1", "exit", "ended with exit code 15", 39.0), *ended.failures)))
    assert alone.rank == 0, "any other code is an end of its own"
