"""Every example on emulated nodes: as it is, and killed and gone on with."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from example_programs import (
    EXAMPLES,
    LAUNCH,
    PATH,
    RANK_1,
    ROOT,
    Example,
    assert_same,
    copy,
    installed,
    local,
    newest,
    replace,
    steps,
)
from slurm_jobs import until

LONG = ("hf-trainer", "torch-ddp")  # to start takes the first long; the second is run as it is by the test on Slurm, too


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.prove] * (name in LONG)) for name in EXAMPLES])
def test_it_runs_as_it_is(tmp_path: Path, name: str) -> None:
    example, where = installed(name), copy(name, tmp_path)
    done = local(where)
    assert done.returncode == 0 and example.summary in done.stdout, done.stdout + done.stderr
    assert "export" not in done.stdout  # which is for checkpoints of our own engine
    assert steps(newest(where)) == list(example.steps)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "told"), [("hf-trainer", "use_cpu=not torch.cuda.is_available()"),
                                            ("accelerate", "cpu=not torch.cuda.is_available()")])
def test_ranks_that_train_alone_would_be_seen(tmp_path: Path, name: str, told: str) -> None:
    """As they do without GPUs where the library is not told that there are none."""
    example, where = installed(name), copy(name, tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    replace(where / example.program, told, "")
    local(where, *one_node(example))
    assert steps(newest(where)) != list(example.steps)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rank_is_killed_and_the_run_is_gone_on_with(tmp_path: Path, name: str) -> None:
    """On one node: with more it runs on Slurm. The control goes on from the same state, with a program that does not load all of
    it, and ends elsewhere. The undisturbed run has no hpc_mp."""
    example, whole = installed(name), copy(name, tmp_path)
    (whole / "hidden").mkdir()
    (whole / "hidden/hpc_mp.py").write_text("raise ImportError('not installed')\n")
    done = local(whole, *one_node(example), "--set", f'program.environment={{ PYTHONPATH = "{whole}/hidden" }}')
    assert done.returncode == 0 and " steps" not in done.stdout, done.stdout + done.stderr
    assert steps(newest(whole)) == list(example.steps)

    disturbed = copy(name, tmp_path, example.seconds)
    launched = subprocess.Popen([*LAUNCH, "--on", "local", *one_node(example)], cwd=disturbed, text=True, stderr=subprocess.PIPE,
                                env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: list(disturbed.glob(f"runs/*/0001/{example.first}")) or launched.poll() is not None, "a checkpoint", 200)
        time.sleep(0.5)
        ranks = [each for each in psutil.Process(launched.pid).children(recursive=True) if example.program in each.cmdline()]
        next(each for each in ranks if RANK_1 & each.environ().items()).send_signal(signal.SIGKILL)
        _, said = launched.communicate(timeout=60)
    finally:
        launched.terminate()
    assert launched.returncode == 1 and "rank 1 on node0 was killed by SIGKILL" in said, said
    killed = shutil.copytree(disturbed, tmp_path / "killed", symlinks=True)

    resume(example, disturbed)
    assert_same(example, newest(whole), newest(disturbed))

    shutil.rmtree(disturbed)
    killed.rename(disturbed)
    replace(disturbed / example.program, *example.forget)
    resume(example, disturbed)
    with pytest.raises(AssertionError):
        assert_same(example, newest(whole), newest(disturbed))


def one_node(example: Example) -> list[str]:
    return ["--set", "job.nodes=1", "--set", f"job.ranks_per_node={example.ranks}"]


def resume(example: Example, disturbed: Path) -> None:
    again = local(disturbed, "--resume", *one_node(example))
    assert again.returncode == 0, again.stderr
    assert steps(newest(disturbed)) == list(example.later)
