"""What ``hpc-mp bench`` decides from what the user says and what is here, and what the command prints and returns."""

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from nccl_tests_output import HEADER, parse
from warm import warm_zygotes

import hpc_mp.doctor.bench.plan as planning
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.bench import command
from hpc_mp.cluster.node.nvidia_smi import Gpu
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.cluster.slurm.limits import JobTerms
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.cluster.slurm.site import SlurmSite
from hpc_mp.doctor.bench.plan import BenchLayout, BenchPlan, BenchRequest, plan
from hpc_mp.doctor.bench.start import on_emulated_nodes

LOCAL, STEP, SLURM = (Where(place, "") for place in ("local", "step", "slurm"))  # type: ignore[arg-type]
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3",
              "SLURM_JOB_CPUS_PER_NODE": "32(x2),16", "SLURM_GPUS_ON_NODE": "4",
              "SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "9", "SRUN_CPUS_PER_TASK": "3"}
KIND = NodeKind(("g1", "g2", "g3"), 96, 2**40, (("h100", 8),))
SITE = SlurmSite((23, 11), (), SlurmPartition("gpu", True, True, None, (KIND,)), KIND, 96, (), JobTerms())


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_zygotes(monkeypatch)


def chosen(wish: BenchRequest, where: Where = LOCAL, environ: Mapping[str, str] | None = None, gpus: int = 0,
           site: SlurmSite | str = SITE) -> BenchPlan:
    found = [Gpu(index, "NVIDIA H100", None) for index in range(gpus)]
    return plan(wish, where, environ or {}, gpus=lambda: found, site=lambda environ: site)


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(planning, "on_slurm", lambda spec, options, environ, ask: calls.append((options, environ)) or iter(()))
    return calls


def test_on_this_machine_gpus_decide() -> None:
    alone, eight = chosen(BenchRequest("all_reduce")).spec, chosen(BenchRequest("all_reduce"), gpus=8).spec
    assert (alone.backend, alone.world, alone.sizes[0], alone.sizes[-1]) == ("gloo", 2, 1024, 2**24)
    assert (eight.backend, eight.world, eight.sizes[0], eight.sizes[-1]) == ("nccl", 8, 2**20, 2**30)
    assert chosen(BenchRequest("all_reduce", ranks_per_node=9), gpus=8).spec.backend == "gloo"
    assert chosen(BenchRequest("all_reduce", "nccl", ranks_per_node=2), gpus=0).spec.backend == "nccl", "the ranks will refuse it"
    assert (alone.warmup, alone.iterations) == (5, 20)


def test_in_an_allocation_all_of_it_is_measured(srun: list[Any]) -> None:
    made = chosen(BenchRequest("all_gather", split="rail"), STEP, ALLOCATION)
    assert (made.spec.backend, made.spec.nodes, made.spec.ranks_per_node) == ("nccl", 3, 4)
    assert made.spec.groups == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))
    made.start()
    ((options, environ),) = srun
    assert options == ["--cpus-per-task=4", "--mpi=none"], "the least of the nodes' CPUs, shared out"
    assert environ["SLURM_JOB_ID"] == "7" and environ["SLURM_OVERLAP"] == "1" and "SLURM_NTASKS" not in environ


def test_outside_it_is_a_job_of_its_own(srun: list[Any]) -> None:
    made = chosen(BenchRequest("all_reduce", srun=("account=abc", "exclusive=user")), SLURM, ALLOCATION)
    assert (made.spec.backend, made.spec.nodes, made.spec.ranks_per_node) == ("nccl", 2, 8)
    made.start()
    ((options, environ),) = srun
    assert {"--partition=gpu", "--exclusive", "--gpus-per-node=8", "--cpus-per-task=12", "--account=abc"} <= set(options)
    assert options.index("--exclusive=user") > options.index("--exclusive"), "the user's own come last"
    assert "SLURM_JOB_ID" not in environ and environ["SLURM_CONF"] == "/etc/slurm.conf", "no other job's variables"


def test_a_gpu_request_of_the_users_is_left_alone(srun: list[Any]) -> None:
    chosen(BenchRequest("all_reduce", srun=("gres=gpu:h100:8",)), SLURM).start()
    assert not any(option.startswith("--gpus-per-node") for option in srun[0][0])


def test_without_slurm_the_reason_is_told() -> None:
    with pytest.raises(HpcMpError, match=r"slurmctld is down.*--on local"):
        chosen(BenchRequest("all_reduce"), SLURM, site="slurmctld is down")


def test_the_groups_of_a_layout() -> None:
    spec = chosen(BenchRequest("all_reduce", nodes=2, ranks_per_node=4, layout=BenchLayout("dp", 2, 2, "cluster"))).spec
    assert spec.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    spread = chosen(BenchRequest("all_reduce", nodes=2, ranks_per_node=4, layout=BenchLayout("tp", 2, 2, "spread"))).spec
    assert spread.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(("wish", "words"), [
    (BenchRequest("all_reduce", nodes=0), "--nodes 0"),
    (BenchRequest("all_reduce", layout=BenchLayout("tp", 3, 1, "cluster")), "does not divide 2 ranks"),
    (BenchRequest("all_reduce", layout=BenchLayout("tp", 0, 1, "cluster")), "= 0"),
    (BenchRequest("all_reduce", layout=BenchLayout("tp", 2, 1, "cluster"), split="rail"), "two ways to make groups"),
    (BenchRequest("all_gather", sizes=(8, None, None, None)), "Begin with at least 32"),
    (BenchRequest("all_reduce", sizes=(16, 8, None, None)), "must ascend"),
    (BenchRequest("all_reduce", srun=("--partition=x",)), "without its dashes")])
def test_what_cannot_be_is_refused(wish: BenchRequest, words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        chosen(wish, STEP if wish.srun else LOCAL, {"SLURM_GPUS_ON_NODE": "2"})


def test_one_size_may_be_named_alone() -> None:
    assert chosen(BenchRequest("all_reduce", sizes=(2**26, None, None, None))).spec.sizes == (2**26,)
    assert chosen(BenchRequest("all_reduce", sizes=(None, 512, None, None))).spec.sizes == (512,)
    assert chosen(BenchRequest("all_gather", nodes=50, ranks_per_node=4)).spec.sizes[0] == 4096, "16 bytes for each of 200 ranks"


def bench(*words: str) -> Any:
    return command.main([*words, "--on", "local", "--backend", "gloo", "-n", "2", "-w", "1"], standalone_mode=False)


def test_the_command_prints_a_table_that_a_parser_of_nccl_tests_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("all_reduce", "--nodes", "2", "--ranks-per-node", "2", "--axis", "tp", "--tp", "2", "-b", "4K", "-e", "64K") == 0
    printed = capsys.readouterr()
    output = parse(printed.out)
    assert HEADER in printed.out and [each.size for each in output.lines] == [4096, 16384, 65536]
    assert [device[:2] for device in output.devices] == [(0, 0), (1, 0), (2, 1), (3, 1)] and output.verdict == "OK"
    assert all(each.in_place.busbw == pytest.approx(each.in_place.algbw, abs=0.011) for each in output.lines), "factor of 2 ranks"
    assert printed.err == "", "quiet in a pipe"


def test_wrong_data_are_an_exit_code_and_json_is_one_document(capsys: pytest.CaptureFixture[str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "on_emulated_nodes", functools.partial(on_emulated_nodes, entry="bench_entries:wrong_data"))
    assert bench("all_reduce", "-b", "4K", "-e", "4K", "--json") == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["out_of_bounds"] == {"count": 1, "okay": "false"}
    assert [tree["results"][0][placed]["nwrong"] for placed in ("out_of_place", "in_place")] == [1.0, 1.0]


def test_the_environment_of_the_shell_does_not_reach_the_ranks_as_slurms() -> None:
    """Ranks forked inside somebody's allocation are not its tasks."""
    spec = chosen(BenchRequest("broadcast", "gloo", sizes=(64, 64, None, None))).spec
    said = list(on_emulated_nodes(spec, {**os.environ, "SLURM_NTASKS": "64", "RANK": "5", "OMPI_COMM_WORLD_SIZE": "3"}))
    assert [event["event"] for event in said] == ["ranks", "size", "row", "end"]
