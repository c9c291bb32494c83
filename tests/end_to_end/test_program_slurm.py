"""Programs on a real Slurm: what reaches them, which rank, host and cause the verdict names, and what is queued again."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab_runs import GLOO, HARD, check_cause, ended, hpc_mp, logs_of, newest, program, run_words, submitted, until_ended
from slurm_jobs import until
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not
from tables import table
from watchdog_words import SAYS

from hpc_mp.launch.program.launchers import MEET
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.rundir.history import history

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]


HARDER = [*HARD, "`id`", "--", "!x", "~"]


def run(lab: Lab, here: Path, command: list[str], *options: str,
        user: str | None = None) -> tuple[subprocess.CompletedProcess[str], RunDirectory]:
    """To its end."""
    done = hpc_mp(lab, here, *run_words(command, "--wait", *options), user=user)
    assert list(here.glob("runs/*/0*")), done.stdout + done.stderr
    return done, newest(here)


def test_an_ordinary_users_program_gets_its_arguments_byte_for_byte(lab: Lab, here: Path) -> None:
    command = program(here, """
        import json
        with open(f"said-{rank}", "w") as file:
            json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], file)
        """)
    done, found = run(lab, here, [*command, *HARDER], "--set", 'program.environment={OWN = "$x; y\\n"}', user="nobody")
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(found)
    said = [json.loads((here / f"said-{rank}").read_text()) for rank in range(4)]
    assert [each[0] for each in said] == [HARDER] * 4 and {each[1] for each in said} == {str(here)}
    environs = [each[2] for each in said]
    assert [each["RANK"] for each in environs] == ["0", "1", "2", "3"] == [each["SLURM_PROCID"] for each in environs]
    assert [(each["LOCAL_RANK"], each["NODE_RANK"], each["SLURMD_NODENAME"]) for each in environs] == [
        ("0", "0", "n1"), ("1", "0", "n1"), ("0", "1", "n2"), ("1", "1", "n2")]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"], each["OWN"]) for each in environs} == {
        ("4", "2", "n1", "$x; y\n")}
    assert not [name for each in environs for name in each if name in ("HPC_MP_TOKEN", "HPC_MP_SECRET", "HF_HUB_OFFLINE")]
    assert ended(found).state == "completed" and found.program.stat().st_mode & 0o077 == 0
    chatter = hpc_mp(lab, here, "logs", found.path).stdout
    assert "completed" in chatter and "launch/slurm" not in chatter and "srun: ---" not in chatter


# (what rank 2 of 4 does, what the others do, kind, rank, words of the cause, attempts): ends in which Slurm or a real
# process has a part. How words alone are read is for tests/diagnosis/test_ends.py and test_diagnose.py.
ENDS = table(__file__, "program_slurm.toml", "ends")


def test_what_a_rank_leaves_behind_is_no_hang(lab: Lab, here: Path) -> None:
    command = program(here, """
        import subprocess
        if rank == 1:
            subprocess.Popen(["sleep", "90"], start_new_session=True)
        """)
    done, found = run(lab, here, command, "--set", "program.silent_limit=8")
    assert done.returncode == 0 and ended(found).state == "completed", logs_of(found)


@pytest.mark.parametrize("name", ENDS)
def test_the_cause_of_an_end(lab: Lab, here: Path, name: str) -> None:
    own, others, kind, rank, words, attempts = ENDS[name]
    limit = ("--set", "program.silent_limit=6") if "hang" in name else ()
    command = program(here, f"WATCHDOG = {SAYS!r}\nprint('begins')\nif rank == 2:\n    {own}\n{others}\n")
    done, found = run(lab, here, command, "--set", "slurm.retries=1", *limit)
    assert done.returncode == 1, done.stdout
    cause = check_cause(found, kind, words, rank=rank, node="n2")
    assert found.attempt() == attempts and cause.message in done.stderr


def test_the_first_of_all_ranks_that_fail_alike_is_named(lab: Lab, here: Path) -> None:
    _, found = run(lab, here, program(here, "time.sleep(0 if rank == 3 else 1.5)\nraise ValueError('boom')"))
    check_cause(found, "error", rank=3)


# (what rank 2 does in its third step in place of all_reduce, where it stands then)
HANGS = {
    "a data loader": ("next_batch()", "rank 2: program.py:7 in next_batch"),
    "a collective": ("dist.barrier()", "rank 2: program.py:11 in barrier"),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_names_the_rank_for_which_the_others_wait(lab: Lab, here: Path, name: str) -> None:
    """All ranks print alike, so that none is the first to fall silent."""
    own, words = HANGS[name]
    command = program(here, f"""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        def next_batch():
            time.sleep(600)
        for step in range(9):
            print("step", step)
            if (rank, step) == (2, 2):
                {own}
            dist.all_reduce(torch.ones(1))
        """)
    done, found = run(lab, here, command, "--set", "slurm.retries=0", "--set", "program.silent_limit=20", *GLOO)
    cause = check_cause(found, "hang", f"{words}; ranks 0, 1, 3: program.py:12 in all_reduce", rank=2, node="n2")
    assert "stacks of ranks 0-3: log/stack-*" in found.main_log.read_text() and cause.message in done.stderr
    assert history(found)[0].nodes == ()


def test_a_node_of_which_an_xid_speaks_is_left_out(lab: Lab, here: Path) -> None:
    command = program(here, """
        print("begins")
        if rank == 2 and not os.environ.get("HPC_MP_RESUME"):
            print("NVRM: Xid (PCI:0000:c6:00): 79, pid=4711, GPU has fallen off the bus.")
            raise RuntimeError("CUDA error: unknown error")
        time.sleep(0 if os.environ.get("HPC_MP_RESUME") else 60)
        """)
    done, found = run(lab, here, command)
    end = history(found)[0]
    assert done.returncode == 0 and (end.kind, end.nodes, end.rank) == ("hardware", ("n2",), 2), f"{end}\n{logs_of(found)}"
    assert "n2" not in read_json(found.attempt_record)["hosts"]


def test_a_node_whose_ranks_eat_all_memory_is_named() -> None:
    """Without accounting Slurm does not say which of its ranks it was."""
    with Lab(2, overrides={"JobAcctGatherParams": "OverMemoryKill", "KillWait": "2"}) as lab:
        here = lab.share / "job"
        here.mkdir()
        command = program(here, "print('begins')\nx = [os.urandom(2**26) for _ in range(48 * (rank == 3))]\ntime.sleep(30)")
        _, found = run(lab, here, command, "--set", "slurm.extra.mem=2000")
        check_cause(found, "memory", "node n2 (ranks 2, 3) ran out of memory", node="n2")
        assert found.attempt() == 1


def test_a_program_that_is_not_there(lab: Lab, here: Path) -> None:
    done, found = run(lab, here, ["/no/such-program"])
    assert done.returncode == 2 and "program.command[0] = '/no/such-program': does not exist" in done.stderr, done.stderr
    assert found.attempt() == 1


RESUMES = """
done = 0
if os.environ.get("HPC_MP_RESUME"):
    done = int(open(f"saved-{rank}").read())
for step in range(done, 20):
    time.sleep(0.3)
    open(f"new-{rank}", "w").write(str(step + 1))
    os.replace(f"new-{rank}", f"saved-{rank}")
    print("step", step + 1, "attempt", os.environ["HPC_MP_ATTEMPT"])
"""


def test_a_dead_node_is_left_out_and_the_program_goes_on(lab: Lab, here: Path) -> None:
    found = submitted(lab, here, program(here, RESUMES))
    saved = here / "saved-3"
    until(lambda: saved.exists() and int(saved.read_text()) >= 3, "some steps", 120)
    victim = read_json(found.attempt_record)["hosts"][1]
    lab.kill(victim)
    assert until_ended(found).state == "completed", logs_of(found)
    assert [(here / f"saved-{rank}").read_text() for rank in range(4)] == ["20"] * 4
    ends = history(found)
    assert found.attempt() == 2 and ends[0].kind in ("node", "vanished") and victim in ends[0].message
    assert victim not in read_json(found.attempt_record)["hosts"]
    lab.boot(victim)


# (what ranks do of SIGTERM, what they have saved then, words of the cause where they do not resume)
LIMITS = {
    "saves": ("lambda *_: (open(f'saved-{rank}', 'a').write('saved '), sys.exit(143))", ["saved "] * 4, "job.time_limit"),
    "goes on": ("signal.SIG_IGN", [], "its ranks kept running after SIGTERM"),
}


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("name", LIMITS)
def test_the_time_limit(lab: Lab, here: Path, name: str, resumes: bool) -> None:
    """A program that resumes is queued again, another has failed of the limit."""
    handler, saved, words = LIMITS[name]
    command = program(here, f"""
        signal.signal(signal.SIGTERM, {handler})
        print("begins")
        if not os.environ.get("HPC_MP_RESUME"):
            time.sleep(600)
        """)
    found = submitted(lab, here, command, "--set", "job.time_limit=1", "--set", f"program.resumes={str(resumes).lower()}")
    end = until_ended(found)
    assert [path.read_text() for path in here.glob("saved-*")] == saved, logs_of(found)
    assert (end.state, found.attempt()) == (("completed", 2) if resumes else ("failed", 1)), logs_of(found)
    assert resumes or (end.cause is not None and words in end.cause.message), end


SAVES = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
done = int(open(f"saved-{rank}").read()) if os.path.exists(f"saved-{rank}") else 0
while done < 80:
    time.sleep(0.2)
    done += 1
    print("step", done, flush=True)
    open(f"steps-{rank}", "a").write(f"{done}\\n")
    if asked or done % 5 == 0 or done == 80:
        open(f"new-{rank}", "w").write(str(done))
        os.replace(f"new-{rank}", f"saved-{rank}")
    if asked:
        time.sleep(4 * rank % 5)
        sys.exit(0)
"""


CONTROLLER = "a restart of the controller"
# (what is done to the job, kind of the first end, whether the ranks have saved by then)
ASKED: dict[str, tuple[str, str, bool]] = table(__file__, "program_slurm.toml", "asked")


@pytest.mark.timeout(1200)
def test_whatever_asks_a_job_to_go_loses_nothing() -> None:
    """Several jobs at the same time, each on two hosts of its own; that whose controller goes is the last one."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    settings = {"KillWait": "8", "SlurmdTimeout": "60", "MessageTimeout": "30", "BatchStartTimeout": "60"}
    with Lab(12, overrides=settings, patience=60) as lab:
        with ThreadPoolExecutor(5) as pool:
            ends = {name: pool.submit(see_to_its_end, lab, name) for name in ASKED if name != CONTROLLER}
        wrong = {name: error for name, end in ends.items() if (error := end.exception()) is not None}
        assert not wrong, "\n\n".join(f"== {name}: {error}" for name, error in wrong.items())
        see_to_its_end(lab, CONTROLLER)


def see_to_its_end(lab: Lab, name: str) -> None:
    does, kind, saves = ASKED[name]
    here = lab.share / name.replace(" ", "-")
    here.mkdir()
    last = 300 if "limit" in name else 80
    silence = ("--set", "program.silent_limit=20") if name == "suspension" else ()
    found = submitted(lab, here, program(here, SAVES.replace("80", f"{last}")), "--set", "program.resumes=true", *silence)
    until(lambda: all((here / f"saved-{rank}").exists() for rank in range(4)), "some steps", 200)
    job_id = next(found.path.glob("slurm-*.log")).stem.partition("-")[2]
    first, host = read_json(found.attempt_record)["hosts"]
    words = ["bash", "-c", re.sub(r"\bJOB\b", job_id, does).replace("HOST", host)]
    asked = lab.at(first, words) if does.startswith("kill") else lab.run(words, timeout=200)
    assert asked.returncode == 0, asked.stderr
    if name == CONTROLLER:
        lab.popen(["slurmctld", "-D"])
    state, ends = until_ended(found, 300).state, history(found)
    assert state == "completed", f"{ends}\n{logs_of(found)}"
    assert ends[0].kind == kind and len(ends) == 1 + (kind != "completed"), f"{ends}\n{logs_of(found)}"
    named = any(node in ends[0].message for node in (first, host)) or ends[0].rank is not None
    assert named or kind in ("completed", "stopped"), ends
    for rank in range(4):
        steps = [int(line) for line in (here / f"steps-{rank}").read_text().split()]
        assert sorted(set(steps)) == list(range(1, last + 1)), f"{rank}: {steps}\n{logs_of(found)}"
        assert len(steps) == last or not saves, f"{rank}: {steps}\n{logs_of(found)}"


def test_cancel_reaches_the_program_as_sigterm(lab: Lab, here: Path) -> None:
    command = program(here, """
        signal.signal(signal.SIGTERM, lambda *_: (open(f"saved-{rank}", "w").close(), sys.exit(0)))
        open(f"ready-{rank}", "w").close()
        time.sleep(600)
        """)
    found = submitted(lab, here, command)
    until(lambda: len(list(here.glob("ready-*"))) == 4, "the ranks", 120)
    done = hpc_mp(lab, here, "cancel", found.path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert until_ended(found, 60).state == "stopped", "though every rank ended with 0"
    assert len(list(here.glob("saved-*"))) == 4 and found.attempt() == 1, logs_of(found)


@pytest.mark.parametrize("fails", [False, True])
def test_torchrun_on_every_node(lab: Lab, here: Path, fails: bool) -> None:
    command = program(here, f"""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        open(f"said-{{rank}}", "w").write(f"{{os.environ['WORLD_SIZE']}} {{os.environ['LOCAL_RANK']}} {{total.item()}}")
        if {fails} and rank == 3:
            raise ValueError("boom")
        dist.destroy_process_group()
        """)
    start = [command[0], "-m", "torch.distributed.run", *MEET.split(), command[1]]
    done, found = run(lab, here, start, "--set", "program.start=node", *GLOO)
    assert [(here / f"said-{rank}").read_text() for rank in range(4)] == ["4 0 6.0", "4 1 6.0"] * 2, done.stderr + logs_of(found)
    if fails:
        said = "node n2 failed: ValueError: boom (program.py:10), reported by its rank 3"
        check_cause(found, "error", rank=3, node="n2", message=said)
    else:
        assert done.returncode == 0 and ended(found).cause is None, done.stderr


def test_inside_an_allocation_its_sizes_are_taken(lab: Lab, here: Path) -> None:
    command = program(here, "open(f'said-{rank}', 'w').write(os.environ['WORLD_SIZE'] + ' ' + os.environ['LOCAL_WORLD_SIZE'])")
    words = [sys.executable, "-m", "hpc_mp", "run", "--set", "environment.health=false", "--", *command]
    done = lab.run(["salloc", "--nodes=2", "--ntasks-per-node=2", *words], timeout=200, cwd=here,
                   environ={"XDG_STATE_HOME": str(here / "state")})
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "2 nodes of the allocation, as many ranks as it has tasks" in said, said
    assert [(here / f"said-{rank}").read_text() for rank in range(4)] == ["4 2"] * 4
    assert len(read_lines(newest(here).ranks)) == 4
