"""Facts about machines: GPUs, and what Slurm's programs answer, well or badly."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tables import table

from hpc_mp.base.command import CommandFailed, ask
from hpc_mp.cluster.node.nvidia_smi import Gpu, find_gpus
from hpc_mp.cluster.slurm.limits import accounts
from hpc_mp.cluster.slurm.nodes import usable_cpus
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition, parse_gpus, partitions, version, why_silent
from hpc_mp.cluster.slurm.site import SlurmSite, find_machine, find_site

GIB = 2**30


class Answers:
    """An ``ask`` with canned answers, by the words that a question begins with; without one the program is absent."""

    def __init__(self, answers: Mapping[str, str | CommandFailed]) -> None:
        self.answers = answers

    def __call__(self, argv: Sequence[str]) -> str:
        question = " ".join(argv)
        answer = next((answer for start, answer in self.answers.items() if question.startswith(start)), None)
        if answer is None:
            raise CommandFailed(f"{argv[0]} is not on PATH")
        if isinstance(answer, CommandFailed):
            raise answer
        return answer


# --- asking -----------------------------------------------------------------------------------------------------------


def test_ask_returns_what_was_written() -> None:
    assert ask(["sh", "-c", "echo $WHO; echo noise >&2"], environ=os.environ | {"WHO": "ünï"}) == "ünï\n"


@pytest.mark.parametrize(("argv", "message"), table(__file__, "site.toml", "silent"))
def test_ask_says_why_there_is_no_answer(argv: list[str], message: str) -> None:
    with pytest.raises(CommandFailed, match=f"^{re.escape(message)}"):
        ask(argv, timeout=0.2)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answers", "gpus"), [
    ({"nvidia-smi --query-gpu=index,name,memory.total": "0, NVIDIA H200, 143771\n1, NVIDIA GB10, [N/A]\n"},
     (Gpu(0, "NVIDIA H200", 143771 * 2**20), Gpu(1, "NVIDIA GB10", None))),
    ({}, ()), ({"nvidia-smi": CommandFailed("NVIDIA-SMI has failed")}, ())])
def test_gpus_of_this_machine(answers: dict[str, str | CommandFailed], gpus: tuple[Gpu, ...]) -> None:
    assert find_gpus(Answers(answers)) == gpus


@pytest.mark.parametrize(("gres", "expected"), table(__file__, "site.toml", "gres"))
def test_gres(gres: str, expected: list[list[str | int | None]]) -> None:
    assert [*map(list, parse_gpus(gres))] == expected


# --- Slurm ------------------------------------------------------------------------------------------------------------

SINFO = table(__file__, "site.toml", "sinfo")
UP = "Slurmctld(primary) at ctl is UP\n"
FATAL = CommandFailed("scontrol: error: a\nscontrol: fatal: b")
SITE: dict[str, str | CommandFailed] = {
    "scontrol ping": UP,
    "scontrol --version": "slurm-wlm 22.05.8\n",
    "sinfo --noheader --exact": SINFO,
    "scontrol show node --oneliner g01": "NodeName=g01 CPUAlloc=0 CPUEfctv=126 CPUTot=128 RealMemory=1031000\n",
    "sacctmgr --noheader --parsable2 show user": "proj|other\nproj|proj\n",
}


def test_partitions() -> None:
    found = partitions(Answers(SITE))
    assert [partition.name for partition in found] == ["debug", "gpu", "old", "empty"]
    assert [partition.name for partition in found if partition.default] == ["debug"]
    assert [partition.name for partition in found if not partition.up] == ["old"]
    assert [partition.time_limit for partition in found] == ["30:00", "1-00:00:00", None, None]
    assert found[1].kinds == (
        NodeKind(("g01", "g02", "g03", "g04"), 128, 1031000 * 2**20, (("h100", 8),)),
        NodeKind(("a1",), 64, 515000 * 2**20, (("a100", 4),)))
    assert (found[1].kinds[0].gpu_count, found[1].kinds[0].gpu_type) == (8, "h100")
    assert found[3].kinds == ()


def test_a_node_that_mixes_gpus_has_no_type() -> None:
    kind = NodeKind(("n1",), 1, GIB, (("v100", 2), ("k80", 2)))
    assert (kind.gpu_count, kind.gpu_type) == (4, None)


@pytest.mark.parametrize(("answers", "why"), table(__file__, "site.toml", "silence", globals()))
def test_why_slurm_is_silent(answers: dict[str, str | CommandFailed], why: str | None) -> None:
    assert why_silent(Answers(answers)) == why


def test_a_hanging_controller_is_given_up_after_three_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert why_silent() == "scontrol did not answer within 3 s"


@pytest.mark.parametrize(("text", "expected"), [
    ("slurm 23.11.4\n", (23, 11)), ("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 26.05.0-0rc1\n", (26, 5)), ("?\n", None),
    (CommandFailed("no"), None)])
def test_version(text: str | CommandFailed, expected: tuple[int, int] | None) -> None:
    assert version(Answers({"scontrol --version": text})) == expected


def test_usable_cpus_leave_out_those_of_the_system() -> None:
    assert usable_cpus("g01", Answers(SITE)) == 126
    assert usable_cpus("n1", Answers({"scontrol show node": "NodeName=n1 CPUTot=8 CPULoad=0.81\n"})) == 8
    assert usable_cpus("n1", Answers({})) is None


@pytest.mark.parametrize(("answer", "expected"), [
    ("proj|other\nproj|proj\n", ("proj", "other")), ("|a\n|b\n", ("a", "b")), ("\n", ()), ("", ()),
    (CommandFailed("no"), ())])
def test_accounts(answer: str | CommandFailed, expected: tuple[str, ...]) -> None:
    assert accounts("me", Answers({"sacctmgr": answer})) == expected


def test_partitions_are_not_guessed() -> None:
    with pytest.raises(CommandFailed):
        partitions(Answers({}))


# --- what is here -----------------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    machine = find_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory > GIB // 2


def test_the_site_of_a_first_job_heeds_the_users_own_defaults() -> None:
    site, own = (find_site(environ, Answers(SITE)) for environ in ({}, {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "mine"}))
    assert isinstance(site, SlurmSite) and isinstance(own, SlurmSite)
    assert site.chosen.name == "gpu", "the default partition has no GPUs"
    assert site.kind.gpu_type == "h100"
    assert (site.version, site.cpus, site.accounts) == ((22, 5), 126, ("proj", "other"))
    assert (own.chosen.name, own.accounts) == ("debug", ("mine", "proj", "other"))


@pytest.mark.parametrize("rows", list(itertools.permutations((
    "debug|up|30:00|4|16|(null)|d1", "g1|up|1:00:00|4|16|gpu:1|a1", "g2*|up|1:00:00|4|16|gpu:1|b1"))))
def test_the_default_partition_is_chosen_if_it_has_gpus(rows: tuple[str, ...]) -> None:
    site = find_site({}, Answers(SITE | {"sinfo --noheader --exact": "\n".join(rows)}))
    assert isinstance(site, SlurmSite)
    assert site.chosen.name == "g2"


@pytest.mark.parametrize(("change", "why"), [
    ({"scontrol ping": "Slurmctld(primary) at ctl is DOWN"}, "is DOWN"),
    ({"sinfo --noheader --exact": CommandFailed("sinfo: error: x")}, "sinfo: error: x"),
    ({"sinfo --noheader --exact": "old|down|infinite|8|32000|gpu:2|x1\n"}, "no partition that is up")])
def test_no_site_and_why(change: dict[str, str | CommandFailed], why: str) -> None:
    site = find_site({}, Answers(SITE | change))
    assert isinstance(site, str)
    assert why in site


def test_a_partition_without_gpus() -> None:
    site = find_site({}, Answers(SITE | {"sinfo --noheader --exact": "cpu*|up|infinite|4|8000|(null)|n[1-3]\n"}))
    assert isinstance(site, SlurmSite)
    assert site.chosen == SlurmPartition("cpu", True, True, None, (NodeKind(("n1", "n2", "n3"), 4, 8000 * 2**20, ()),))
    assert site.cpus == 4
