"""``hpc-mp launch``: what it decides, refuses, writes, starts and says; the ranks are fake but where noted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import HERE, environment, mark, marked, until

from hpc_mp.cli.launch import command
from hpc_mp.cluster.ask import NoAnswer, ask
from hpc_mp.cluster.gpus import Gpu
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.launch.compose import compose
from hpc_mp.launch.describe import defaults, describe
from hpc_mp.launch.device import check_memory, choose, size
from hpc_mp.launch.endings import ending
from hpc_mp.launch.environment import rank_environments, shared_environment
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.outcome import Cause, Outcome, figures, judge
from hpc_mp.launch.resume import resuming
from hpc_mp.launch.tail import Attempt, Tail
from hpc_mp.launch.watch import Ended, Exit
from hpc_mp.launch.where import Where, decide
from hpc_mp.placement import Degrees, place
from hpc_mp.rundir import Manifest, RunDirectory, create_run, write_manifest

__all__ = ["mark"]  # a fixture

GIB = 2**30
JOB = """
[job]
name = "t"
nodes = {nodes}
ranks_per_node = {ranks}
[model]
config = {{ model_type = "gpt2", n_layer = 2, n_embd = 64, n_head = 4, vocab_size = 512, n_positions = 64 }}
[data]
files = ["text.txt"]
sequence_length = 32
[train]
steps = 5
global_batch = 8
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def write_job(directory: Path, nodes: int = 2, ranks: int = 2, more: str = "") -> Path:
    (directory / "text.txt").write_text("some text\n" * 100)
    path = directory / "job.toml"
    path.write_text(JOB.format(nodes=nodes, ranks=ranks) + more)
    return path


def spec_of(directory: Path, nodes: int = 2, ranks: int = 2, more: str = "", *overrides: str) -> JobSpec:
    return load_job(write_job(directory, nodes, ranks, more), overrides)


def silent(argv: Any) -> str:
    raise NoAnswer(f"{argv[0]} is not on PATH")


# --- the environment of a rank ------------------------------------------------------------------------------


def test_a_rank_is_told_what_srun_tells(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 2, 4, '[environment]\nset = { WORD = "a b", MASTER_ADDR = "10.0.0.1" }\n')
    told = rank_environments(spec, place(Degrees(data=8), "DPT", 4), job_id=77, port=1234)
    assert [one["SLURM_PROCID"] for one in told] == [str(rank) for rank in range(8)]
    assert told[5] == {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8",
        "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "t", "SLURMD_NODENAME": "node1", "MASTER_PORT": "1234",
        "MASTER_ADDR": "10.0.0.1", "WORD": "a b",  # environment.set has the last word
    }


def test_one_node_is_written_without_brackets(tmp_path: Path) -> None:
    (told,) = rank_environments(spec_of(tmp_path, 1, 1), place(Degrees(), "DPT", 1), job_id=1, port=2)
    assert (told["SLURM_STEP_NODELIST"], told["SLURM_TASKS_PER_NODE"]) == ("node0", "1")


def test_ranks_share_what_libraries_read_when_imported(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 2, 2, '[environment]\nset = { HF_HUB_OFFLINE = "0" }\n')
    shared = shared_environment(spec, {"PATH": "/bin", "SLURM_JOB_ID": "9", "RANK": "3", "RANKING": "kept"}, cores=9)
    assert shared == {
        "PATH": "/bin", "RANKING": "kept", "OMP_NUM_THREADS": "2", "HPC_MP_EMULATED": "1", "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    assert shared_environment(spec, {}, cores=3)["OMP_NUM_THREADS"] == "1"
    assert shared_environment(spec, {"OMP_NUM_THREADS": "7"}, cores=9)["OMP_NUM_THREADS"] == "7"


# --- where --------------------------------------------------------------------------------------------------


def answers(table: Mapping[str, str]) -> Callable[[Any], str]:
    def ask(argv: Any) -> str:
        return table[argv[0]] if argv[0] in table else silent(argv)
    return ask


@pytest.mark.parametrize(("on", "environ", "table", "found", "why"), [
    ("local", {"SLURM_JOB_ID": "7"}, {"squeue": "RUNNING\n"}, "local", "--on local"),
    ("slurm", {}, {}, "slurm", "--on slurm"),
    ("slurm", {"SLURM_JOB_ID": "7"}, {"squeue": "RUNNING\n"}, "step", "inside the live allocation 7"),
    ("auto", {"SLURM_JOB_ID": "7"}, {"squeue": "RUNNING\n"}, "step", "inside the live allocation 7"),
    ("auto", {"SLURM_JOB_ID": "7"}, {"squeue": "", "scontrol": "Slurmctld(primary) at x is UP"}, "slurm", "7 is gone"),
    ("auto", {"SLURM_JOB_ID": "7"}, {"squeue": "COMPLETING\n"}, "local", "the allocation 7 is COMPLETING"),
    ("auto", {"SLURM_JOB_ID": "7"}, {}, "local", "SLURM_JOB_ID=7 is no live allocation (squeue is not on PATH)"),
    ("auto", {}, {"scontrol": "Slurmctld(primary) at x is UP"}, "slurm", "scontrol ping answers"),
    ("auto", {}, {"scontrol": "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP"}, "slurm", "answers"),
    ("auto", {}, {"scontrol": "Slurmctld(primary) at x is DOWN"}, "local", "is DOWN"),
    ("auto", {}, {"sbatch": "slurm 23.11"}, "local", "scontrol is not on PATH"),
])
def test_where(on: str, environ: dict[str, str], table: dict[str, str], found: str, why: str) -> None:
    where = decide(on, environ, answers(table))
    assert where.place == found and why in where.why


def test_mpi_is_not_built() -> None:
    with pytest.raises(HpcMpError, match="--on mpi: not built yet"):
        decide("mpi", {}, silent)


def executable(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("scontrol", "found", "why"), [
    ("sleep 60", "local", "did not answer within 3 s"),
    ("echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1", "local", "Unable to contact"),
    ("echo 'Slurmctld(primary) at x is UP'", "slurm", "scontrol ping answers"),
    ("echo 'Slurmctld(primary) at x is DOWN'", "local", "is DOWN"),
])
def test_real_programs_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str, found: str, why: str
) -> None:
    executable(tmp_path / "bin", "scontrol", scontrol)
    executable(tmp_path / "bin", "sbatch", "exit 0")  # proves nothing
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    began = time.monotonic()
    where = decide("auto", {}, ask)
    assert where.place == found and why in where.why
    assert time.monotonic() - began < 4


# --- the device and its memory ------------------------------------------------------------------------------

GPUS = (Gpu(0, "H200", 100 * GIB), Gpu(1, "H200", 100 * GIB))


@pytest.mark.parametrize(("asked", "ranks", "gpus", "built", "kind", "why"), [
    ("auto", 2, GPUS, True, "cuda", "a GPU for every rank"),
    ("auto", 3, GPUS, True, "cpu", "2 GPUs are fewer than 3 ranks"),
    ("auto", 2, (), True, "cpu", "nvidia-smi finds no GPU"),
    ("auto", 2, GPUS, False, "cpu", "the installed torch is built without CUDA"),
    ("cpu", 2, GPUS, True, "cpu", "job.device = cpu"),
    ("cuda", 5, GPUS, True, "cuda", "5 ranks share 2 GPUs"),
])
def test_device(asked: Any, ranks: int, gpus: tuple[Gpu, ...], built: bool, kind: str, why: str) -> None:
    device = choose(asked, ranks, gpus, built, 8 * GIB)
    assert (device.kind, device.why) == (kind, why)
    assert sorted(rank for pool in device.pools for rank in pool.ranks) == list(range(ranks))


@pytest.mark.parametrize(("gpus", "built", "rule"), [((), True, "finds no GPU"), (GPUS, False, "built without CUDA")])
def test_cuda_is_refused_where_there_is_none(gpus: tuple[Gpu, ...], built: bool, rule: str) -> None:
    with pytest.raises(HpcMpError, match=rule):
        choose("cuda", 1, gpus, built, GIB)


def test_shared_gpus_add_up() -> None:
    device = choose("cuda", 4, GPUS, True, GIB)
    assert [pool.ranks for pool in device.pools] == [(0, 2), (1, 3)]
    check_memory([50 * GIB, 10 * GIB, 50 * GIB, 10 * GIB], device)
    refused = r"101\.0 GiB of model state .* 2 ranks on GPU 0 \(H200\): is more than its 100\.0 GiB"
    with pytest.raises(HpcMpError, match=refused):
        check_memory([50 * GIB, 10 * GIB, 51 * GIB, 10 * GIB], device)


def test_a_gpu_of_unknown_size_refuses_nothing() -> None:
    check_memory([2**60], choose("cuda", 1, (Gpu(0, "GB10", None),), True, GIB))


@given(st.integers(0, 2**60))
def test_sizes_are_right_to_a_decimal(count: int) -> None:
    number, unit = size(count).split()
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert abs(float(number) * factor - count) <= 0.05 * factor + 1e-6 * count
    assert unit == "TiB" or float(number) <= 1024


# --- the plan and its words ---------------------------------------------------------------------------------


def test_a_plan_settles_what_was_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    given = spec_of(tmp_path, 2, 2, '[parallel]\ntensor = 2\n[slurm]\nsetup = ["module load x"]\n')
    plan = compose(given, Where("local", "so"))
    assert given.parallel.order == given.job.device == "auto"
    assert plan.spec.job.device == "cpu" and set(plan.spec.parallel.order) == set("DPT")
    assert plan.placement.order == plan.spec.parallel.order and len(plan.state) == 4
    text = describe(plan)
    for part in ("nodes(2) × ranks_per_node(2) = 4 ranks, emulated on this machine (so)",
                 "cpu (nvidia-smi finds no GPU)", "tensor(2) × pipeline(1) × data(2), ZeRO-1",
                 "slurm.setup has no effect locally", "MiB per rank", "microbatches(1) × 4 sequences of 32 tokens"):
        assert part in text, text
    assert max(map(len, text.splitlines())) <= 120


def test_defaults_are_those_keys_that_are_not_given(tmp_path: Path) -> None:
    shown = defaults(spec_of(tmp_path, more="[checkpoint]\nevery = 3\n"))
    keys = {f"{section}.{key}" for section, body in re.findall(r"\[(\w+)\] ([^\[]*(?:\[[\d., ]*\][^\[]*)*)", shown)
            for key in re.findall(r"(\w+) = ", body)}
    assert {"train.learning_rate", "parallel.zero", "checkpoint.keep", "job.device", "train.betas"} <= keys
    assert not keys & {"checkpoint.every", "train.steps", "job.nodes", "data.sequence_length", "slurm.account"}


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_mp.launch.device.psutil.virtual_memory", lambda: type("m", (), {"total": 3 * 2**20}))
    with pytest.raises(HpcMpError, match=r"MiB of model state .* 4 ranks on this machine: is more than its 3\.0 MiB"):
        compose(spec_of(tmp_path), Where("local", ""))


@pytest.mark.parametrize(("config", "problem"), [
    ({"model_type": "gpt2", "hidden_sise": 64}, r"hidden_sise: is not a key of a gpt2 .* did you mean 'hidden_size'"),
    ({"model_type": "gpt2", "layer_norm_epsilon": "1e-5"}, "is refused by transformers .*layer_norm_epsilon"),
    ({"model_type": "gpt2", "dtype": "float31"}, "is refused by transformers .*float31"),
    ({"model_type": "gpt2", "rope_theta": 1e4}, r"model\.config\.rope_theta: is not a key"),
])
def test_transformers_is_asked_about_a_config(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(HpcMpError, match=problem):
        check_model(config, 512, written_here=True)


def test_configs_that_transformers_takes() -> None:
    gpt2, llama = {"model_type": "gpt2"}, {"model_type": "llama"}
    assert check_model(gpt2 | {"hidden_size": 64, "n_layer": 2}, 512, written_here=True) == []
    assert check_model(llama | {"rope_theta": 5e5, "num_key_value_heads": 2}, 512, written_here=True) == []
    assert check_model(gpt2 | {"n_ctx": 1024, "_num_labels": 1}, 512, written_here=False) == []
    (warning,) = check_model(gpt2 | {"eos_token_id": 512}, 512, written_here=True)
    assert warning == "model.config.eos_token_id = 512 is beyond the vocabulary of 512"


# --- what became of a run -----------------------------------------------------------------------------------


def end(rank: int, code: int, time: float = 0.0, ours: bool = False) -> Exit:
    return Exit(rank, code, time, ours)


def said(run: RunDirectory, rank: int, kind: str, time: float, attempt: int = 1) -> None:
    run.failure(attempt, rank).write_text(json.dumps({
        "attempt": attempt, "rank": rank, "node": f"node{rank // 2}", "host": "h", "pid": 1, "time": time, "kind": kind,
        "message": {"user": "x: is wrong. mend it.", "error": "ValueError: boom", "peer": "Connection reset"}[kind],
        "traceback": ""}))


PLACED = place(Degrees(data=4), "DPT", 2)


@pytest.mark.parametrize(("words", "exits", "state", "kind", "rank"), [
    ({}, [end(0, 0), end(1, 0)], "completed", None, None),
    ({}, [end(0, 75), end(1, 75)], "stopped", None, None),
    ({1: ("error", 5.0)}, [end(1, 1, 6.0), end(0, -15, 7.0, ours=True)], "failed", "error", 1),
    # the earliest wins, whatever the order in which ends were noticed, and an exception counts when it was raised
    ({1: ("error", 5.0), 2: ("error", 4.0)}, [end(1, 1, 5.1), end(2, 1, 5.2)], "failed", "error", 2),
    ({1: ("error", 5.0)}, [end(1, 1, 5.1), end(3, -9, 4.9)], "failed", "signal", 3),
    ({1: ("error", 4.8)}, [end(1, 1, 5.1), end(3, -9, 4.9)], "failed", "error", 1),
    # a peer's complaint is never the cause when anybody else has one, even if it was noticed first
    ({0: ("peer", 1.0), 1: ("error", 5.0)}, [end(0, 1, 1.1), end(1, 1, 5.1)], "failed", "error", 1),
    ({0: ("peer", 1.0)}, [end(0, 1, 1.1), end(3, -11, 5.1)], "failed", "signal", 3),
    ({0: ("peer", 2.0), 1: ("peer", 1.0)}, [end(0, 1, 2.1), end(1, 1, 1.1)], "failed", "peer", 1),
    # wrong input comes before all
    ({0: ("error", 1.0), 1: ("user", 5.0)}, [end(0, 1, 1.1), end(1, 2, 5.1)], "failed", "user", 1),
    ({}, [end(2, 1, 3.0)], "failed", "exit", 2),
    ({}, [end(0, 0, 1.0), end(2, -15, 61.0, ours=True)], "failed", "hang", 2),
])
def test_the_first_cause(tmp_path: Path, words: dict[int, tuple[str, float]], exits: list[Exit], state: str,
                         kind: str | None, rank: int | None) -> None:
    run = create_run(tmp_path, "job")
    for who, (what, when) in words.items():
        said(run, who, what, when)
    found, cause = judge(Ended(tuple(exits)), Attempt(run, 1), PLACED)
    assert found == state
    assert (cause and cause.kind, cause and cause.rank) == (kind, rank)


def test_peers_lost_by_a_stop_are_no_failure(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    said(run, 1, "peer", 2.0)
    exits = (end(0, -15, 1.0, ours=True), end(1, 1, 2.1))
    assert judge(Ended(exits, asked=True), Attempt(run, 1), PLACED) == ("stopped", None)
    assert judge(Ended(exits, asked=False), Attempt(run, 1), PLACED)[0] == "failed"
    killed = (end(0, -9, 1.0, ours=True), end(2, -9, 1.0, ours=True))
    assert judge(Ended(killed, asked=True), Attempt(run, 1), PLACED) == ("stopped", None)


def test_causes_say_who_where_why(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    run.rank_log(3).write_text("of an earlier attempt\n")
    attempt = Attempt(run, 1)
    _, cause = judge(Ended((end(3, -9),)), attempt, PLACED)
    assert cause == Cause("signal", "rank 3 on node1 was killed by SIGKILL (the system ran out of memory, or somebody "
                          "killed it)", 3, "node1", str(run.rank_log(3)))
    with open(run.rank_log(3), "a") as log:
        log.write("training\nterminate called\n\n")
    _, cause = judge(Ended((end(3, 1),)), attempt, PLACED)
    assert cause and cause.message == "rank 3 on node1 ended with exit code 1; its last words: terminate called"
    assert ending(-64) == "was killed by SIGRTMAX" and "SIGSEGV" in ending(-11)


def record(step: int, attempt: int = 1, seconds: float = 1.0, loss: float = 1.0) -> str:
    return json.dumps({"attempt": attempt, "step": step, "loss": loss, "step_time_s": seconds,
                       "tokens_per_s": 100 / seconds})


def test_figures_are_of_the_run_and_the_speed_of_the_attempt(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    assert figures(Attempt(run, 1))["loss"] is None
    lines = [record(1, loss=9.0), record(2), record(3, 2, 50.0), record(4, 2, 1.0), record(5, 2, 3.0, loss=0.1)]
    run.metrics.write_text("\n".join(lines) + "\n" + lines[-1][:10])
    found = figures(Attempt(run, 2))
    assert found == {"steps": 5, "first_loss": 9.0, "loss": 0.1, "tokens_per_s": 50.0, "checkpoint": None}


def test_a_document_holds_no_nan(tmp_path: Path) -> None:
    text = json.dumps(Outcome(tmp_path, "failed", loss=float("nan"), first_loss=0.1 + 0.2).document(None))
    assert json.loads(text)["loss"] is None and "0.30000000000000004" in text and "NaN" not in text


def test_tail_gives_every_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    with open(path, "a") as file:
        file.write('{"a": 1}\n{"a": ')
        file.flush()
        assert tail.new() == [{"a": 1}]
        file.write("2}\n")
        file.flush()
        assert tail.new() == [{"a": 2}]
    (tmp_path / "new").write_text('{"a": 1}\n{"a": 3}\n')  # a resume cuts the file back
    os.replace(tmp_path / "new", path)
    assert tail.new() == [{"a": 1}, {"a": 3}]


def test_what_earlier_attempts_left_is_passed_over(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    attempt = Attempt(run, 2)
    (run.path / "status.json").write_text(json.dumps({"attempt": 1, "phase": "training"}))
    run.metrics.write_text(record(1) + "\n" + record(2, 2) + "\n")
    said(run, 0, "error", 1.0)
    assert attempt.status() is None and attempt.failures() == {}
    assert [one["step"] for one in attempt.steps()] == [2]
    (run.path / "status.json").write_text(json.dumps({"attempt": 2, "phase": "training"}))
    assert attempt.status() == {"attempt": 2, "phase": "training"}


# --- the command, with fake ranks ---------------------------------------------------------------------------




class Launch:
    """``hpc-mp launch`` in a process of its own, with fake ranks (or real ones) that train."""

    def __init__(self, mark: str, job: Path, *arguments: str, program: tuple[str, ...] = (str(HERE / "fake_cli.py"),),
                 stderr: int = subprocess.PIPE, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "launch", str(job), "--on", "local", *arguments], stdout=subprocess.PIPE,
            stderr=stderr, text=True, env=environment(mark, **{"DEED": "train", **environ}))

    def end(self) -> tuple[int, str, str]:
        """The exit code and what was printed."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err or ""


def launch(mark: str, job: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    return Launch(mark, job, *arguments, **environ).end()


def the_run(job: Path, number: int = 1) -> RunDirectory:
    return RunDirectory(job.parent / "runs" / "t" / f"{number:04d}")


KEYS = ["run", "state", "job_id", "steps", "first_loss", "loss", "tokens_per_s", "checkpoint", "cause", "report"]


def test_a_run_from_start_to_end(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--json")
    assert code == 0, err
    run = the_run(job)
    document = json.loads(out)
    assert out.count("\n") == 1 and list(document) == KEYS
    assert document == {
        "run": str(run.path), "state": "completed", "job_id": None, "steps": 5, "first_loss": 8.0, "loss": 1.6,
        "tokens_per_s": 200.0, "checkpoint": str(run.checkpoints / "step-00000005"), "cause": None,
        "report": str(run.report)}
    assert load_job(run.job).parallel.order == json.loads(run.placement.read_text())["order"]
    assert run.script.read_text().startswith("#!/bin/bash")
    assert run.rank_log(3).read_text() == "rank 3 lives\n"
    assert oct(run.path.stat().st_mode)[-3:] == "700"
    code, out, err = launch(mark, job)
    assert code == 0 and "loss      8.0000 → 1.6000 in 5 steps, 200 tokens/s" in out and err == ""
    for line in ("where     ", "state     ", "defaults  ", f"run       {the_run(job, 2).path}", "saved     ",
                 "report    ", f"export    hpc-mp export {the_run(job, 2).path} --output DIRECTORY"):
        assert line in out


def test_a_killed_rank_fails_the_run(job: Path, mark: str) -> None:
    running = Launch(mark, job, "--json", PAUSE="60")
    run = the_run(job)
    until(lambda: run.metrics.exists() and run.rank_log(3).exists())
    began = time.monotonic()
    rank_process(mark, run, 3).kill()
    code, out, err = running.end()
    assert time.monotonic() - began < 5
    assert code == 1
    document = json.loads(out)
    assert list(document) == KEYS and document["state"] == "failed"
    cause = document["cause"]
    assert (cause["rank"], cause["node"], cause["kind"]) == (3, "node1", "signal")
    assert "rank 3 on node1 was killed by SIGKILL (the system ran out of memory, or somebody killed it)" in err
    assert f"its log:    {run.rank_log(3)}" in err and f"hpc-mp launch {job} --on local --resume" in err
    assert "Traceback" not in err
    assert "attempt 1 failed: rank 3 on node1 was killed by SIGKILL" in run.main_log.read_text()


def rank_process(mark: str, run: RunDirectory, rank: int) -> psutil.Process:
    """A rank, known by its log (its environment in /proc is the zygote's)."""
    log = str(run.rank_log(rank))
    return next(p for p in marked(mark) if os.readlink(f"/proc/{p.pid}/fd/1") == log)


def test_wrong_input_found_by_a_rank_is_the_users(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--json", DEED="peer", DEED_2="wrong_input", DEED_1="error")
    assert code == 2 and json.loads(out)["cause"]["kind"] == "user"
    assert err.endswith("hpc-mp: data.files = x: is empty. give text.\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_saves_and_says_how_to_go_on(job: Path, mark: str, number: int) -> None:
    running = Launch(mark, job, "--json", PAUSE="60")
    until(the_run(job).metrics.exists)
    running.process.send_signal(number)
    code, out, err = running.end()
    document = json.loads(out)
    assert code == 1 and document["state"] == "stopped" and document["cause"] is None
    assert document["steps"] == 1 and document["checkpoint"].endswith(f"step-{document['steps']:08d}")
    assert "saving at the next step" in err
    assert f"stopped after step {document['steps']}. Go on with: hpc-mp launch {job} --on local --resume" in err
    code, out, err = launch(mark, job, "--json", "--resume")
    assert code == 0 and json.loads(out)["run"] == document["run"] and json.loads(out)["steps"] == 5
    assert [step["step"] for step in map(json.loads, the_run(job).metrics.read_text().splitlines())] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("override", "said"), [
    ("train.steps=0", r"train\.steps = 0"),
    ("parallel.tensor=3", "does not divide"),
    ("data.sequence_length=100", "is longer than the model's 64 positions"),
    ("data.files=['none/*.txt']", "none/"),
    ("slurm.extra.nodez=1", "nodez"),
    ("checkpoint.resume=elsewhere", "elsewhere"),
    ("job.device=cuda", r"job\.device = cuda: nvidia-smi finds no GPU"),
    ("model.config.hidden_sise=64", "did you mean 'hidden_size'"),
])
def test_what_is_refused_leaves_nothing_behind(
    job: Path, override: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    before = set(psutil.Process().children())
    with pytest.raises(HpcMpError, match=said):
        command.main([str(job), "--on", "local", "--set", override], standalone_mode=False)
    assert sorted(path.name for path in job.parent.iterdir()) == ["job.toml", "text.txt"]
    assert set(psutil.Process().children()) == before


def test_a_refusal_is_one_paragraph_and_exit_code_2(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--json", "--set", "parallel.tensor=3")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("hpc-mp: tensor(3)")


def test_a_dry_run_prints_the_script_and_writes_nothing(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--dry-run", "--set", "job.nodes=4")
    assert code == 0 and out.startswith("#!/bin/bash\n") and out.endswith("/runs/t/0001/job.toml\n")
    assert "#SBATCH --nodes=4\n" in out and "where     nodes(4)" in err
    code, explained, _ = launch(mark, job, "--explain")
    assert code == 0 and "#!/bin/bash\n    The shell that runs this script" in explained
    code, out, _ = launch(mark, job, "--dry-run", "--json")
    document = json.loads(out)
    assert document["state"] == "planned" and document["script"].startswith("#!/bin/bash\n")
    assert not (job.parent / "runs").exists()


# --- going on -----------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A job whose run has done its five steps, without the cost of running it."""
    path = write_job(tmp_path)
    run = create_run(tmp_path / "runs", "t")
    run.job.write_text(dump_job(load_job(path)))
    run.placement.write_text("{}")
    for step in (3, 5):
        (run.checkpoints / f"step-{step:08d}").mkdir()
        write_manifest(run.checkpoints / f"step-{step:08d}", Manifest(step, {}))
    return path


def left(job: Path, *overrides: str, ask: Any = silent) -> bool:
    with resuming(load_job(job, overrides), ask) as resumed:
        return resumed.left


def test_nothing_to_resume(job: Path) -> None:
    with pytest.raises(HpcMpError, match=r"--resume of job 't': there is no run in .*/runs/t. launch it without"):
        left(job)


@pytest.mark.parametrize(("override", "said"), [
    ("model.config.n_layer=3", r"model\.config\.n_layer = 3: was 2 when"),
    ("model.config.n_inner=3", r"model\.config\.n_inner = 3: was None when"),
    ("data.files=['job.toml']", r"data\.files = .*job\.toml.*: was .*text\.txt.* when"),
    ("data.sequence_length=16", r"data\.sequence_length = 16: was 32"),
    ("train.seed=1", r"train\.seed = 1: was 0"),
    ("train.global_batch=16", r"train\.global_batch = 16: was 8"),
    ("train.optimizer=sgd", r"train\.optimizer = sgd: was adamw"),
    ("train.eps=1e-3", r"train\.eps = 0\.001: was 1e-08"),
    ("train.steps=4", r"train\.steps = 4: is less than the 5 steps that .* has done"),
])
def test_what_must_not_change(finished: Path, override: str, said: str) -> None:
    with pytest.raises(HpcMpError, match=said):
        left(finished, override)


@pytest.mark.parametrize("override", [
    "parallel.tensor=2", "parallel.zero=3", "job.nodes=4", "parallel.order='TPD'", "train.learning_rate=0.1",
    "checkpoint.every=2", "job.time_limit='2:00:00'",
])
def test_what_may_change(finished: Path, override: str) -> None:
    assert left(finished, override, "train.steps=6")


def test_a_run_is_finished_when_its_last_checkpoint_is_whole(finished: Path, mark: str) -> None:
    assert not left(finished)
    code, out, err = launch(mark, finished, "--resume", "--json")
    assert code == 0 and json.loads(out)["state"] == "completed" and "nothing is left to do" in err
    assert not list((the_run(finished).path / "attempts").iterdir())
    (the_run(finished).checkpoints / "step-00000005" / "complete.json").unlink()
    assert left(finished)


def test_a_finished_run_is_extended(job: Path, mark: str) -> None:
    assert launch(mark, job)[0] == 0
    code, out, err = launch(mark, job, "--resume", "--json", "--set", "train.steps=7", "--set", "job.nodes=1")
    assert code == 0, err
    run, document = the_run(job), json.loads(out)
    assert document["run"] == str(run.path) and document["steps"] == 7 and document["first_loss"] == 8.0
    assert load_job(run.path / "attempts" / "1" / "job.toml").train.steps == 5
    assert load_job(run.job).train.steps == 7 and len(json.loads(run.placement.read_text())["ranks"]) == 2
    assert not (job.parent / "runs" / "t" / "0002").exists()


def test_a_run_is_held_by_one_launch(job: Path, mark: str) -> None:
    running = Launch(mark, job, PAUSE="60")
    until(the_run(job).metrics.exists)
    code, _, err = launch(mark, job, "--resume")
    assert code == 2 and "is still going on, or another launch resumes it" in err
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 1
    pair = [Launch(mark, job, "--resume", PAUSE="60") for _ in range(2)]
    refused = until(lambda: [one for one in pair if one.process.poll() is not None])
    assert len(refused) == 1 and refused[0].end()[0] == 2
    (winner,) = (one for one in pair if one not in refused)
    until(lambda: len(the_run(job).metrics.read_text().splitlines()) == 2)
    winner.process.send_signal(signal.SIGTERM)
    assert winner.end()[0] == 1
    assert [path.name for path in (the_run(job).path / "attempts").iterdir()] == ["1"]


def test_ranks_hold_the_run_after_their_launcher(job: Path, mark: str) -> None:
    """The lock is the open file's, and every rank has it: a dead launcher alone does not free a run."""
    running = Launch(mark, job, DEED="hang")
    run = the_run(job)
    until(run.rank_log(3).exists)
    with open(run.path / ".lock") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        running.process.kill()
        until(lambda: not marked(mark), 3)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    running.process.communicate()


def test_a_queued_run_is_not_resumed(finished: Path) -> None:
    (the_run(finished).path / "job.id").write_text("17\n")
    with pytest.raises(HpcMpError, match=r"is Slurm job 17, which is PENDING. .* end it with scancel 17"):
        left(finished, ask=answers({"squeue": "PENDING\n"}))
    assert not left(finished, ask=answers({"squeue": "COMPLETED\n"}))
    assert not left(finished, ask=silent)


# --- on a terminal ------------------------------------------------------------------------------------------


def test_a_terminal_shows_a_bar(job: Path, mark: str) -> None:
    keyboard, screen = pty.openpty()
    running = Launch(mark, job, stderr=screen, PAUSE="0.3")
    os.close(screen)
    code, out, _ = running.end()
    shown = os.read(keyboard, 1 << 16).decode()
    assert code == 0 and re.search(r"step \d/5 .*loss \d\.\d{4}  200 tokens/s", shown), shown
    assert "step 3/5" not in out


# --- with the real engine -----------------------------------------------------------------------------------


def test_real_ranks_train_and_one_that_is_killed_is_named(job: Path, mark: str) -> None:
    program = ("-m", "hpc_mp")
    running = Launch(mark, job, "--json", "--set", "train.steps=100000", "--set", "job.nodes=1", program=program)
    run = the_run(job)
    until(lambda: run.metrics.exists() and run.metrics.read_text().count("\n") > 3, 60)
    began = time.monotonic()
    rank_process(mark, run, 1).kill()
    code, out, err = running.end()
    assert time.monotonic() - began < 15  # with the report
    document = json.loads(out)
    assert code == 1 and (document["cause"]["rank"], document["cause"]["kind"]) == (1, "signal"), document
    assert "rank 1 on node0 was killed by SIGKILL" in err
    assert [json.loads(line)["rank"] for line in sorted(run.ranks.read_text().splitlines())] == [0, 1]
