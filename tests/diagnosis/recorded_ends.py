"""Ends of attempts: recorded and real-looking evidence, with the kind of failure, the nodes to blame, and words of the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from watchdog_words import said as watchdog_said

from hpc_mp.diagnosis.evidence import Evidence, Hang
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import RankFailure
from hpc_mp.rundir.standings import Standing, Wait

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


def five(end: str, *lines: str) -> Evidence:
    """Rank 5 ends so, with these lines in the log of its node."""
    return replace(srun(f"srun: error: n3: task 5: {end}"), logs={"n3": lines} if lines else {})


def of_program(end: str, *lines: str, **logs: tuple[str, ...]) -> Evidence:
    """The same of a program, with the logs of other nodes."""
    return replace(five(end), program=True, logs={**logs, **({"n3": lines} if lines else {})})


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
EXIT_1 = "Exited with exit code 1"
END_OF_3 = "srun: error: n2: task 3: Exited with exit code 1"
END_OF_0 = "srun: error: n1: task 0: Exited with exit code 1"
TRACEBACK = "Traceback (most recent call last):"
DONE = "srun: launch/slurm: _task_finish: n2: task 3: Completed"
BOOM = ("4: step 1", "5: Traceback (most recent call last):", '5:   File "/home/ann/train.py", line 7, in <module>',
        '5:   File "/opt/py/lib/python3.11/site-packages/x.py", line 99, in f', "5:     raise ValueError('boom')",
        "5: ValueError: boom", "4: step 2")


def raised(message: str) -> tuple[str, ...]:
    """The log of rank 5 with another exception."""
    return (*BOOM[:-2], f"5: {message}")


def nowhere(message: str, more: str = "", before: str = "") -> Evidence:
    """No host can use its GPUs: the first rank of each says so, and on n3 the failed one, in some words more."""
    return of_program(EXIT_1, *raised(f"RuntimeError: {before}{message}{more}"), **{
        host: (f"{2 * i}: RuntimeError: {message}",) for i, host in enumerate(HOSTS) if host != "n3"})


def of_all_but_5(lines: Callable[[int], Iterable[str]]) -> dict[str, list[str]]:
    """The logs of all nodes with the lines of every task except the fifth."""
    return {host: [f"{task}: {line}" for task in (2 * at, 2 * at + 1) if task != 5 for line in lines(task)]
            for at, host in enumerate(HOSTS)}


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
    ("a task that was not launched", replace(JOB, program=True, srun=(
        "srun: error: task 4 launch failed: Slurmd could not connect IO", *ENDS_OTHERS)), "node", ("n3",), "node n3"),
    ("slurmstepd's complaint about a cgroup", of_program("Exited with exit code 1", *BOOM, n1=(
        "0: slurmstepd: error: xcgroup_instantiate: unable to create cgroup '/sys/fs/cgroup/memory/slurm/uid_8' : Cannot "
        "allocate memory",)), "error", (), "ValueError: boom"),
    ("a slurmstepd that cannot go on", replace(JOB, program=True, srun=ENDS_OTHERS, logs={"n3": (
        "4: slurmstepd: error: common_file_write_uints: write value '39981' to '/sys/fs/cgroup/cpuset/slurm/cgroup.procs' "
        "failed: No space left on device",
        "4: slurmstepd: error: job_manager: exiting abnormally: Slurmd could not execve job")}),
     "unfit", ("n3",), "exiting abnormally"),
    ("mpirun's daemon", replace(JOB, program=True, by_mpirun=True, srun=(
        "ORTE has lost communication with a remote daemon.", "  HNP daemon   : [[11,0],0] on node n1",
        "  Remote daemon: [[11,0],2] on node n3", "srun: error: n1: task 0: Exited with exit code 1")), "lost", ("n3",),
     "node n3 lost"),
    ("a full disk, and what it damaged", replace(JOB, failures=(
        said(2, "n2", "storage", "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 704 vs 598", 40.0),
        said(5, "n3", "space", "OSError: [Errno 28] No space left on device", 41.0)), srun=ENDS_OTHERS), "space", (),
     "rank 5 (dp 1, pp 0, tp 1) on n3 ran out of disk space"),
    ("launch failed", replace(JOB, srun=("srun: error: Task launch for StepId=3.1 failed on node n2: Communication connection "
                                         "failure",)), "node", ("n2",), "n2"),
    ("one node unfit", replace(JOB, code=2, srun=("hpc-mp: n3: the run directory /scratch/r cannot be seen",)),
     "unfit", ("n3",), "node n3 (ranks 4, 5) is unfit for this run: the run directory"),
    ("all nodes unfit", replace(JOB, code=2, srun=tuple(f"hpc-mp: {host}: /tmp/x is a symbolic link" for host in HOSTS)),
     "user", (), "n1: /tmp/x is a symbolic link"),
    ("wrong input", died(5, "user", "data.files: match nothing. Mend it."), "user", (), "data.files: match nothing. Mend it."),
    ("an exception", died(5, "error", "ValueError: boom"), "error", (), f"{RANK_5} failed: ValueError: boom"),
    ("disk full", log("n2", "3: OSError: [Errno 28] No space left on device: 'log'"), "space", (), "on n2"),
    ("SIGKILL by nobody", five("Killed"), "signal", (), f"{RANK_5} was killed by SIGKILL"),
    ("SIGSEGV", five("Segmentation fault (core dumped)"), "signal", (), "SIGSEGV"),
    ("SIGBUS", five("Bus error"), "signal", (), "/dev/shm is full"),
    ("SIGABRT", five("Aborted"), "signal", (), "SIGABRT"),
    ("SIGTERM by somebody", five("Terminated"), "ended", (), "SIGTERM"),
    ("a limit on CPU time", five("CPU time limit exceeded"), "exit", (), "SIGXCPU"),
    ("a limit on a file", five("File size limit exceeded"), "exit", (), "SIGXFSZ"),
    ("exit without a word", five(EXIT_1, "5: ImportError: no module named foo", "4: hello", "5: "), "exit", (),
     f"{RANK_5} ended with exit code 1; its last words: ImportError: no module named foo"),
    ("exit without a word, on all nodes", replace(JOB, srun=everywhere(1)), "exit", (), "rank 4 (dp 1, pp 0, tp 0) on n3 ended"),
    ("no Python on one node", replace(srun("srun: error: n2: tasks 2-3: Exited with exit code 127"), logs={"n2": (NO_PYTHON,)}),
     "unfit", ("n2",), "node n2 (ranks 2, 3) is unfit for this run: rank 2 ended with exit code 127; its last words: env: "),
    ("no right to it on one node", srun("srun: error: n2: tasks 2-3: Exited with exit code 126"), "unfit", ("n2",), "code 126"),
    ("no Python on two nodes", srun("srun: error: n2: tasks 2-3: Exited with exit code 127", "srun: error: n3: tasks 4-5: Exited "
                                    "with exit code 127"), "unfit", ("n3", "n2"), "(ranks 4, 5) is unfit"),
    ("no Python anywhere", replace(JOB, srun=everywhere(127), logs={"n2": (NO_PYTHON,)}), "user", (), "slurm.python"),
    ("no package on one node", replace(srun(END_OF_3), logs={
        "n2": (f"3: {TRACEBACK}", NO_PACKAGE), "n1": (NO_PACKAGE.replace("3:", "0:"),)}),
     "unfit", ("n2",), "rank 3 ended with exit code 1; its last words: ModuleNotFoundError: No module named 'torch'"),
    ("no package of ours on one node", replace(srun(END_OF_3), logs={
        "n2": ("3: /opt/py/bin/python3: No module named hpc_mp",)}), "unfit", ("n2",), "No module named hpc_mp"),
    ("no package anywhere", replace(JOB, srun=everywhere(1), logs={
        host: tuple(f"{task}: ModuleNotFoundError: No module named 'torch'" for task in (2 * i, 2 * i + 1))
        for i, host in enumerate(HOSTS)}), "user", (), "lacks what ranks need: rank 4 ended with exit code 1"),
    ("a package that is missed in vain", replace(died(3, "error", "ValueError: boom"), logs={"n2": (NO_PACKAGE,)}),
     "error", (), "ValueError: boom"),
    ("scancel", SCANCEL, "cancelled", (), "JOB 11"),
    ("time limit", replace(JOB, srun=("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T11:07:07 DUE TO TIME LIMIT "
                                      "***",)), "cancelled", (), "DUE TO TIME LIMIT"),
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
    ("a traceback of nobody's", five(EXIT_1, *BOOM), "error", (), f"{RANK_5} failed: ValueError: boom (train.py:7)"),
    ("a traceback that speaks of a peer", five(EXIT_1, *raised(
        "[rank5]: RuntimeError: Connection closed by peer [10.77.0.13]:4711")), "peer", (), "lost another"),
    ("out of a GPU's memory", five(EXIT_1, *raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")),
     "memory", (), RANK_5),
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
        "srun: error: n3: task 5: Segmentation fault"), program=True), "crash", (), "rank 5 on n3 was killed by SIGSEGV"),
    ("SIGKILL, and MPICH's rank 0 crashed when it lost the connection (PMI2)", replace(srun(
        "hpc-mp: a rank has failed, and the others are ended", "srun: error: n3: task 5: Killed",
        "srun: error: n1: task 0: Segmentation fault"), program=True), "signal", (),
     "rank 5 on n3 was killed by SIGKILL"),
    ("SIGSEGV of a program", of_program("Segmentation fault (core dumped)"), "crash", (), "rank 5 on n3 was killed by SIGSEGV"),
    ("SIGKILL of a program", of_program("Killed"), "signal", (), "SIGKILL"),
    ("old words of a program", of_program(
        "Exited with exit code 3", "5: CUDA out of memory, trying a smaller batch", *100 * ("5: step",)), "exit", (),
     "its last words: step"),
    ("NCCL's watchdogs", replace(JOB, program=True, logs=of_all_but_5(watchdog_said), srun=(
        "srun: error: n1: tasks 0-1: Aborted (core dumped)",)), "hang", (),
     "rank 5 on n3 made no progress: ranks 0-4, 6, 7 waited for it 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ("a C++ exception of a program", of_program("Aborted", "5: terminate called after throwing an instance of 'c10::Error'",
                                                 "5:   what():  no such kernel", "5: ..."),
     "crash", (), "was killed by SIGABRT (native code aborted): no such kernel"),
    ("what a program's rank misses", replace(srun(END_OF_3), program=True, logs={
        "n2": ("3: Traceback (most recent call last):", '3:   File "/home/ann/train.py", line 3, in <module>', NO_PACKAGE)}),
     "error", (), "rank 3 on n2 failed: ModuleNotFoundError: No module named 'torch' (train.py:3)"),
    ("harmless words of a program, and its exception", of_program(
        EXIT_1, f"4: {XID_79}", "5: CUDA out of memory, a smaller batch", *BOOM,
        n1=("0: torch.OutOfMemoryError: caught", "1: No space left on device, going on")), "error", (), "boom (train.py:7)"),
    ("memory that a program has got over, and its exception", replace(of_program(EXIT_1, *BOOM, n1=(
        f"1: {TRACEBACK}", '1:   File "/x/t.py", line 1, in f', "1: MemoryError")), srun=(
            *five(EXIT_1).srun[:1], "srun: error: n1: task 1: Exited with exit code 1", *ENDS_OTHERS)),
     "error", (), "boom (train.py:7)"),
    ("an Xid in the words of the rank that fails of CUDA", of_program(
        EXIT_1, f"5: {XID_79}", *raised("RuntimeError: CUDA error: unspecified launch failure")),
     "hardware", ("n3",), "Xid 79 of GPU 0000:c6:00"),
    ("a GPU that is not there", of_program(EXIT_1, *raised("RuntimeError: No CUDA GPUs are available")),
     "hardware", ("n3",), "No CUDA GPUs are available"),
    ("no GPU on any host", nowhere("No CUDA GPUs are available"), "error", (), "No CUDA GPUs are available"),
    ("a program's stale file", of_program(EXIT_1, *raised("OSError: [Errno 116] Stale file handle: 'data.bin'")),
     "storage", (), "had a file system error"),
    ("echoes wrapped up, and one that lives on with its exception", replace(srun(END_OF_0), program=True,
        logs={"n1": ("0: ERROR:root:step failed: Connection closed by peer", "1: step 3"), "n3": BOOM[1:6]}),
     "error", (), "rank 5 on n3 failed: ValueError: boom (train.py:7); it was still running"),
    ("one for which all others have waited", replace(JOB, program=True, srun=(END_OF_0,), logs=of_all_but_5(
        lambda _: (TRACEBACK, '  File "/x/t.py", line 1, in f', "RuntimeError: Timed out waiting 6000ms for recv"))), "hang", (),
     "rank 5 on n3 made no progress: ranks 0-4, 6, 7 gave up waiting for it: RuntimeError: Timed out waiting 6000ms"),
    ("nothing", JOB, "unknown", (), "the job ended with exit code 143, and no message gives a reason"),
]
