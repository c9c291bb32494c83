"""Ends of programs under MPI, on nodes that jobs share and without GPUs; and ends of which a line of a log is all there is."""

from __future__ import annotations

from dataclasses import replace

from recorded_ends import (
    BOOM,
    END_OF_0,
    END_OF_3,
    ENDS_OTHERS,
    EXIT_1,
    HOSTS,
    JOB,
    nowhere,
    of_all_but_5,
    of_program,
    raised,
    srun,
)
from watchdog_words import said as watchdog_said

from hpc_mp.diagnosis.evidence import Evidence, Hang

# Recorded with PMIx of Slurm 22.05 and mpi4py: rank 2 of four on two nodes ended alone, and PMIx had the others killed.
MPI = replace(JOB, program=True, by_mpi=True, srun=(
    "srun: Complete StepId=2.0+0 received", "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
    END_OF_3, "srun: error: n2: task 2: Killed", "srun: error: n1: tasks 0-1: Killed"),
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
        JOB, program=True, by_mpirun=True, srun=(END_OF_0,), logs={"n2": OF_TASK_3}),
     "error", (), "rank 3 on n2 failed: ValueError: boom (train.py:7)"),
    ("GPUs that no host can use", nowhere("Error 803: system has unsupported display driver", " / cuda driver combination"),
     "error", (), "Error 803"),
    ("GPUs that no host's driver supports", nowhere(
        "Error 804: forward compatibility was attempted", " on non supported HW", "CUDA: "), "error", (), "Error 804"),
    ("JAX's ranks that miss one", replace(JOB, program=True, srun=tuple(
        f"srun: error: n{host}: tasks {2 * host - 2}-{2 * host - 1}: Aborted" for host in (1, 2, 4)), logs={
        host: tuple(f"{task}: F0926 17:26:32.07 77 client.h:77] Terminating process because the coordinator detected missing "
                    "heartbeats. This most likely indicates that another task died" for task in (2 * i, 2 * i + 1))
        for i, host in enumerate(HOSTS) if host != "n3"}, hang=Hang(60.0, 5)), "hang", (), "rank 5"),
    ("GPUs that one host cannot use", of_program(EXIT_1, *raised("RuntimeError: Error 802: system not yet initialized")),
     "hardware", ("n3",), "Error 802"),
    ("a watchdog before the stacks of all threads", replace(JOB, program=True, srun=("srun: error: n1: task 0: Aborted",),
             logs=of_all_but_5(lambda task: (*watchdog_said(task), *300 * ("frame #1: clone",)))), "hang", (),
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
