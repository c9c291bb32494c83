"""``hpc-mp run`` and job files with ``[program]`` on emulated nodes: what reaches the program, and what is said of its end."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm
from click.testing import CliRunner, Result
from launching import call, until
from tables import table
from watchdog_words import SAYS

from hpc_mp.cli.main import cli
from hpc_mp.launch.program.launchers import MEET
from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.failures import read_failures
from hpc_mp.rundir.outcome import Cause, verdict
from hpc_mp.rundir.records import RankStart, read_records

HARD = ["a b", "$HOME", "`id`", ";ls", "'", '"', "new\nline", "é 漢", "--nodes", "--", "-x", "", "\\", "{}", "*"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a blank in its path."""
    directory = tmp_path / "a directory"
    directory.mkdir()
    monkeypatch.chdir(directory)
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return directory


def program(here: Path, text: str, name: str = "program.py") -> list[str]:
    (here / name).write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return [sys.executable, name]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", *words])


def local(here: Path, command: list[str], *options: str, nodes: int = 2, each: int = 2) -> tuple[Result, RunDirectory]:
    done = run("--on", "local", "--nodes", str(nodes), "--ranks-per-node", str(each), *options, "--", *command)
    return done, RunDirectory(max((here / "runs").glob("*/0*"), key=lambda path: path.stat().st_mtime))


def cause_of(done: Result, found: RunDirectory) -> Cause:
    ended = verdict(found)
    assert done.exit_code == 1 and ended is not None and ended.cause is not None, done.output
    return ended.cause


MEETS = """import socket
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(where)
    assert [server.accept()[0].recv(1) for _ in range(3)] == [b"x"] * 3
else:
    while True:
        try:
            socket.create_connection(where).sendall(b"x")
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


def test_every_rank_gets_the_command_byte_for_byte(here: Path) -> None:
    """And they can meet at the port."""
    command = program(here, MEETS + "import json\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))")
    done, found = local(here, [*command, *HARD], "--set", 'program.environment={A = "b c"}')
    assert done.exit_code == 0, done.output + repr(done.exception)
    ranks = [json.loads(found.rank_log(rank).read_text()) for rank in range(4)]
    assert [each[0] for each in ranks] == [HARD] * 4 and {each[1] for each in ranks} == {str(here)}
    environs = [each[2] for each in ranks]
    assert [each["RANK"] for each in environs] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in environs] == ["0", "1", "0", "1"]
    assert [each["GROUP_RANK"] for each in environs] == ["0", "0", "1", "1"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"], each["A"]) for each in environs} == {
        ("4", "2", "127.0.0.1", "b c")}
    assert not [name for name in environs[0] if name.startswith("SLURM")], "there is no Slurm here"
    assert environs[0].get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert verdict(found).state == "completed" and read_json(found.status)["phase"] == "done"  # type: ignore[union-attr]
    assert [(start.rank, start.node) for start in read_records(found.ranks, RankStart)] == [
        (0, "node0"), (1, "node0"), (2, "node1"), (3, "node1")]
    assert "completed" in call("status", found.path).output
    assert "no checkpoint" not in done.output and "export" not in done.output


def test_ranks_of_a_program_with_axes(here: Path) -> None:
    """Each has the number by which its own groups lie in the order that was asked for, and is told its coordinates."""
    command = program(here, """
        print([os.environ[f"HPC_MP_{axis}_{what}"] for what in ("RANK", "SIZE") for axis in ("TP", "PP", "DP", "CP")],
              os.environ["LOCAL_RANK"], os.environ["NODE_RANK"], os.environ["HPC_MP_PLACEMENT"])
        if rank == 3:
            time.sleep(1)
            raise ValueError("boom")
        time.sleep(60)
        """)
    done, found = local(here, command, "--set", "program.axes=megatron", "--set", "parallel.pipeline=2", "--set",
                        "parallel.order=cluster")
    said = [found.rank_log(rank).read_text().split("\n")[0] for rank in range(4)]
    sizes = ["1", "2", "2", "1"]
    assert said == [f"{at + sizes} {local} {node} {found.placement}" for at, local, node in (
        (["0", "0", "0", "0"], 0, 0), (["0", "0", "1", "0"], 0, 1), (["0", "1", "0", "0"], 1, 0), (["0", "1", "1", "0"], 1, 1))]
    words = "PDT (megatron), laid out in the order DPT; pipeline groups span 1 node, data groups span 2 nodes"
    assert f"order     {words}" in done.output
    assert "rank 3 (dp 1, pp 1, tp 0) on node1 failed: ValueError: boom" in cause_of(done, found).message


@pytest.mark.parametrize(("keys", "words"), table(__file__, "run.toml", "orders"))
def test_an_order_that_is_not_used_is_not_claimed(here: Path, keys: list[str], words: str) -> None:
    sets = [f"--set={key}" for key in keys]
    done = run("--on", "local", "--nodes", "2", "--ranks-per-node", "2", *sets, "--dry-run", "--", "true")
    assert done.exit_code == 0 and words in " ".join(done.output.split()), done.output


# (what rank 2 of 4 does, what the others do, kind, words of the cause): a path through the code each. How tracebacks and last
# words are read is for tests/diagnosis/test_ends.py.
ENDS = table(__file__, "run.toml", "ends")


@pytest.mark.parametrize("name", ENDS)
def test_the_cause_of_an_end(here: Path, name: str) -> None:
    own, others, kind, words = ENDS[name]
    limit = ("--set", "program.silent_limit=5") if "hang" in name else ()
    command = program(here, f"WATCHDOG = {SAYS!r}\nprint('begins')\nif rank == 2:\n    {own}\n{others}\n")
    began = time.monotonic()
    done, found = local(here, command, *limit)
    assert time.monotonic() - began < 50, done.output
    cause = cause_of(done, found)
    assert (cause.kind, cause.rank, cause.node) == (kind, 2, "node1") and words in cause.message, cause
    assert cause.message in str(done.exception) and cause.message in found.main_log.read_text()
    if kind == "error":
        assert "Traceback" in next(each.traceback for each in read_failures(found) if each.rank == 2)


def test_a_hang_of_which_nobody_can_tell_who_was_first(here: Path) -> None:
    cause = cause_of(*local(here, program(here, "print('begins')\ntime.sleep(60)"), "--set", "program.silent_limit=2"))
    assert (cause.kind, cause.rank) == ("hang", None)
    assert cause.message.startswith("the job made no progress: no rank has printed a line for 2 s")


@pytest.mark.prove  # with a rank that stands in another collective: tests/end_to_end/test_program_slurm.py
def test_a_hang_names_the_rank_for_which_the_others_wait(here: Path) -> None:
    """No rank is the first to fall silent."""
    done, found = local(here, program(here, """
        import subprocess
        loads = subprocess.Popen(["sh", "-c", "while sleep 1; do echo imports torch; done"])
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        loads.kill()
        def next_batch():
            time.sleep(60)
        for step in range(2):
            print("step", step)
            if (rank, step) == (2, 1):
                next_batch()
            dist.all_reduce(torch.ones(1))
        """), "--set", "program.silent_limit=4")
    cause = cause_of(done, found)
    assert (cause.kind, cause.rank, cause.node) == ("hang", 2, "node1"), cause
    assert "rank 2: program.py:11 in next_batch; ranks 0, 1, 3: program.py:16 in all_reduce" in cause.message, cause
    assert all("all_reduce" in found.rank_stack(rank).read_text() for rank in (0, 1, 3))
    shown = call("logs", found.path).output
    assert "log/stack-*" in shown and cause.message in shown


def test_a_rank_may_go_on_long_after_another_has_ended_well(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than ranks of our own engine may."""
    monkeypatch.setattr("hpc_mp.launch.emulator.zygote.LAG_S", 0.1)
    done, _ = local(here, program(here, "time.sleep(2 if rank == 0 else 0)"))
    assert done.exit_code == 0, done.output


def test_a_failed_run_is_resumed_by_its_own_job_file(here: Path) -> None:
    command = program(here, "print(os.environ.get('HPC_MP_ATTEMPT'), os.environ.get('HPC_MP_RESUME'))\n"
                            "sys.exit(0 if os.environ.get('HPC_MP_RESUME') else 5)")
    done, found = local(here, command, nodes=1, each=1)
    assert f"launch {str(found.job)!r} --on local --resume" in str(done.exception)
    assert call("launch", found.job, "--on", "local", "--resume").exit_code == 0
    assert found.rank_log(0).read_text() == "2 1\n" and verdict(found).state == "completed"  # type: ignore[union-attr]
    third = call("launch", found.job, "--on", "local", "--resume")
    assert "nothing is left to do: the run is complete" in third.output and found.attempt() == 2


@pytest.mark.parametrize(("name", "code", "options"), [
    ("TERM", 75, ()), ("USR1", 3, ("--set", "program.signal=USR1", "--set", "program.stop_codes=[3]"))])
def test_an_interrupt_reaches_the_program_as_its_signal(here: Path, name: str, code: int, options: tuple[str, ...]) -> None:
    """A rank that takes longer to save than another is waited for."""
    command = program(here, f"""
        signal.signal(signal.SIG{name}, lambda *_: (time.sleep(3.5 * rank), print("saves"), sys.exit({code})))
        print("begins")
        open(f"ready-{{rank}}", "w").close()
        time.sleep(60)
        """)
    child = warm.Program(["-m", "hpc_mp", "run", "--on", "local", "--ranks-per-node", "2", *options, "--", *command], os.environ)
    until(lambda: len(list(here.glob("ready-*"))) == 2, 60)
    ended, out, err = child.outcome(signal.SIGINT)
    assert ended == 1 and "stopped. Continue with:" in out + err, out + err
    (found,) = (here / "runs").glob("*/0001")
    assert [RunDirectory(found).rank_log(rank).read_text() for rank in range(2)] == ["begins\nsaves\n"] * 2


def test_a_job_file_and_a_sweep(here: Path) -> None:
    command = program(here, "print('LR', os.environ['LR'])")
    (here / "job.toml").write_text(f'[program]\ncommand = {json.dumps(command)}\n[sweep.grid]\n'
                                   '"program.environment.LR" = ["1e-3", "3e-4"]\n')
    done = CliRunner().invoke(cli, ["launch", "job.toml", "--on", "local"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert sorted(path.read_text() for path in here.glob("runs/job/*/log/rank-00000.log")) == ["LR 1e-3\n", "LR 3e-4\n"]
    assert "LR" in call("status", "runs").output or "completed" in call("status", "runs/job").output


@pytest.mark.timeout(200)
def test_torchrun_on_every_node(here: Path) -> None:
    """The real one, on two emulated nodes with two ranks each."""
    pytest.importorskip("torch")
    program(here, """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        sys.stdout.write("{WORLD_SIZE} {LOCAL_RANK} {GROUP_RANK} ".format(**os.environ) + str(total.item()) + chr(10))  # at once
        if len(sys.argv) > 1 and rank == 3:
            raise ValueError("boom")
        dist.destroy_process_group()
        """)
    start = [sys.executable, "-m", "torch.distributed.run", *MEET.split(), "program.py"]
    done, found = local(here, start, "--set", "program.start=node", "--name", "well")
    assert done.exit_code == 0, done.output + found.rank_log(0).read_text()
    said = sorted(line for node in range(2) for line in found.rank_log(node).read_text().splitlines() if line.startswith("4 "))
    assert said == ["4 0 0 6.0", "4 0 1 6.0", "4 1 0 6.0", "4 1 1 6.0"]
    cause = cause_of(*local(here, [*start, "fail"], "--set", "program.start=node", "--name", "fails"))
    assert (cause.kind, cause.node, cause.rank) == ("error", "node1", 3), cause
    assert cause.message == "node node1 failed: ValueError: boom (program.py:10), reported by its rank 3"


def test_explain_names_no_key_that_a_program_may_not_have(here: Path) -> None:
    done = run("--on", "local", "--explain", "--", *program(here, "print(rank)"))
    assert done.exit_code == 0 and "silent_limit = 3600" in done.output and "#SBATCH --requeue" in done.output
    assert not any(word in done.output for word in ("step_timeout", "tensor = 1", "training goes on"))
    assert not (here / "runs").exists()
