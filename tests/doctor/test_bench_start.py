"""How the ranks of a measurement are started: forked and by srun; and what happens when they fail."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from slurm_jobs import until
from warm import warm_zygotes

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.slurm.nodes import address_of
from hpc_mp.doctor.bench.plan import split
from hpc_mp.doctor.bench.spec import MARK, BenchSpec, Event, events
from hpc_mp.doctor.bench.start import follow, on_emulated_nodes, on_slurm


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_zygotes(monkeypatch)


def spec_of(name: str = "all_reduce", nodes: int = 2, here: int = 1, backend: str = "gloo", **more: Any) -> BenchSpec:
    return BenchSpec(name, backend, nodes, here, split(nodes * here, here, "all"), (4096, 65536), iterations=2,  # type: ignore
                     warmup=1, timeout=60, **more)


def entry(name: str) -> Iterator[Event]:
    return on_emulated_nodes(spec_of(), os.environ, f"bench_entries:{name}")


def test_forked_ranks_measure_and_leave_nothing() -> None:
    spec, watcher = spec_of("all_gather", here=2), Mock()
    done = follow(spec, on_emulated_nodes(spec, os.environ), watcher)
    assert [rank["host"] for rank in done.ranks] == ["node0", "node0", "node1", "node1"]
    assert watcher.begins.call_args_list == [call(4096), call(65536)]
    assert [row.wrong for row in done.rows] == [0, 0] and "torch" in done.versions
    pids = [rank["pid"] for rank in done.ranks]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_fails_is_named_with_its_words() -> None:
    with pytest.raises(RunFailed, match=r"(?s)rank 1 .*the card fell off the bus"):
        list(entry("crash"))


def test_ranks_end_with_whoever_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hpc_mp.doctor.bench.start._follow_emulator", lambda emulator, logs: iter([{"event": "note"}]))
    said = entry("hang")
    next(said)
    until(lambda: len(list(tmp_path.glob("*/lives-*"))) == 2, "both ranks live")
    pids = [path.name.removeprefix("lives-") for path in tmp_path.glob("*/lives-*")]
    assert all(Path("/proc", pid).exists() for pid in pids)
    said.close()  # type: ignore[attr-defined]
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "the kernel has ended them")
    assert not list(tmp_path.iterdir())


def test_ranks_without_a_gpu_refuse_nccl() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(HpcMpError, match=r"needs a GPU per rank: torch .* sees 0 on node\d"):
        list(on_emulated_nodes(spec_of(backend="nccl"), os.environ))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_nccl_on_one_gpu(name: str) -> None:
    """Alone a rank has nobody to send to: busbw is 0 but for a broadcast, the data have to be right all the same."""
    spec = BenchSpec(name, "nccl", 1, 1, ((0,),), (2**20, 2**24), timeout=60)
    done = follow(spec, on_emulated_nodes(spec, os.environ), Mock())
    assert [row.wrong for row in done.rows] == [0, 0] and "nccl" in done.versions and "NVIDIA" in done.ranks[0]["name"]
    assert all(row.worst.timings["in_place"].seconds > 0 for row in done.rows)


def fake(folder: Path, text: str) -> dict[str, str]:
    (folder / "srun").write_text(text)
    (folder / "srun").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_what_a_rank_refuses_is_the_users_to_mend(tmp_path: Path) -> None:
    line = MARK + '{"event": "refused", "value": "--backend nccl", "rule": "needs a GPU", "remedy": "choose gloo"}'
    with pytest.raises(HpcMpError, match=r"--backend nccl: needs a GPU\. Choose gloo"):
        list(on_slurm(spec_of(), [], fake(tmp_path, f"#!/bin/sh\necho '{line}'\nexit 2\n")))


def test_what_srun_says_last_is_told_when_it_fails(tmp_path: Path) -> None:
    queued = "srun: job 7 queued and waiting for resources"
    environ = fake(tmp_path, f"#!/bin/sh\necho '{queued}' >&2\necho 'srun: error: invalid partition' >&2\nexit 1\n")
    watcher = Mock()
    with pytest.raises(RunFailed, match=r"(?s)srun ended with exit code 1.*invalid partition"):
        follow(spec_of(), on_slurm(spec_of(), [], environ), watcher)
    assert watcher.note.call_args_list == [call(queued)]
    with pytest.raises(RunFailed, match="cannot be started"):
        list(on_slurm(spec_of(), [], {"PATH": ""}))


def test_ranks_without_a_word_or_on_other_nodes_are_no_success(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="before all sizes"):
        follow(spec_of(), on_slurm(spec_of(), [], fake(tmp_path, "#!/bin/sh\nexit 0\n")), Mock())
    ranks = [{"rank": rank, "host": host} for rank, host in enumerate(["n1", "n2", "n1", "n2"])]
    with pytest.raises(RunFailed, match="ranks 0 to 1 should share a node and run on n1, n2"):
        follow(spec_of(here=2), [{"event": "ranks", "ranks": ranks, "versions": {}}], Mock())


def test_a_node_is_called_by_a_name_that_can_be_resolved() -> None:
    assert address_of("localhost") == "localhost"
    assert address_of("nobody.invalid", lambda argv: "NodeName=nobody NodeAddr=10.1.2.3 State=IDLE") == "10.1.2.3"
    assert address_of("nobody.invalid", Mock(side_effect=CommandFailed("scontrol is not on PATH"))) == "nobody.invalid"


def test_events_are_found_among_other_lines() -> None:
    assert list(events(["NCCL INFO Bootstrap", f"0: {MARK}" + '{"event":"end"}', "", "Killed"])) == [{"event": "end"}]
