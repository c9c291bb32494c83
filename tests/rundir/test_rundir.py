"""The run directory: numbering, records, line files on full disks, manifests, the plan, and which checkpoints stay."""

import json
import math
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grimp
import pytest
from tables import table

from hpc_mp import rundir
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.rundir import LineFile, RunDirectory, create_run, find_run, problem, read_lines, write_json, write_manifest
from hpc_mp.rundir.checkpoint_index import INDEX, CheckpointIndex, HashedFile, StoredPart, StoredTensor, block_hash, document_of
from hpc_mp.rundir.checkpoints import checkpoint_name, sha256
from hpc_mp.rundir.outcome import figures
from hpc_mp.rundir.plan import ChunkCounts, RunPlan, StateBytes, Traffic, read_plan, write_plan
from hpc_mp.rundir.records import Evaluation, line_of
from hpc_mp.rundir.retention import best_checkpoint, best_evaluation, prune


def test_runs_are_numbered_private_and_found(tmp_path: Path) -> None:
    runs = [create_run(tmp_path, "name") for _ in range(3)]
    assert [run.path.name for run in runs] == ["0001", "0002", "0003"]
    for run in runs[:2]:
        run.job.write_text("")
        run.placement.write_text("{}")
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert find_run(tmp_path / "name").path == runs[1].path, "the newest that holds a job"
    assert find_run(runs[0].path).path == runs[0].path
    (tmp_path / "job.toml").write_text("")
    for stranger, rule in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "is not a run directory")):
        with pytest.raises(HpcMpError, match=rule):
            find_run(stranger)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcMpError, match=r"job\.directory = .*file"):
        create_run(tmp_path / "file", "name")


def test_a_resume_puts_the_old_attempt_away(tmp_path: Path) -> None:
    run = create_run(tmp_path, "name")
    run.job.write_text("one")
    write_plan(run, PLAN)
    assert run.attempt() == 1
    assert rundir.prepare_resume(run) == run.attempt() == 2
    assert run.of_attempt(1).job.read_text() == "one" and read_plan(run.of_attempt(1)) == PLAN


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o755, 0o644)])
def test_files_are_as_private_as_their_directory(tmp_path: Path, directory: int, file: int) -> None:
    tmp_path.chmod(directory)
    write_json(tmp_path / "a.json", {})
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == file


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    rundir.cut_metrics(path, 3)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert path.read_text().count("\n") == 3


def test_a_document_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """/dev/full refuses every write with ENOSPC."""
    file = LineFile(Path("/dev/full"), limit=3)
    for number in range(5):
        file.write(str(number))
    assert not file.flush() and list(file.waiting) == [b"2\n", b"3\n", b"4\n"] and file.dropped == 2
    file.close()
    file.path = tmp_path / "log"  # the disk has room again
    assert file.flush() and file.path.read_text() == "2\n3\n4\n"
    file.close()


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    """A file that may not grow beyond 10 bytes takes the first line and no part of the second."""
    path = tmp_path / "log"
    pid = os.fork()
    if pid == 0:
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        file = LineFile(path)
        file.write("1234567")
        file.write("89abcde")
        os._exit(len(file.waiting))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "the second line waits"
    assert path.read_text() == "1234567\n"


def test_threads_that_publish_one_document_at_once_leave_it_whole(tmp_path: Path) -> None:
    """A rank's watchdog and its main thread may both write down how it ends, and the process is gone in the middle of it."""
    path = tmp_path / "a.json"
    documents = [{"text": letter * 100_000} for letter in "abcd"]

    def publish(document: dict[str, str]) -> None:
        for _ in range(20):
            write_json(path, document)
            assert json.loads(path.read_text()) in documents

    with ThreadPoolExecutor(len(documents)) as pool:
        list(pool.map(publish, documents))
    assert list(tmp_path.iterdir()) == [path]


def checkpoint(base: Path, step: int, content: bytes = b"content") -> Path:
    directory = base / checkpoint_name(step)
    directory.mkdir(parents=True)
    file = directory / "shard-00001-model.safetensors"
    file.write_bytes(content)
    index = directory / INDEX.format(stage=0)
    shard = HashedFile(len(content), (block_hash(content),))
    part = StoredPart(file.name, 0, (0,), (len(content),))
    write_json(index, document_of(CheckpointIndex({file.name: shard}, {"w": StoredTensor("F32", (len(content),), (part,))})))
    write_manifest(directory, rundir.Manifest(step, {index.name: (index.stat().st_size, sha256(index))}))
    return directory


def test_every_changed_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 1)
    assert problem(directory) is None
    for path in directory.iterdir():
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1:])
            assert path.name in (problem(directory) or ""), position
            path.write_bytes(whole[:position])
            assert path.name in (problem(directory) or ""), position
        path.write_bytes(whole)
    assert problem(directory) is None


def test_a_file_that_does_not_belong_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 1)
    (directory / "shard-00009-model.safetensors").write_bytes(b"stranger")
    assert problem(directory) == "shard-00009-model.safetensors does not belong to it"


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        checkpoint(tmp_path, step)
    (tmp_path / checkpoint_name(200)).mkdir()
    (tmp_path / ".step-00000300").mkdir()
    (tmp_path / "step-300").mkdir()  # of somebody's program, which saves in the same place
    path, skipped = rundir.newest_complete(tmp_path)
    assert path is not None and path.name == "step-00000100"
    assert [(bad.name, reason) for bad, reason in skipped] == [
        ("step-00000200", "complete.json is missing (the save was not finished)")]


# --- the plan --------------------------------------------------------------------------------------------------------


PLAN = RunPlan((3, 2), Traffic(1.5, 2.0, 3.0, 4.0, 5.0, shards=2), (StateBytes(1, 2, 3),) * 4, 0.25,
               (ResolvedKey("parallel.order", "DPT", "one node"),), (ChunkCounts(4, 3, 2), ChunkCounts(1, 1, 0)), "slurm")


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = create_run(tmp_path, "a")
    assert read_plan(run) is None
    write_plan(run, PLAN)
    assert read_plan(run) == PLAN
    assert PLAN.traffic.total == 15.5 and PLAN.traffic.data == 7.0 and PLAN.state[0].total == 6


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layers": 3}', "null"])
def test_a_broken_plan_is_none(tmp_path: Path, text: str) -> None:
    run = create_run(tmp_path, "a")
    run.plan.write_text(text)
    assert read_plan(run) is None


def test_the_supervisor_derives_no_layers() -> None:
    """It reads the plan: by no way of imports does it reach what reads a model or cuts it into stages."""
    graph = grimp.build_graph("hpc_mp", cache_dir=None)

    def reached(module: str) -> list[str]:
        return [target for target in ("hpc_mp.layout.models.shape", "hpc_mp.layout.schedule.partition", "hpc_mp.planner.traffic",
                                      "hpc_mp.planner.memory")
                if graph.find_shortest_chain(module, target) is not None]

    assert reached("hpc_mp.supervisor.prepare") == []
    assert "hpc_mp.layout.schedule.partition" in reached("hpc_mp.launch.plan"), "the control: who plans does"


# --- which checkpoints stay ------------------------------------------------------------------------------------------


def saved(path: Path, steps: range, *evaluations: tuple[int, float, int]) -> RunDirectory:
    run = RunDirectory(path)
    for step in steps:
        (run.checkpoints / checkpoint_name(step)).mkdir(parents=True)
    (run.checkpoints / ".step-00000099.token").mkdir()
    run.evaluations.write_text("".join(line_of(Evaluation(step, loss, labels, 1.0)) + "\n" for step, loss, labels in evaluations))
    return run


def left(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def names(*steps: int) -> list[str]:
    return [checkpoint_name(step) for step in steps]


@pytest.mark.parametrize(("evaluations", "best", "kept"), table(__file__, "rundir.toml", "best"))
def test_the_newest_and_the_best_stay(tmp_path: Path, evaluations: list[tuple[int, float, int]], best: int | None,
                                      kept: list[int]) -> None:
    run = saved(tmp_path, range(1, 6), *evaluations)
    prune(run, keep=2)
    assert left(run) == names(*kept)
    found = best_checkpoint(run)
    assert (found.evaluation.step if found else None) == best
    assert figures(run, 1)["best_checkpoint"] == (run.checkpoint(best) if best else None)


def test_the_best_evaluation_may_have_no_checkpoint(tmp_path: Path) -> None:
    run = saved(tmp_path, range(2, 4), (1, 1.0, 9), (2, 3.0, 9), (3, 2.0, 9))
    assert (found := best_checkpoint(run)) is not None and found.evaluation.step == 3
    numbers = figures(run, 1)
    assert (numbers["best_evaluation_loss"], numbers["evaluation_loss"]) == (1.0, 2.0)
    assert best_evaluation([]) is None


def test_the_best_by_accuracy_is_that_of_the_highest(tmp_path: Path) -> None:
    """By the newest evaluation's criterion: one that was made before the key changed counts too."""
    run = saved(tmp_path, range(1, 6))
    made = [Evaluation(step, loss, 9, 1.0, accuracy=accuracy, criterion="accuracy" if step > 1 else "loss")
            for step, loss, accuracy in ((1, 3.0, 0.5), (2, 2.0, 0.75), (3, 2.5, 0.75), (4, 1.0, 0.25), (5, 9.0, math.nan))]
    run.evaluations.write_text("".join(line_of(evaluation) + "\n" for evaluation in made))
    prune(run, keep=1)
    assert left(run) == names(2, 5) and figures(run, 1)["best_evaluation_loss"] == 2.0
    best = best_evaluation(made[:4])
    assert best is not None and (best.words, best.figure) == ("loss 2.0000, accuracy 0.7500, macro F1 nan", "0.7500")
    assert (least := best_evaluation([replace(each, criterion="loss") for each in made])) and least.step == 4


def test_nothing_is_deleted_while_nobody_knows_the_best(tmp_path: Path) -> None:
    run = saved(tmp_path, range(1, 4))
    run.evaluations.unlink()
    run.evaluations.mkdir()  # reading it fails, for root too
    before = left(run)
    prune(run, keep=1)
    assert left(run) == before
