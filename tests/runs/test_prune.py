"""``hpc-mp prune``: what is listed, what is removed, and what never is."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launching import held, make_run, record, silent, write_job

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.prune import command
from hpc_mp.cluster.slurm.jobs import FORGOTTEN, UNKNOWN, SlurmJob
from hpc_mp.job import load_job
from hpc_mp.rundir import Manifest, RunDirectory, find_run, write_json, write_manifest
from hpc_mp.rundir.checkpoints import sha256
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.origin import Counters, Origin, counters_document
from hpc_mp.rundir.outcome import Outcome, write_outcome
from hpc_mp.rundir.records import Evaluation, line_of
from hpc_mp.runs.prune import Pruning, going_on, prunable, remove

Maker = Callable[..., RunDirectory]


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """``make(1, 2, 3, name="t", ended=True, resume=PATH)``: a run with complete checkpoints of these steps."""
    spec = load_job(write_job(tmp_path))

    def made(*steps: int, name: str = "t", ended: bool = True, **keys: Any) -> RunDirectory:
        given = {"checkpoint": {"resume"}, "model": {"pretrained"}, "data": {"tokenizer"}}
        sections = {section: getattr(spec, section).model_copy(update={key: str(keys[key]) for key in known if key in keys})
                    for section, known in given.items()}
        if "pretrained" in keys:
            sections["model"] = sections["model"].model_copy(update={"config": None})
        run = make_run(spec.model_copy(update=sections), name=name)
        for step in steps:
            save(run, step)
        if ended:
            write_outcome(Outcome(run.path, "completed"), 1)
        return run

    return made


def save(run: RunDirectory, step: int) -> Path:
    directory = run.checkpoint(step)
    directory.mkdir()
    origin = Origin({}, "adamw", "", f"tokens-of-{run.path.parent.name}", 32, 0)
    write_json(directory / COUNTERS, counters_document(Counters(step, 0, 0, origin)))
    state = directory / COUNTERS
    write_manifest(directory, Manifest(step, {COUNTERS: (state.stat().st_size, sha256(state))}))
    return directory


def pruned(*runs: RunDirectory, keep: int | None = None, whole: bool = False) -> Pruning:
    return prunable(runs, keep, whole, silent)


def names(pruning: Pruning) -> list[str]:
    return [each.path.name for each in pruning.removable]


def why(pruning: Pruning, path: Path) -> str:
    return next(each.why for each in pruning.spared if each.path == path)


def call(*words: Any) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_old_checkpoints_go_but_the_newest_and_the_best(make: Maker) -> None:
    """And a job file that is not understood leaves all."""
    run = make(1, 2, 3, 4, 5)
    run.evaluations.write_text("".join(line_of(Evaluation(step, loss, 9, 1.0)) + "\n" for step, loss in ((2, 1.0), (5, 3.0))))
    (run.checkpoints / ".step-00000006.token").mkdir()
    (run.checkpoints / "damaged-step-00000007").mkdir()
    found = pruned(run)
    assert names(found) == ["step-00000001", "step-00000003", ".step-00000006.token", "damaged-step-00000007"]
    assert found.removable[0].bytes == sum(path.stat().st_size for path in run.checkpoint(1).iterdir()) > 0
    assert names(pruned(run, keep=1)) == ["step-00000001", "step-00000003", "step-00000004", *names(found)[2:]]
    assert len(list(run.checkpoints.iterdir())) == 7, "nothing was touched"
    gone: list[Path] = []
    assert remove(found, lambda each: gone.append(each.path)) == {}
    assert [path.name for path in gone] == names(found)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]
    run.job.write_text("[job\n")
    assert names(pruned(run, keep=1)) == [] and why(pruned(run), run.path) == "its job.toml is not understood"


def test_the_newest_complete_checkpoint_stays_whatever_lies_beside_it(make: Maker) -> None:
    """Those that are not complete do not count among the newest, and nobody but a resume judges them."""
    run = make(1, 2)
    for step in (3, 4):
        run.checkpoint(step).mkdir()
    found = pruned(run, keep=1)
    assert names(found) == ["step-00000001"]
    assert "complete.json is missing" in why(found, run.checkpoint(3))
    remove(found, lambda each: None)
    assert run.checkpoint(2).exists()


# --- live runs -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_held_is_left_alone(make: Maker) -> None:
    run = make(1, 2, 3)
    with held(run):
        for whole in (False, True):
            found = pruned(run, whole=whole)
            assert names(found) == [] and "have it" in why(found, run.path)
    found = pruned(run)
    assert names(found) == ["step-00000001"]
    with held(run):  # somebody resumes it after the list was made
        assert remove(found, lambda each: None) == {run.checkpoint(1): "is still going on, or another launch resumes it"}
    assert run.checkpoint(1).exists()


def test_when_a_run_may_still_go_on(make: Maker) -> None:
    run, job = make(1, ended=False), SlurmJob("7", "PENDING")
    assert going_on(run, [replace(job, state=FORGOTTEN), job]) == "its Slurm job 7 is PENDING", "a successor"
    assert "does not say what became of its job 7" in (going_on(run, [replace(job, state=UNKNOWN)]) or "")
    assert "written to just now" in (going_on(run, []) or "") or "ago" in (going_on(run, []) or "")
    old = time.time() - 7200
    for path in (run.path, *run.path.iterdir()):
        os.utime(path, (old, old))
    assert going_on(run, []) is None and going_on(run, [replace(job, state=FORGOTTEN)]) is None
    run.metrics.write_text(record(1) + "\n")  # ranks started by hand hold no lock
    assert going_on(run, []) is not None
    write_outcome(Outcome(run.path, "failed"), 1)
    assert going_on(run, [replace(job, state=UNKNOWN)]) is None, "the verdict is there"
    assert going_on(run, [replace(job, state="COMPLETING")]) is not None


def test_a_queued_run_and_the_cache_it_may_read_stay(make: Maker, tmp_path: Path) -> None:
    ended, queued = make(1, 2, 3), make(ended=False)
    queued.job_id.write_text("7\n")
    (ended.cache / "tokens-old").mkdir(parents=True)
    found = pruned(ended, queued, whole=True)
    assert [each.path for each in found.removable] == [ended.path]
    assert "job 7" in why(found, queued.path) and why(found, ended.cache).startswith(f"{queued.path} may read it")


# --- what others refer to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["run", "name"])
def test_a_run_that_another_needs_stays_and_one_that_was_needed_says_so(make: Maker, given: str) -> None:
    first = make(1, 2, name="first")
    second = make(name="second", resume=(first.path if given == "run" else first.path.parent))
    assert why(pruned(first, whole=True), first.path) == f"{second.path} (checkpoint.resume) needs it"
    save(second, 3)
    (each,) = pruned(first, whole=True).removable
    assert each.referrers == (f"{second.path} (checkpoint.resume)",)
    assert f"started from it: {second.path} (checkpoint.resume)" in call(first.path, "--runs").output


def test_chains_of_runs(make: Maker) -> None:
    first = make(1, name="first")
    second = make(name="second", resume=first.path)
    third = make(name="third", resume=second.path)
    assert {each.path for each in pruned(first, second, third, whole=True).removable} == {first.path, second.path, third.path}
    assert {each.path for each in pruned(first, second, whole=True).spared} == {first.path, second.path}


def test_models_and_tokenizers_inside_of_a_run(make: Maker) -> None:
    first = make(1, 2, 3, name="first")
    inside = first.checkpoint(1) / "exported"
    inside.mkdir()
    second = make(4, name="second", tokenizer=inside)
    found = pruned(first)
    assert names(found) == [] and why(found, first.checkpoint(1)) == f"{second.path} (data.tokenizer) needs it"
    make(5, name="third", pretrained=first.path / "model")
    assert why(pruned(first, whole=True), first.path) == f"{second.path} (data.tokenizer) needs it"


# --- caches ----------------------------------------------------------------------------------------------------------


def test_caches_that_no_run_refers_to(make: Maker) -> None:
    run, other = make(1, name="t"), make(1, name="other")
    for name in ("tokens-of-t", "tokens-held-out", "tokens-of-other", "tokens-old", "tokenizer-t",
                 "tokenizer-old", ".tokens-now", ".tokens-then"):
        (run.cache / name).mkdir(parents=True)
    (run.cache / "hashes.json").write_text("{}")
    (run.cache / "environment-1.tar").write_text("x")
    run.tokenizer.write_text(str(run.cache / "tokenizer-t"))
    run.tokens.write_text("tokens-of-t\ntokens-held-out\n")
    os.utime(run.cache / ".tokens-then", (0, 0))
    unused = ["environment-1.tar", "tokenizer-old", "tokens-old", ".tokens-then"]
    assert names(pruned(run)) == unused
    assert sorted(names(pruned(other, whole=True))) == sorted([other.path.name, "tokens-of-other", *unused])
    found = pruned(run, whole=True)
    with held(run):  # the run stays after all, and what it refers to with it
        remove(found, lambda each: None)
    assert (run.cache / "tokenizer-t").exists() and run.path.exists()


# --- the command -----------------------------------------------------------------------------------------------------


def test_only_yes_removes(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(1, 2, 3, 4)
    monkeypatch.chdir(tmp_path)
    listed = call()
    assert listed.exit_code == 0 and "runs/t/0001/checkpoints/step-00000001  (older than the newest 2)" in listed.output
    assert "2 things, " in listed.output and "can be removed: repeat with --yes" in listed.output
    assert run.checkpoint(1).exists()
    document = json.loads(call("--json").stdout)
    assert [each["removed"] for each in document["removable"]] == [False, False] and run.checkpoint(1).exists()
    document = json.loads(call("--json", "--yes").stdout)
    assert [(each["path"], each["removed"]) for each in document["removable"]] == [
        (str(run.checkpoint(1)), True), (str(run.checkpoint(2)), True)]
    assert not run.checkpoint(1).exists() and run.checkpoint(3).exists()
    assert call().output == "nothing to remove\n"


def test_a_directory_of_jobs_means_all_of_their_runs(make: Maker) -> None:
    run, other = make(1, 2, 3), make(1, 2, 3, name="other")
    document = json.loads(call(str(run.path.parent.parent), "--json").stdout)
    assert sorted(each["path"] for each in document["removable"]) == sorted(map(str, (run.checkpoint(1), other.checkpoint(1))))
    missing = call(run.path.parent / "0009")
    assert isinstance(missing.exception, HpcMpError) and missing.exception.rule == "does not exist"
    with pytest.raises(HpcMpError) as caught:
        find_run(run.path.parent.parent)
    assert caught.value.remedy == "pass the directory of one of its jobs: other, t"


def test_whole_runs_are_removed_by_name_alone(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(1), make(2)
    monkeypatch.chdir(tmp_path)
    assert "name the runs, with --runs --yes" in call("--runs").output
    refused = call("--runs", "--yes")
    assert isinstance(refused.exception, HpcMpError) and "which must be named" in str(refused.exception)
    assert call("runs/t", "--runs", "--yes").exit_code == 0
    assert first.path.exists() and not second.path.exists(), "DIRECTORY/NAME is the newest"
    assert call("runs/t/0001", "--runs", "--yes").exit_code == 0 and not (tmp_path / "runs" / "t").exists()
    assert isinstance(call("--runs", "--keep", "3").exception, HpcMpError)
    nowhere = call()
    assert isinstance(nowhere.exception, HpcMpError) and "contains no runs" in str(nowhere.exception)


def test_links_out_of_a_run_are_not_followed(make: Maker, tmp_path: Path) -> None:
    run, outside = make(1), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x" * 10_000)
    (run.path / "link").symlink_to(outside)
    found = pruned(run, whole=True)
    assert found.bytes < 10_000 and remove(found, lambda each: None) == {}
    assert not run.path.exists() and (outside / "file").exists()
