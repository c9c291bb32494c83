"""What a rank's end was, by its code and its last words, as programs have them: what counts, and what only looks like it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.base.exit_codes import ending
from hpc_mp.diagnosis.ends import awaited_in_vain, given_up, words_of_end
from hpc_mp.rundir.attempt import last_words, tail

HEAD, AT = "Traceback (most recent call last):", '  File "/home/ann/train.py", line 7, in step'
BOOM = [HEAD, AT, "    raise ValueError('boom')", "ValueError: boom"]
GONE = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"
DIRECT = ["", "The above exception was the direct cause of the following exception:", ""]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]
GLIBC = "free(): double free detected in tcache 2"
JAX = ["E0926 17:26:32.075402  157988 coordination_service_agent.cc:332] Polled an error from coordination service",
       "F0926 17:26:32.075587  157988 client.h:77] Terminating process because the JAX distributed service detected fatal "
       "errors. This most likely indicates that another task died; see other logs. UNAVAILABLE: (stopped sending heartbeats):",
       "/job:jax_worker/replica:0/task:3", "The tasks have crashed. Check the task logs for an earlier error.", "",
       "RPC: /tensorflow.CoordinationService/PollForError [type.googleapis.com/tensorflow.CoordinationServiceError='']"]
MISSING = ["2026-11-26 10:00:00.100: F external/xla/pjrt/distributed/client.h:75] Terminating process because the coordinator "
           "detected missing heartbeats. This most likely indicates that another task died. Status: INTERNAL:",
           ':{"created":"@1","description":"Error received from peer ipv4:10.0.0.1:1","grpc_status":13}']
STUCK = ["[rank0]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 0] Heartbeat monitor timed out! Process will be terminated",
         "[rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 seconds"]
DUMPED = ("[rank1]:[F1224 16:32:36.69 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] Terminating the process after attempting to "
          "dump debug info, due to collective timeout or exception.")
WATCHDOG = ("[rank1]:[E1224 ProcessGroupNCCL.cpp:1896] [Rank 1] Process group watchdog thread terminated with exception: CUDA "
            "error: ")
BARRIER = ["ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed: 300.1 seconds", HEAD,
           '  File "/opt/lib/python3.11/site-packages/torch/distributed/elastic/utils/store.py", line 78, in barrier',
           "torch.distributed.DistStoreError: Socket Timeout"]
DUMP = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):",
        '  File "/home/ann/train.py", line 9 in kernel', '  File "/home/ann/train.py", line 7 in <module>', "",
        "Extension modules: numpy.core._multiarray_umath (total: 1)"]
NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.hpp:317, unhandled cuda error, NCCL version 2.27.5"
TABLE = [HEAD, '  File "/opt/lib/python3.11/site-packages/torch/distributed/run.py", line 896, in run',
         "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "train.py FAILED", "-" * 60,
         "Root Cause (first observed failure):", "[0]:", "  time      : 2026-11-25_14:00:00", "  host      : n2",
         "  rank      : 3 (local_rank: 1)", "  exitcode  : {code} (pid: 4711)", "  error_file: <N/A>", "  traceback : see",
             "=" * 60]
RICH = ["╭──────────── Traceback (most recent call last) ────────────╮", "│ /home/ann/train.py:7 in main                │",
        "│ ❱ 7     raise ValueError('boom')                │", "╰─────────────────────────╯", "ValueError: boom"]
GROUP = ["  + Exception Group Traceback (most recent call last):", '  |   File "/home/ann/train.py", line 7, in <module>',
         "  |     raise ExceptionGroup('several', [ValueError('a'), MemoryError('b')])",
         "  | ExceptionGroup: several (2 sub-exceptions)", "  +-+---------------- 1 ----------------",
         "    | ValueError: a", "    +---------------- 2 ----------------", "    | TypeError: b",
         "    +------------------------------------"]
LOADER = [HEAD, AT, "ValueError: Caught ValueError in DataLoader worker process 0.",
          "Original Traceback (most recent call last):", '  File "/home/ann/data.py", line 3, in __getitem__',
          "ValueError: corrupt record 5", ""]
# (lines, code, kind, text)
UCX_RETRY = "[n1:12345:0:12345] ib_mlx5_log.c:143  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)"
UCX_TRACE = ["==== backtrace ====", "    0  /lib/libucs.so.0(ucs_handle_error+0x254)", "    1  /lib/libc.so.6(abort+0xcf)", "==="]
ORTE = "[n1:00163] [[1,0],163] ORTE_ERROR_LOG: Error in file pml_ucx.c at line 1"
ENDS = {
    "of torn down things behind it": ([*BOOM, "Exception ignored in: <function A.__del__ at 0x7f>", HEAD, AT,
                                       "AttributeError: 'NoneType' object has no attribute 'x'"], 1, "error",
                                      "ValueError: boom (train.py:7)"),
    "of a loader's process behind it": ([*BOOM, "Process SpawnProcess-1:", HEAD, AT, "BrokenPipeError: [Errno 32] Broken pipe"],
        1, "error", "ValueError: boom (train.py:7)"),
    "of a thread alone": (["Exception in thread Thread-1 (work):", *BOOM, "bye"], 1, "error", "ValueError: boom (train.py:7)"),
    "in a loader's process": (LOADER, 1, "error", "ValueError: corrupt record 5 (data.py:3)"),
    "caught long before": ([*BOOM, *(f"step {n}" for n in range(60)), "no such checkpoint: step-9"], 2, "exit",
                           "ended with exit code 2; its last words: no such checkpoint: step-9"),
    "with a summary behind it": ([*BOOM, *(f"wandb: loss {n}" for n in range(60))], 1, "error", "ValueError: boom (train.py:7)"),
    "wrapped up, of a lost peer": ([HEAD, AT, GONE, *DIRECT, *BOOM], 1, "peer", f"ValueError: boom, from {GONE} (train.py:7)"),
    "wrapped up twice": ([HEAD, AT, GONE, *DIRECT, HEAD, AT, "KeyError: 'x'", *DURING, *BOOM], 1, "peer",
                         f"ValueError: boom, from {GONE} (train.py:7)"),
    "wrapped up, of memory": ([HEAD, AT, "torch.OutOfMemoryError: CUDA out of memory. Tried", *DURING, *BOOM], 1, "memory",
                              "CUDA out of memory"),
    "wrapped up, of nothing known": ([HEAD, AT, "KeyError: 'lr'", *DIRECT, *BOOM], 1, "error", "ValueError: boom (train.py:7)"),
    "two that have nothing to do with each other": ([HEAD, AT, GONE, "tries again", *BOOM], 1, "error",
        "ValueError: boom (train"),
    "an exception group": (GROUP, 1, "error",
        "ExceptionGroup: several (2 sub-exceptions): ValueError: a; TypeError: b (train.py:7)"),
    "rich's": (RICH, 1, "error", "ValueError: boom (train.py:7)"),
    "a SyntaxError": (['  File "/home/ann/train.py", line 3', "    x = = 1", "        ^", "SyntaxError: invalid syntax"], 1,
        "error", "SyntaxError: invalid syntax (train.py:3)"),
    "without its beginning": ([*3000 * [AT, "    f(n + 1)"], "RecursionError: maximum recursion depth exceeded"], 1, "error",
                              "RecursionError: maximum recursion depth exceeded (train.py:7)"),
    "that begins with an empty line": ([*BOOM[:3], "RuntimeError: ", "Expected all tensors on one device"], 1, "error",
                                       "RuntimeError: Expected all tensors on one device (train.py:7)"),
    "of a class of other letters": ([*BOOM[:3], "main.<locals>.FehlerGröße: boom"], 1, "error", "FehlerGröße: boom (train.py:7)"),
    "with a line of others between": ([*BOOM[:2], "[W1125 socket.cpp:752] warning", *BOOM[2:]], 1, "error",
        "ValueError: boom (tr"),
    "NCCL's, of memory": ([*BOOM[:3], NCCL, "ncclUnhandledCudaError: Call to CUDA function failed.", "Last error:",
                           "Cuda failure 2 'out of memory'"], 1, "memory", "2.27.5: Cuda failure 2 'out of memory' (train.py:7)"),
    "NCCL's, of memory, in its own words": ([*BOOM[:3], NCCL, "ncclUnhandledCudaError: Call to CUDA function failed.",
                                             "Last error:", "Failed to CUDA calloc async 608 bytes"], 1, "memory", "CUDA calloc"),
    "NCCL's, of NVSwitch": ([*BOOM[:3], NCCL, "ncclUnhandledCudaError: Call to CUDA function failed.", "Last error:",
                             "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401"],
                            1, "hardware", "NVLS"),
    "of others' words behind it": ([*BOOM, GONE, "CUDA out of memory"], 1, "error", "ValueError: boom (train.py:7)"),
    "a loader that was killed": ([*BOOM[:3], "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. "], 1,
        "signal", "failed: RuntimeError: DataLoader worker (pid 9) is killed"),
    "a small /dev/shm": ([*BOOM[:3],
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that "
                          "dataloader's workers are out of shared memory."], 1, "space", "out of shared memory"),
    "a stale file": ([*BOOM[:3], "OSError: [Errno 116] Stale file handle: 'x'"], 1, "storage", "OSError: [Errno 116] Stale"),
    "a port that is taken": ([*BOOM[:3], "torch.distributed.DistNetworkError: port: 29500, name: EADDRINUSE"], 1, "network",
        "EADDR"),
    "a service that is not there": ([*BOOM[:3], "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>"], 1,
                                    "network", "Connection refused"),
    "a crash of what is torn down": ([*BOOM, "terminate called without an active exception"], -6, "error",
        "ValueError: boom (train"),
    "a crash after a caught one": ([*BOOM, *(f"step {n}" for n in range(9))], -11, "crash",
        f"{ending(-11)}; its last words: step 8"),
    "a crash, with Python's stack": (["step 7", *DUMP], -11, "crash",
                                     f"{ending(-11)}; it was in train.py:9 in kernel; its last words: step 7"),
    "glibc's": ([GLIBC, *(DUMP[0].replace("Segmentation fault", "Aborted"), *DUMP[1:])], -6, "crash", f"last words: {GLIBC}"),
    "an echo that was logged": ([f"ERROR:root:step failed: {GONE}", "bye"], 1, "peer", "exit code 1; its last words: ERROR:root"),
    "an echo, and a crash": ([f"ERROR:root:step failed: {GONE}", "terminate called without an active exception"], -6, "peer",
        "step"),
    "JAX, another's end": (JAX, -6, "peer", "aborted): F0926 17:26:32.075587  157988 client.h:77] Terminating process"),
    "JAX, another's end, quietly": (JAX, 1, "peer", "ended with exit code 1: F0926"),
    "JAX, missing heartbeats": (MISSING, -6, "peer", "missing heartbeats"),
    "JAX, missing heartbeats, quietly": (MISSING, 1, "peer", "missing heartbeats"),
    "JAX, its own exception": ([*BOOM, *JAX, "*** Check failure stack trace: ***", "    @     0x7f57 absl::Die()"], -6, "error",
                               "ValueError: boom (train.py:7)"),
    "NCCL's watchdog is stuck": (STUCK, -6, "peer", "watchdog got stuck"),
    "NCCL's monitor, of another rank": (["[rank3]:[F1 ProcessGroupNCCL.cpp:1224] [PG 0 Rank 3] ProcessGroupNCCL's watchdog "
                                         "detected a collective timeout from another rank 1 and notified the current rank."],
                                        -6, "peer", "from another rank 1"),
    "NCCL's monitor, after a dump": ([DUMPED], -6, "peer", "due to collective timeout"),
    "NCCL's monitor, of a broken GPU": ([f"{WATCHDOG}uncorrectable ECC error encountered", DUMPED], -6, "hardware", "able ECC"),
    "NCCL's monitor, of an access": ([f"{WATCHDOG}an illegal memory access was encountered", DUMPED], -6, "crash", "illegal mem"),
    "TensorFlow's check": (["2026-11-26 10:00:00.1: F tensorflow/core/x.cc:51] Check failed: NDIMS == dims() (2 vs. 1)"], -6,
                           "crash", "Check failed: NDIMS"),
    "a name, of lack of memory": ([HEAD, AT, "torch.OutOfMemoryError: CUDA out of memory. Tried", *DURING, HEAD, AT,
                                   "AttributeError: module 'torch' has no attribute 'OutOfMemoryError'"], 1, "memory", "CUDA o"),
    "a shell whose child crashed": (["begins"], 139, "crash", "exit code 139: its child process was killed by SIGSEGV"),
    "a shell whose child was killed": (["run.sh: line 1: 21435 Killed  python train.py"], 137, "signal", "killed by SIGKILL"),
    "a shell whose python failed": ([*BOOM, "cleaning up"], 3, "error", "ValueError: boom (train.py:7)"),
    "words of an error, then chatter": (["cannot find dataset /data/x", "", "----", "bye"], 1, "exit",
        "words: cannot find dataset"),
    "old words of memory": (["CUDA out of memory, a smaller batch", "step 1", "no such option"], 4, "exit", "no such option"),
    "words of memory last": (["step 1", "cudaMalloc failed: not enough memory"], 4, "memory",
        "exit code 4; its last words: cudaM"),
    "words between what looks like a traceback": (["ValueError: 3", '  File "x.py", line 3', "done: yes"], 9, "exit",
        "done: yes"),
    "SIGKILL": (["CUDA out of memory, a smaller batch"], -9, "signal", ending(-9)),
    "UCX, a link": ([UCX_RETRY, *UCX_TRACE], -6, "network", "Transport retry count exceeded on mlx5_0:1/IB"),
    "UCX, a link, newer": (["[161.1] [n1:12345:0] ib_mlx5_log.c:177  UCX  ERROR RNR retry count exceeded on mlx5_2:1/RoCE (synd "
                            "0x16 vend 0x97 hw_synd 0/0)", *UCX_TRACE], -6, "network", "RNR retry count exceeded on mlx5_2"),
    "UCX, a QP": (["[n1:7:0:7] ib_mlx5_log.c:143  Local QP operation error on mlx5_0:1/IB (synd 0x2)"], 1, "network", "Local QP"),
    "UCX, an endpoint": (["ucp_ep_create(proc=163) failed: Input/output error", ORTE], 1, "network", "ucp_ep_create(proc=163)"),
    "MPICH over UCX": (["Abort(1090831) on node 3: Fatal error in PMPI_Init: Other MPI error",
                        "init_worker(99): ucx function returned with failed status(ucx_init.c init_worker Input/output error)"],
                       15, "network", "ucx function returned"),
    "MPICH over OFI": (["MPIDI_OFI_handle_cq_error(1062): OFI poll failed (ofi_events.c:1064:MPIDI_OFI_handle_cq_error:Input/"
                        "output error - PTLTE_NOT_FOUND)"], 15, "network", "OFI poll failed"),
    "ROCm's GPU": (["HW Exception by GPU node-1 (Agent handle: 0x5584) reason :GPU Hang"], -6, "hardware", "HW Exception by GPU"),
}


@pytest.mark.parametrize("name", ENDS)
def test_of_a_program(name: str) -> None:
    lines, code, kind, text = ENDS[name]
    found = words_of_end(lines, code, program=True)
    assert found.kind == kind and text in found.text, found


TEXTS = tomllib.loads((Path(__file__).parents[1] / "golden" / "diagnosis" / "exceptions.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts.splitlines()])
def test_what_an_exception_speaks_of(kind: str, text: str) -> None:
    found = words_of_end([*BOOM[:3], text], 1, program=True)
    assert found.kind == kind and text[:60] in found.text


CALLED = [HEAD, '  File "/opt/lib/python3.11/site-packages/accelerate/commands/launch.py", line 785, in simple_launcher',
          "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
          "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."]
KILLED = [*CALLED[:3], "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>."]
WRAPPER = [*DIRECT, HEAD, '  File "/home/ann/run.py", line 4, in <module>', "RuntimeError: training failed"]
PEER = [HEAD, AT, GONE]
BURST = [f"step {n}" for n in range(300)]
# What stands behind the words of the program, in those of its launcher: (lines, code, kind, text)
LAUNCHED = {
    "subprocess, accelerate": ([*BOOM, *CALLED], 1, "error", "ValueError: boom (train.py:7)"),
    "its own wrapper": ([*BOOM, *CALLED, *WRAPPER], 1, "error", "ValueError: boom (train.py:7)"),
    "a program that is not ours to see": (CALLED, 1, "error", "CalledProcessError: Command"),
    "a program without a traceback, in a wrapper": ([*CALLED, *WRAPPER], 1, "error", "RuntimeError: training failed"),
    "a killed child": (KILLED, 1, "signal", "lost a process that it had started, which was killed by SIGKILL"),
    "a killed child, after a caught exception": ([*BOOM, "tries again", *KILLED], 1, "signal", "was killed by SIGKILL"),
    "a burst": ([*BOOM, *BURST], 1, "error", "ValueError: boom (train.py:7)"),
    "a burst, subprocess": ([*BOOM, *BURST, *CALLED], 1, "error", "ValueError: boom (train.py:7)"),
    "a burst, torchrun": ([*BOOM, *BURST, *(line.format(code=1) for line in TABLE)], 1, "error", "ValueError: boom (train.py:7)"),
    "words of another error behind a burst": ([*BOOM, *BURST, "error: no such option"], 1, "exit", "no such option"),
    "rich's torchrun": ([*BOOM, RICH[0], "╰───╯", "ChildFailedError:", *TABLE[3:]], 1, "error", "ValueError: boom (train.py:7)"),
    "torchrun, a kill": ([line.format(code=-9) for line in TABLE], 1, "signal", "lost its rank 3, which was killed by SIGKILL"),
    "torchrun, a kill and its echo": ([*PEER, *(line.format(code=-9) for line in TABLE)], 1, "signal", "lost its rank 3, which"),
    "torchrun's log": (["E1126 api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 7302) of binary: /opt/bin/python"], 1,
                       "signal", "lost its local rank 1, which was killed by SIGKILL"),
    "torchrun's exit barrier": ([*BOOM, *BARRIER, *(line.format(code=1) for line in TABLE)], 1, "error", "ValueError"),
    "torchrun --tee": ([f"[default1]:[rank1]: {line}" for line in BOOM], 1, "error", "ValueError: boom (train.py:7)"),
    "DeepSpeed": ([*BOOM, "[2026-11-26] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 7301",
                   "[2026-11-26] [ERROR] [launch.py:325:sigkill_handler] ['x.py', '--local_rank=1'] exits with return code = 1"],
                  1, "error", "ValueError: boom (train.py:7)"),
    "DeepSpeed, a kill": (["[ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'x.py', '--local_rank=1'] exits with return "
                           "code = -9"], 247, "signal", "lost its local rank 1, which was killed by SIGKILL"),
    "colossalai": ([*BOOM, *(line.format(code=1) for line in TABLE), "Error: failed to run torchrun --nproc_per_node=2 train.py "
                    "on 127.0.0.1, is localhost: True, exception: Encountered a bad command exit code!"], 1, "error",
                   "ValueError: boom (train.py:7)"),
    "torch's spawn": ([HEAD, "torch.multiprocessing.spawn.ProcessRaisedException: ", "", "-- Process 1 terminated with the "
                       "following error:", *BOOM], 1, "error", "ValueError: boom (train.py:7)"),
    "torch's spawn, a kill": ([HEAD, AT, "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal "
                               "SIGKILL"], 1, "signal", "lost its local rank 1, which was killed by SIGKILL"),
    "mpirun": ([f"[1,2]<stderr>: {line}" for line in BOOM], 1, "error", "ValueError: boom (train.py:7)"),
    "mpirun, a crash": (["prterun noticed that process rank 1 with PID 0 on node n1 exited on signal 11 (Segmentation fault)."],
                        139, "crash", "lost its rank 1, which was killed by SIGSEGV"),
    "Hydra": (["=   RANK 2 PID 77 RUNNING AT n1", "=   KILLED BY SIGNAL: 9 (Killed)"], 9, "signal", "lost its rank 2, which was"),
    "srun in a script": ([*(f"1: {line}" for line in BOOM), "srun: error: n1: task 1: Exited with exit code 1"], 1, "error",
                         "ValueError: boom (train.py:7)"),
    "srun in a script, a kill": (["srun: error: n1: task 1: Killed"], 137, "signal", "lost its rank 1, which was killed by"),
    "conda run": ([*BOOM, "ERROR conda.cli.main_run:execute(125): `conda run python train.py` failed. (See above for error)"], 1,
                  "error", "ValueError: boom (train.py:7)"),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_of_a_program_behind_a_launcher(name: str) -> None:
    lines, code, kind, text = LAUNCHED[name]
    found = words_of_end(lines, code, program=True)
    assert found.kind == kind and text in found.text, found


@pytest.mark.parametrize(("code", "kind", "text"), [("-9", "signal", "lost its rank 3, which was killed by SIGKILL"),
                                                    ("-11", "crash", "lost its rank 3, which was killed by SIGSEGV"),
                                                    ("4", "exit", "lost its rank 3, which ended with exit code 4")])
def test_of_a_launcher_of_a_nodes_ranks(code: str, kind: str, text: str) -> None:
    found = words_of_end([line.format(code=code) for line in TABLE], 1, program=True, of_node=True)
    assert found.kind == kind and found.text.startswith(text) and found.inner == 3
    mine = words_of_end([*BOOM, *(line.format(code="1") for line in TABLE)], 1, program=True, of_node=True)
    assert (mine.kind, mine.text) == ("error", "ValueError: boom (train.py:7), reported by its rank 3")


def test_of_our_own_engine_a_crash_is_the_machines() -> None:
    assert words_of_end(["step 7"], -11).kind == "signal" and words_of_end([], 139).kind == "exit"


@pytest.mark.parametrize(("lines", "kind"), [
    (["step 1", *BOOM], "error"), (["Exception in thread Thread-1 (work):", *BOOM], "error"), ([*BOOM, "step 2", "step 3",
        "step 4", "step 5"], None),
    ([*BOOM[:3], GONE], None), ([HEAD, AT, GONE, *DIRECT, *BOOM], None), (["step 1"], None),
])
def test_what_a_rank_has_failed_of_that_lives_on(lines: list[str], kind: str | None) -> None:
    found = given_up(lines)
    assert (found and found.kind) == kind and (found is None or "it was still running when the others were ended" in found.text)


UNIQUE = ("torch.distributed.DistBackendError: [{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
          "c10d key-value store by key '0', but store->get('0') got error: Socket Timeout")
SILENT = "RuntimeError: another task died. UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"
WAITED = "RuntimeError: Timed out waiting 6000ms for recv operation to complete"


@pytest.mark.parametrize(("complaints", "rank"), [
    ({0: WAITED, 1: WAITED, 3: WAITED}, 2), ({0: GONE, 1: WAITED, 3: GONE}, 2), ({0: GONE, 1: GONE, 3: GONE}, None),
    ({0: "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 5000 ms", 1: GONE, 3: GONE}, 2),
    ({0: SILENT, 1: SILENT, 3: SILENT}, 2), ({0: SILENT, 1: SILENT}, None),
    ({0: WAITED, 1: WAITED}, None), ({1: UNIQUE.format(1), 3: UNIQUE.format(3)}, 0), ({1: UNIQUE.format(0)}, None),
    ({0: "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 5000 ms, a timeout"}, 2),
    (dict.fromkeys(range(4), WAITED), None), ({}, None),
])
def test_for_whom_all_others_have_waited(complaints: dict[int, str], rank: int | None) -> None:
    found = awaited_in_vain(complaints, range(4))
    assert (found and found[0]) == rank
    if found is not None:
        assert re.search(r"gave up waiting for it: (torch\.\S+|Runtime)Error: ", found[1]) and found[1].startswith("rank")


@pytest.mark.parametrize(("lines", "words"), [
    (["step 3", "error: no space", "step 4"], "error: no space"), (["WARNING: cannot find apex", "step 4"], "step 4"),
    (["error: old", *map(str, range(20))], "19"), (["a", "=====", ""], "a"), ([], ""),
    (["boom", "[rank2]:[W1125 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called"], "boom"),
])
def test_last_words(lines: list[str], words: str) -> None:
    assert last_words(lines) == words


def test_what_a_progress_bar_wrote_over_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x\r\n 1%\r 2%\r 3%\nGr\xf6\xdfe\xff\n" + "a\u2028b\n".encode() + b"y" * 300_000 + b"\nlast")
    assert tail(tmp_path / "log")[:4] == ["x", " 3%", "Gr\ufffd\ufffde\ufffd",
        "a\u2028b"] and tail(tmp_path / "log")[-1] == "last"


@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from([*BOOM, *DIRECT, *GROUP, *RICH, *TABLE, *DUMP, GONE])),
    max_size=30),
       st.integers(-64, 255), st.booleans())
def test_any_lines(lines: list[str], code: int, of_node: bool) -> None:
    assert words_of_end(lines, code, program=True, of_node=of_node).text or code == 0
    given_up(lines)
