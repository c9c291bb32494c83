"""Checkpoints that are written while training goes on: the state is that of their step, and nothing is lost by an early end."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exact import Engine
from layouts import job, relaunch, run_whole, start
from planting import planted, wrapped
from ranks import exit_codes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import RunDirectory, newest_complete, read_lines
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.train.checkpoint import background, checkpoint

DP2Z3 = ["job.ranks_per_node=2", "parallel.zero=3", "parallel.microbatches=2"]
EVERY = [*DP2Z3, "checkpoint.every=2", "checkpoint.keep=9", "train.steps=6"]
BEHIND = [*EVERY, "checkpoint.background=true"]


def files_of(run: RunDirectory, step: int) -> dict[str, bytes]:
    """The files of a checkpoint by name."""
    return {path.name: path.read_bytes() for path in (run.checkpoints / f"step-{step:08d}").iterdir()}


def slow_writer(run: RunDirectory, lines: int) -> Callable[[], None]:
    """Rank 1 writes its part of the first checkpoint only when so many steps are done."""
    calls: list[Path] = []

    @planted(checkpoint, "write_shard")
    def late(written: Any, path: Path, parts: Any) -> Any:
        calls.append(path)
        while os.environ["SLURM_PROCID"] == "1" and len(calls) == 1 and len(read_lines(run.metrics)) < lines:
            time.sleep(0.01)
        return written(path, parts)

    return late


def test_it_is_the_state_of_its_step_although_training_goes_on(place: Path, engine: Engine) -> None:
    """Step 3 is over before rank 1 begins to write the state of step 2. The same files as those of a run that waits."""
    run, waiting = start(job(place, "gpt2", BEHIND)), start(job(place, "gpt2", EVERY))
    result = run_whole(job(place, "gpt2", BEHIND), slow_writer(run, 3), run)
    run_whole(job(place, "gpt2", EVERY), run=waiting)
    assert result.losses == engine("gpt2", *DP2Z3, "train.steps=6").losses
    steps = [2, 4, 6]
    assert [path.name for path in complete_steps(run.checkpoints)] == [f"step-{step:08d}" for step in steps]
    assert all(files_of(run, step) == files_of(waiting, step) for step in steps)
    assert run.main_log.read_text().count("training waited for ") == 2, "the last one is written at once"
    assert not list(run.checkpoints.glob(".*"))


def test_without_the_copy_it_would_be_that_of_a_later_step(place: Path) -> None:
    """The control of the test above."""
    run, waiting = start(job(place, "gpt2", BEHIND)), start(job(place, "gpt2", EVERY))
    uncopied = wrapped(background.Snapshot, "copied", lambda copied: lambda self, parts: (list(parts), []))
    late = slow_writer(run, 3)
    run_whole(job(place, "gpt2", BEHIND), lambda: (uncopied(), late())[0], run)
    run_whole(job(place, "gpt2", EVERY), run=waiting)
    assert files_of(run, 2)["shard-00002-model.safetensors"] != files_of(waiting, 2)["shard-00002-model.safetensors"]


def test_a_rank_killed_while_it_writes_loses_no_earlier_checkpoint(place: Path, engine: Engine) -> None:
    run = start(job(place, "gpt2", BEHIND))
    calls: list[Path] = []

    @planted(checkpoint, "write_shard")
    def killed(written: Any, path: Path, parts: Any) -> Any:
        calls.append(path)
        if os.environ["SLURM_PROCID"] == "1" and len(calls) == 2:
            path.write_bytes(b"half of a")
            os.kill(os.getpid(), signal.SIGKILL)
        return written(path, parts)

    with pytest.raises(RuntimeError, match="died"):
        exit_codes(2, run.job, killed)
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None and newest.name == "step-00000002"
    resumed = relaunch(run, place, "gpt2", BEHIND)
    assert resumed.losses == engine("gpt2", *DP2Z3, "train.steps=6").losses
    assert [path.name for path in complete_steps(run.checkpoints)][-1] == "step-00000006"


def test_a_write_that_fails_costs_its_checkpoint_alone(place: Path) -> None:
    run = start(job(place, "gpt2", BEHIND))
    calls: list[Path] = []

    @planted(checkpoint, "write_shard")
    def full(written: Any, path: Path, parts: Any) -> Any:
        calls.append(path)
        if os.environ["SLURM_PROCID"] == "1" and len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, parts)

    run_whole(job(place, "gpt2", BEHIND), full, run)
    assert "checkpoint of step 2 FAILED: rank 1: OSError: [Errno 28] No space left on device" in run.main_log.read_text()
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000004", "step-00000006"]
    assert not list(run.checkpoints.glob(".*"))


def test_a_stop_while_it_is_written_completes_it(place: Path) -> None:
    """And the checkpoint of the step after which ranks stop."""
    run = start(job(place, "gpt2", [*BEHIND, "train.steps=100000", "checkpoint.every=2"]))
    late = slow_writer(run, 4)

    def when_written() -> None:
        while len(read_lines(run.metrics)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def watched() -> None:
        late()
        if os.environ["SLURM_PROCID"] == "0":
            threading.Thread(target=when_written, daemon=True).start()

    assert exit_codes(2, run.job, watched) == [75] * 2
    last = len(read_lines(run.metrics))
    names = [path.name for path in complete_steps(run.checkpoints)]
    assert names[0] == "step-00000002" and names[-1] == f"step-{last:08d}" and not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize(("keys", "words"), [
    (['parallel.offload=["optimizer"]', 'parallel.offload_directory="/scratch"'], "would copy the optimizer state"),
    (["checkpoint.every=0"], "has no effect on the last checkpoint")])
def test_what_it_cannot_do_is_refused(place: Path, keys: list[str], words: str) -> None:
    with pytest.raises(HpcMpError, match=rf"checkpoint\.background = true: {words}"):
        job(place, "gpt2", [*BEHIND, *keys])
