"""slurm.conf and the files beside it, as Slurm reads them. Every row of ``REFUSED`` was given to slurmctld or slurmd 22.05.8,
which ended with "fatal"; where slurmd is installed, its own check of gres.conf (-G) is asked again here."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tables import swapped, table

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.slurm.conf_file import read_conf
from hpc_mp.lint.slurm_conf import rules_files
from hpc_mp.lint.slurm_conf.files import lint_slurm_conf, lint_topology

HEAD = "ClusterName=c\nSlurmctldHost=head\n"
NODES = "NodeName=n[1-4] CPUs=8 RealMemory=1000"
PARTITION = "PartitionName=gpu Nodes=n[1-4] Default=YES OverSubscribe=FORCE:4 MaxTime=0:10:00\n"
GPUS = f"{HEAD}GresTypes=gpu\n{NODES} Gres=gpu:2\n{PARTITION}"
TREE = "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n"


def found(folder: Path, conf: str, release: tuple[int, ...] | None = None, **beside: str) -> list[Finding]:
    for name, text in beside.items():
        (folder / name.replace("_", ".")).write_text(text)
    (folder / "slurm.conf").write_text(conf)
    return lint_slurm_conf(conf, folder / "slurm.conf", release)


def errors(findings: list[Finding]) -> list[tuple[str, str, int | None]]:
    return [(each.code, each.subject, each.line) for each in findings if each.severity == "error"]


def conf_of(row: dict[str, Any], conf: str = GPUS) -> str:
    """Return a slurm.conf after a row's swaps, with more lines."""
    return swapped(row.get("whole", conf), row.get("swap", ())) + str(row.get("more", ""))


# --- one cluster, written in several ways ----------------------------------------------------------------------------

PLAIN = f"{HEAD}SelectType=select/linear\nKillWait=5\nGresTypes=gpu\n{NODES} Gres=gpu:16\n{PARTITION}"
WAYS = {
    "small letters": PLAIN.lower().replace("clustername=c", "clustername=c").replace("default=yes", "default=true"),
    "capitals": "\n".join(f"{line.partition('=')[0].upper()}={line.partition('=')[2]}" for line in PLAIN.splitlines()) + "\n",
    "included": HEAD + "INCLUDE parts/%c.conf\n",
    **{name: conf_of(row, PLAIN) for name, row in table(__file__, "slurm_conf_files.toml", "ways").items()}}


def without_place(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.code, each.severity, each.subject) for each in findings]


@pytest.mark.parametrize("way", WAYS)
def test_one_cluster_in_several_ways_has_the_same_findings(way: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "c.conf").write_text(PLAIN.replace(HEAD, ""))
    plain = found(tmp_path, PLAIN)
    assert {"cons-tres", "kill-wait", "few-cpus", "nodes-shared", "short-limit"} <= {each.code for each in plain}
    assert without_place(found(tmp_path, WAYS[way])) == without_place(plain)


def test_a_finding_names_the_file_and_the_line_that_say_it(tmp_path: Path) -> None:
    (tmp_path / "site.conf").write_text(f"# site\nKillWait=5\n{NODES} \\\n Gres=gpu:16\n{PARTITION}")
    places = {each.code: (Path(str(each.file)).name, each.line)
              for each in found(tmp_path, HEAD + "GresTypes=gpu\ninclude site.conf\nSelectType=select/linear\n")}
    assert places["cons-tres"] == ("slurm.conf", 5) and places["kill-wait"] == ("site.conf", 2)
    assert places["few-cpus"] == ("site.conf", 3) and places["short-limit"] == ("site.conf", 5)


def test_lines_are_joined_before_their_escapes_are_read(tmp_path: Path) -> None:
    (line,) = read_conf("Prolog=/a\\#b\\\\\\ \nc # d \\\n")
    assert line.pairs == (("Prolog", "/a#b\\c"),) and line.rest == ""
    assert [each.pairs for each in read_conf("A=1 # x \\\nB=2\\\n")] == [(("A", "1"),), (("B", "2"),)]


# --- what Slurm does not start with ----------------------------------------------------------------------------------

F, G, Z = "/dev/null", "/dev/full", "/dev/zero"
REFUSED: dict[str, tuple[str, str, str | None, str, int | None]] = {  # slurm.conf, code, gres.conf, subject, line
    name: (conf_of(row), row["code"], row.get("gres"), row["subject"], row["line"])
    for name, row in table(__file__, "slurm_conf_files.toml", "refused").items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_slurm_does_not_start_with_is_an_error(name: str, tmp_path: Path) -> None:
    conf, code, gres, subject, line = REFUSED[name]
    beside = {} if gres is None else {"gres_conf": gres}
    if "cgroup" in name:
        beside["cgroup_conf"] = "ConstrainCore=yes\n"
    wrong = [each for each in found(tmp_path, conf, **beside) if each.severity == "error"]
    assert (code, subject, line) in errors(wrong), errors(wrong)
    assert all(each.fix for each in wrong)
    assert {each.code for each in wrong} <= {code, "gres-count", "gres-file"}


def test_every_rule_of_files_has_a_case() -> None:
    assert {rule.code for rule in rules_files.RULES} == {row[1] for row in REFUSED.values()} | {"conf-release"}


@pytest.mark.skipif(shutil.which("slurmd") is None, reason="needs slurmd")
@pytest.mark.parametrize("name", [name for name, row in REFUSED.items()
                                  if row[1] in ("gres-records", "gres-typed", "conf-key", "conf-unread", "defined-twice")])
def test_slurmd_says_so_too(name: str, tmp_path: Path) -> None:
    conf, _, gres, _, _ = REFUSED[name]
    if name in ("no key of cgroup.conf", "a partition twice"):
        pytest.skip("slurmd -G does not look at it")
    extra = f"AuthType=auth/none\nCredType=cred/none\nSlurmUser=root\nSlurmdSpoolDir={tmp_path}\n"
    (tmp_path / "slurm.conf").write_text(conf.replace(NODES, f"{NODES} NodeAddr=127.0.0.1 Port=[7001-7004]") + extra)
    (tmp_path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (tmp_path / "gres.conf").write_text(gres or f"Name=gpu File={F},{Z}\n")
    done = subprocess.run(["timeout", "20", "slurmd", "-G", "-f", str(tmp_path / "slurm.conf"), "-N", "n1"],
                          capture_output=True, text=True)
    assert done.returncode != 0 and "fatal" in done.stdout + done.stderr


GOOD = table(__file__, "slurm_conf_files.toml", "good")


@pytest.mark.parametrize("name", GOOD)
def test_what_slurm_starts_with_is_no_error(name: str, tmp_path: Path) -> None:
    conf, gres = conf_of(GOOD[name]), GOOD[name].get("gres")
    wrong = [each for each in found(tmp_path, conf, **({} if gres is None else {"gres_conf": gres})) if each.severity == "error"]
    assert {each.code for each in wrong} <= {"gres-file"}, errors(wrong)  # a count in letters has no file


def test_a_part_of_a_configuration_is_not_held_to_be_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "gpu-partitions.conf"
    assert errors(lint_slurm_conf(PARTITION, path)) == []
    assert errors(lint_slurm_conf(f"{NODES} Gres=gpu:2\n", path)) == []


@pytest.mark.parametrize(("line", "words", "takes", "refuses"), table(__file__, "slurm_conf_files.toml", "releases"))
def test_what_some_releases_refuse_says_which(tmp_path: Path, line: str, words: str, takes: list[int],
                                              refuses: list[int]) -> None:
    conf = GPUS + line + "\n"
    (finding,) = [each for each in found(tmp_path, conf) if each.code == "conf-release"]
    assert words in finding.message and finding.severity == "warning" and finding.line == conf.count("\n")
    told = {code for code, *_ in errors(found(tmp_path, conf, tuple(refuses)))} | {
        each.code for each in found(tmp_path, conf, tuple(refuses)) if each.code == "conf-release"}
    assert told & {"conf-key", "conf-release"}
    assert not {each.code for each in found(tmp_path, conf, tuple(takes))} & {"conf-key", "conf-release"}


def test_a_cluster_without_partitions_is_refused_by_22_05_alone(tmp_path: Path) -> None:
    conf = f"{HEAD}{NODES}\n"
    assert [each.subject for each in found(tmp_path, conf) if each.code == "conf-release"] == ["no PartitionName"]
    assert not [each for each in found(tmp_path, conf, (23, 2)) if each.code == "conf-release"]


# --- topology.conf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words", "severity"), table(__file__, "slurm_conf_files.toml", "topologies"))
def test_a_topology_that_slurm_refuses(text: str, words: str, severity: str, tmp_path: Path) -> None:
    wrong = [each for each in lint_topology(text, tmp_path / "topology.conf") if each.code != "topology-apart"]
    assert [each.severity for each in wrong] == [severity] and words in f"{wrong[0].subject} {wrong[0].message}"


def test_a_topology_is_read_as_slurm_reads_it(tmp_path: Path) -> None:
    (tmp_path / "leaves.conf").write_text("SWITCHNAME=s1 nodes=n[1-2]\nswitchname = s2 Nodes=n3,\\\nn4 LinkSpeed=100\n")
    assert lint_topology("Include leaves.conf\nSwitchName=top switches=\"s[1-2]\" # all\n", tmp_path / "topology.conf") == []
