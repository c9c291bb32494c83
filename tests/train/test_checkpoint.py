"""Checkpoints: resume is exact on the same and on other layouts, damage and full disks are survived."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from exact import EXACT, GPT2, LLAMA, Engine, Launched, cases, pairs
from layouts import job, prepare, relaunch, run_whole, start, trained_run, write_text
from planting import planted, wrapped
from ranks import exit_codes
from tables import table

from hpc_mp.job import JobSpec, dump_job
from hpc_mp.rundir import RunDirectory, newest_complete, problem, read_json, read_lines
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.origin import Counters
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.data import Samples
from hpc_mp.train.step.engine import Engine as RankEngine

ONE: list[str] = []
TP2PP2 = ["job.ranks_per_node=4", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3"]
DP4 = ["job.ranks_per_node=4", "parallel.zero=1", "parallel.microbatches=2"]
DP2Z1 = ["job.ranks_per_node=2", "parallel.zero=1", "parallel.microbatches=2"]
DP2Z3 = ["job.ranks_per_node=2", "parallel.zero=3", "parallel.microbatches=2"]
TP2DP2Z2 = ["job.ranks_per_node=4", "parallel.tensor=2", "parallel.zero=2", "parallel.microbatches=2"]
EIGHT = ["job.ranks_per_node=8", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3"]


def copied(run: RunDirectory, directory: Path) -> RunDirectory:
    """A run directory of which others compare, for a test that goes on with it or spoils it."""
    shutil.copytree(run.path, directory / "copy", symlinks=True)
    return RunDirectory(directory / "copy")


SAME = {"1": ONE, "tp2pp2": TP2PP2, "dp2zero3": DP2Z3, "dp2zero1": DP2Z1, "dp4zero1": DP4}


@pairs(SAME, (GPT2, LLAMA), {"1": (LLAMA,), "tp2pp2": (GPT2,), "dp2zero3": (LLAMA,), "dp2zero1": (GPT2,)})
def test_resume_is_bit_for_bit_on_the_same_layout(place: Path, engine: Engine, launched: Launched, model: str, name: str,
                                                  tmp_path: Path) -> None:
    whole = engine(model, *SAME[name], "train.steps=4", "train.dropout=0.1")
    first = launched(model, *SAME[name], "train.steps=2", "train.dropout=0.1")
    resumed = relaunch(copied(first, tmp_path), place, model, [*SAME[name], "train.steps=4", "train.dropout=0.1"])
    assert resumed.losses == whole.losses and resumed.norms == whole.norms
    assert all((resumed.parameters[name] == value).all() for name, value in whole.parameters.items())


TP4Z1 = ["job.ranks_per_node=8", "parallel.tensor=4", "parallel.zero=1", "parallel.sequence=true"]
TP3Z1 = ["job.ranks_per_node=6", "parallel.tensor=3", "parallel.zero=1"]
SHARED_HEADS = "llama with two key-value heads"
OTHER = {"tp2pp2-dp4": (TP2PP2, DP4), "dp4-tp2pp2": (DP4, TP2PP2), "zero3-tp2pp2": (DP2Z3, TP2PP2),
         "zero3-8ranks": (DP2Z3, EIGHT), "tp2zero2-1": (TP2DP2Z2, ONE), "1-tp2zero2": (ONE, TP2DP2Z2),
         "tp4zero1-zero3": (TP4Z1, DP2Z3), "zero3-tp4zero1": (DP2Z3, TP4Z1),
         "tp3zero1-tp4zero1": (TP3Z1, TP4Z1), "tp4zero1-tp3zero1": (TP4Z1, TP3Z1)}
QUICK = {"tp2pp2-dp4": (GPT2,), "dp4-tp2pp2": (LLAMA,), "zero3-tp2pp2": (GPT2,), "1-tp2zero2": (LLAMA,),
         "tp4zero1-zero3": (SHARED_HEADS,), "zero3-tp4zero1": (SHARED_HEADS,),
         "tp3zero1-tp4zero1": (SHARED_HEADS,), "tp4zero1-tp3zero1": (SHARED_HEADS,)}


RESUMED = [*((model, name, 6) for name, models in QUICK.items() for model in models),
           *((model, name, 23) for model in (GPT2, LLAMA) for name in OTHER),
           *((GPT2, name, 103) for name in ("tp2pp2-dp4", "dp4-tp2pp2"))]


@pytest.mark.parametrize(("model", "name", "steps"), cases(RESUMED, [case for case in RESUMED if case[2] == 6]))
def test_resume_on_another_layout_is_exact(place: Path, engine: Engine, launched: Launched, model: str, name: str, steps: int,
                                           tmp_path: Path) -> None:
    """Of one process that never stopped: 3 steps on the one layout and more, up to ``steps``, on the other."""
    before, after = OTHER[name]
    first = launched(model, *before, "train.steps=3")
    resumed = relaunch(copied(first, tmp_path), place, model, [*after, f"train.steps={steps}"])
    assert resumed.distance(engine(model, f"train.steps={steps}")) < EXACT


def test_forgotten_optimizer_state_would_be_seen(place: Path, engine: Engine, launched: Launched, tmp_path: Path) -> None:
    """Negative control of the two tests above: a resume with fresh optimizer state is not exact."""
    whole = engine("gpt2", "train.steps=6")
    run = copied(launched("gpt2", "train.steps=3"), tmp_path)

    @planted(RankEngine, "restored")
    def parameters_only(restored: Any, one: RankEngine, updates: int, *more: object) -> None:
        for slots in one.optimizer.home.arrays().values():
            for tensor in slots.values():
                tensor.zero_()
        restored(one, 0)

    assert relaunch(run, place, "gpt2", ["train.steps=6"], parameters_only).distance(whole) > 1e-6


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


EVERY_SECOND = [*DP2Z3, "checkpoint.every=2"]
HARMS, PATTERNS = (truncate, flip_a_byte, Path.unlink), ("shard-00002-*", "state.json", "complete.json")


@pytest.mark.parametrize(("harm", "pattern"), [
    pytest.param(harm, pattern, marks=() if h == p else pytest.mark.prove)
    for (h, harm), (p, pattern) in product(enumerate(HARMS), enumerate(PATTERNS))])
def test_the_checkpoint_before_a_damaged_one_is_used(place: Path, engine: Engine, launched: Launched, tmp_path: Path,
                                                     harm: Callable[[Path], None], pattern: str) -> None:
    """That every changed byte is found is shown in tests/rundir/test_rundir.py."""
    run = copied(launched("gpt2", *EVERY_SECOND, "train.steps=4"), tmp_path)
    newest = complete_steps(run.checkpoints)[-1]
    assert newest.name == "step-00000004" and problem(newest) is None
    victim = next(newest.glob(pattern))
    harm(victim)
    resumed = relaunch(run, place, "gpt2", [*EVERY_SECOND, "train.steps=6"])
    assert resumed.losses == engine("gpt2", *EVERY_SECOND, "train.steps=6").losses
    assert victim.name in run.main_log.read_text()


@pytest.mark.parametrize(("call", "number"), [
    pytest.param(call, number, marks=pytest.mark.prove if (number == errno.EDQUOT) != (call == "close") else ())
    for call, number in product(("fsync", "close", "write"), (errno.ENOSPC, errno.EDQUOT))])
def test_a_full_disk_fails_one_save_and_nothing_else(place: Path, engine: Engine, call: str, number: int) -> None:
    """The save of step 2 fails on rank 1 only; training goes on, the save of step 3 succeeds."""
    every = [*DP2Z3, "checkpoint.every=1", "checkpoint.keep=3"]
    spec, whole = job(place, "gpt2", every), engine("gpt2", *every)

    failing = [False]

    def fail(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    @planted(checkpoint, "save")
    def counted(save: Any, run: RunDirectory, counters: Counters, *rest: Any) -> Path:
        failing[:] = [counters.step == 2 and os.environ["SLURM_PROCID"] == "1"]
        return save(run, counters, *rest)

    @planted(Path, "open")
    @contextmanager
    def closed(opened: Any, path: Path, *how: Any, **more: Any) -> Iterator[Any]:
        with opened(path, *how, **more) as file:
            yield file
        if failing[0] and path.name.startswith("shard-"):
            fail()

    called = wrapped(os, call, lambda original: lambda *given: fail() if failing[0] else original(*given))
    run = start(spec)
    assert run_whole(spec, lambda: (counted(), closed() if call == "close" else called()), run).losses == whole.losses
    log = run.main_log.read_text()
    assert "checkpoint of step 2 FAILED" in log and os.strerror(number) in log
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000001", "step-00000003"]
    assert not list(run.checkpoints.glob(".*")), "a failed save leaves nothing behind"


def test_a_failed_last_save_fails_the_run(place: Path) -> None:
    @planted(checkpoint, "save")
    def full(save: Any, run: RunDirectory, counters: Counters, *rest: Any) -> Path:
        if counters.step == 3:
            raise checkpoint.SaveFailed("rank 0: OSError: no space left on device", (0,), True)
        return save(run, counters, *rest)

    run = start(job(place, "gpt2", ["checkpoint.every=2"]))
    assert exit_codes(1, run.job, full) == [1]
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000002"]
    assert "the last checkpoint could not be saved" in run.main_log.read_text()


def test_a_signal_to_one_rank_saves_and_stops_all_at_the_same_step(place: Path) -> None:
    run = start(job(place, "gpt2", [*TP2PP2, "train.steps=100000"]))

    def when_training() -> None:
        while len(read_lines(run.metrics)) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    def watched() -> None:
        if os.environ["SLURM_PROCID"] == "2":
            threading.Thread(target=when_training, daemon=True).start()

    assert exit_codes(4, run.job, watched) == [75] * 4
    steps = [line["step"] for line in read_lines(run.metrics)]
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None and newest.name == f"step-{steps[-1]:08d}"
    assert steps == list(range(1, len(steps) + 1))


def test_old_checkpoints_are_deleted_down_to_keep(launched: Launched) -> None:
    run = launched("gpt2", "checkpoint.every=1", "checkpoint.keep=2", "train.steps=4")
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("step", "save"), [(4, 15), pytest.param(30, 200, marks=pytest.mark.prove)])
def test_a_save_may_take_longer_than_a_step(place: Path, step: int, save: int) -> None:
    """One rank's disk is slow: the others wait for it without a step, in a step's groups as in those of all ranks."""
    spec = job(place, GPT2, [*DP2Z1, f"job.step_timeout={step}", "train.steps=2", "checkpoint.every=1"])
    waits = iter([save])

    @planted(checkpoint, "write_shard")
    def late(written: Any, *parts: Any) -> Any:
        if os.environ["SLURM_PROCID"] == "1":
            time.sleep(next(waits, 0))
        return written(*parts)

    assert len(run_whole(spec, before=late).losses) == 2


def test_a_save_that_never_ends_is_noticed(place: Path) -> None:
    run = start(job(place, GPT2, [*DP2Z1, "job.save_timeout=2"]))
    stuck = wrapped(checkpoint, "write_shard", lambda written: lambda *parts: (
        time.sleep(3600) if os.environ["SLURM_PROCID"] == "1" else written(*parts)))
    with pytest.raises(RuntimeError, match="died"):
        exit_codes(2, run.job, stuck)
    failure = next(read_json(path) for path in (run.failure(1, 0), run.failure(1, 1)) if path.exists())
    assert failure["kind"] == "hang" and "the checkpoint was not saved in 2 s; the rank stands in" in failure["message"]


def test_no_file_of_a_checkpoint_is_a_pickle(launched: Launched) -> None:
    newest, _ = newest_complete(launched("gpt2", *TP2PP2).checkpoints)
    assert newest is not None
    assert {path.suffix for path in newest.iterdir()} == {".safetensors", ".json"}


def test_changed_text_is_refused_on_resume(tmp_path: Path) -> None:
    write_text(tmp_path)
    run = trained_run(job(tmp_path, "gpt2"))
    with open(tmp_path / "text.jsonl", "a") as text:
        text.write('{"text": "one more row"}\n')
    run.job.write_text(dump_job(job(tmp_path, "gpt2", ["train.steps=4"])))
    assert exit_codes(1, run.job) == [2]
    assert "are not what this run has trained on" in run.main_log.read_text()


def test_what_a_run_writes_is_private(place: Path) -> None:
    spec = job(place, "gpt2", [*DP2Z3, "checkpoint.every=2"])
    run = start(spec)
    before = set(run.path.rglob("*"))
    run_whole(spec, run=run)
    written = [path for path in run.path.rglob("*") if path not in before]
    assert len(written) > 10
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_a_new_run_starts_from_another_runs_state(place: Path, engine: Engine, launched: Launched) -> None:
    whole = engine("gpt2", "train.steps=6")
    origin = launched("gpt2", "train.steps=3")
    result = run_whole(job(place, "gpt2", [*TP2PP2, "train.steps=6", f'checkpoint.resume="{origin.path}"']))
    assert replace(whole, losses=whole.losses[3:], norms=whole.norms[3:]).distance(result) < EXACT


def trained_samples(run: RunDirectory) -> list[int]:
    """Positions of all samples that the ranks of a run read, as ``noting_positions`` has them written."""
    return sorted(int(word) for path in run.path.glob("positions-*") for word in path.read_text().split())


def noting_positions(run: RunDirectory, spec: JobSpec) -> RunDirectory:
    @planted(Samples, "batch")
    def noted(batch: Any, samples: Samples, positions: Sequence[int]) -> Any:
        positions = list(positions)
        with open(run.path / f"positions-{os.environ['SLURM_PROCID']}", "a") as file:
            file.write(" ".join(map(str, positions)) + "\n")
        return batch(samples, positions)

    run_whole(spec, noted, run)
    return run


def test_a_run_goes_on_with_another_global_batch_where_the_samples_ended(place: Path) -> None:
    """3 steps of 24 samples, then 3 of 16 on two replicas: the positions 0 … 119, each once."""
    spec = job(place, GPT2, ["train.steps=3"])
    first = noting_positions(start(spec), spec)
    larger = [*DP2Z1, "train.global_batch=16", f'checkpoint.resume="{first.path}"']
    spec = job(place, GPT2, [*larger, "train.steps=6"])
    second = noting_positions(start(spec), spec)
    assert trained_samples(first) == list(range(72)) and trained_samples(second) == list(range(72, 120))
    spec = job(place, GPT2, [*larger, "train.steps=7"])
    prepare(spec, second)
    assert trained_samples(noting_positions(second, spec))[48:] == list(range(120, 136)), "its own resume goes on from there too"


REFUSED = table(__file__, "checkpoint.toml", "refused")


@pytest.mark.parametrize("name", REFUSED)
def test_the_state_of_another_model_is_refused(place: Path, launched: Launched, name: str) -> None:
    """By the ranks; the same words at launch are for tests/launch/test_launch_plan.py."""
    override, words = REFUSED[name]
    origin = launched(GPT2, "train.steps=2")
    more = [] if name == "no step more" else ["train.steps=3"]
    run = start(job(place, GPT2, [*more, override, f'checkpoint.resume="{origin.path}"']))
    assert exit_codes(1, run.job) == [2]
    failure = read_json(run.failure(1, 0))
    assert failure["kind"] == "user" and words in failure["message"]


def test_another_text_begins_with_its_first_sample(tmp_path: Path) -> None:
    write_text(tmp_path)
    first = trained_run(job(tmp_path, GPT2, ["train.steps=2"]))
    tokenizer = first.tokenizer.read_text()
    (tmp_path / "text.jsonl").write_text((tmp_path / "text.jsonl").read_text() * 2)
    spec = job(tmp_path, GPT2, ["train.steps=3", f'data.tokenizer="{tokenizer}"', f'checkpoint.resume="{first.path}"'])
    second = noting_positions(start(spec), spec)
    assert trained_samples(second) == list(range(24))
    assert "samples begin anew" in second.main_log.read_text()
