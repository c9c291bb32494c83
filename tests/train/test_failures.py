"""What ranks check of each other, how they record their ends, and how long they wait and write."""

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import job, start
from planting import before_steps, planted
from ranks import exit_codes, run_ranks, train

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import read_json
from hpc_mp.train.rank import main
from hpc_mp.train.rank.devices import check_devices
from hpc_mp.train.rank.failures import Hung, NodeLost, failure_kind
from hpc_mp.train.rank.logs import cap


def test_devices_must_be_whole_and_of_one_model() -> None:
    check_devices([("a", "cpu"), ("b", "cpu")])
    check_devices([("a", "NVIDIA H100")] * 4)
    with pytest.raises(HpcMpError, match="NVIDIA A100 on a, b; NVIDIA H100 on c: are of different models"):
        check_devices([("a", "NVIDIA A100"), ("b", "NVIDIA A100"), ("c", "NVIDIA H100")])
    with pytest.raises(HpcMpError, match=r"MIG 1g\.5gb on a.*MIG slice"):
        check_devices([("a", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")] * 2)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "kind"), [
    (HpcMpError("a", "b", "c"), "user"),
    (MemoryError(), "memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
    (caused(RuntimeError("step failed"), MemoryError()), "memory"),
    (Hung("no step"), "hang"),
    (NodeLost("n1 is silent", ("n1",), silent=True), "lost"),
    (RuntimeError("Connection closed by peer [10.0.0.1]:1234"), "peer"),
    (OSError(errno.ENOSPC, "No space left on device"), "space"),
    (ValueError("boom"), "error")])
def test_kinds_of_failure(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind


def test_a_failure_names_rank_node_and_coordinates(place: Path) -> None:
    spec = job(place, "gpt2", ["job.ranks_per_node=4", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=2"])
    run = start(spec)

    def fault(number: int) -> None:
        if os.environ["SLURM_PROCID"] == "3" and number == 1:
            torch.empty(1 << 60)

    assert exit_codes(4, run.job, before_steps(fault)) == [1] * 4
    record = read_json(run.failure(1, 3))
    assert (record["kind"], record["dp"], record["pp"], record["cp"], record["tp"]) == ("memory", 0, 1, 0, 1)
    assert "rank 3 on node0 (dp 0, pp 1, tp 1) failed: RuntimeError" in run.main_log.read_text()
    assert {read_json(run.failure(1, other))["kind"] for other in range(3)} == {"peer"}


def of_descriptors(number: int) -> None:
    taken = []
    while number == 1:
        taken.append(os.open("/dev/null", os.O_RDONLY))


def of_a_wait(number: int) -> None:
    """A cause that is another one, when no file can be opened any more."""
    with suppress(OSError):
        of_descriptors(number)
    if number == 1:
        raise Hung("no step")


def of_gloo(number: int) -> None:
    if number == 1:
        raise torch.distributed.DistNetworkError("[enforce fail at pair.cc] socket: Too many open files")


@pytest.mark.parametrize(("fault", "kind", "said"), [
    (of_descriptors, "user", "ulimit -Hn = 200): is too small: [Errno 24] Too many open files"),
    (of_gloo, "user", "ulimit -Hn = 200): is too small: [enforce fail at pair.cc] socket: Too many open files"),
    (of_a_wait, "hang", "Hung: no step")])
def test_open_files_that_run_out_do_not_hide_why_a_rank_ends(place: Path, fault: Any, kind: str, said: str) -> None:
    run = start(job(place, "gpt2"))

    def faulty() -> None:
        before_steps(fault)()
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    assert exit_codes(1, run.job, faulty) == [1 + (kind == "user")]
    record = read_json(run.failure(1, 0))
    assert record["kind"] == kind and said in record["message"] and said in run.main_log.read_text()


def test_groups_of_a_step_time_out_as_the_job_says(place: Path) -> None:
    spec = job(place, "gpt2", ["job.ranks_per_node=2", "parallel.pipeline=2", "parallel.microbatches=2", "job.step_timeout=70"])
    run = start(spec)

    seen: list[float] = []

    @planted(main, "build")
    def looked(build: Any, *arguments: Any, **more: Any) -> Any:
        made = build(*arguments, **more)
        for group in (made.ties[0, 1].group, *made.channels.groups.values()):
            seen.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        return made

    def rank() -> tuple[int, list[float]]:
        looked()
        return train(run.job), seen

    assert run_ranks(2, rank) == [(0, [210.0] * 3)] * 2


def test_a_long_log_is_capped_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "node-a.log"
    with open(log, "a") as writer:
        lines = [f"line {number}\n" for number in range(200)]
        writer.writelines(lines)
        writer.flush()
        size = log.stat().st_size
        cap(log, longest=size)
        assert log.stat().st_size == size, "not yet"
        cap(log, longest=size - 1, remainder=100)
        assert log.stat().st_size == 0
        kept = (tmp_path / "node-a.log.1").read_text()
        assert "".join(lines).endswith(kept) and 80 < len(kept) <= 100 and kept.startswith("line ")
        writer.write("more\n")
    assert log.read_text() == "more\n"
    cap(tmp_path / "absent")
