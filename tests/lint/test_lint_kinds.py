"""``hpc-mp lint`` knows what it is given."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.lint import command
from hpc_mp.lint.kinds import KINDS, kind_of

ROOT = Path(__file__).parents[2]
SLURM_CONF = table(__file__, "lint_kinds.toml", "slurm_conf")
TOPOLOGY = "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n"
ENV = "HOME=/root\nNCCL_SOCKET_IFNAME=lo\nBASH_FUNC_x%%=() {  echo\n}\nNCCL_TIMEOUT=3\n"
JOB = table(__file__, "lint_kinds.toml", "job")

FILES = {  # name, text, kind
    "a.sbatch": ("#!/bin/bash\nsrun x\n", "sbatch"), "b.sh": ("#!/bin/sh\n#SBATCH -N 2\nsrun x\n", "sbatch"),
    "c": ("#!/bin/bash\nmodule load x\nsrun x\n", "sbatch"),
    "job.toml": (JOB, "job"), "broken.toml": ("[job]\nname = \n[train]\n", "job"),
    "env.txt": ("A=1\nNCCL_DEBUG=INFO\n", "variables"), "x.sh": ("#!/bin/sh\nexport NCCL_DEBUG=INFO\nunset B\n", "variables"),
    "nccl.conf": ("NCCL_DEBUG=INFO\n", "nccl"), "slurm.conf": ("# nothing yet\n", "slurm-conf"),
    "site.conf": (SLURM_CONF, "slurm-conf"),
    "gres.conf": ("Name=gpu Count=8\n", "slurm-part"), "topology.conf": (TOPOLOGY, "topology"), "t.txt": (TOPOLOGY, "topology"),
    "template.txt": ("[cluster x]\n[[node scheduler]]\nMachineType = $Type\n", "template"),
    "project.ini": ("[project]\nname = x\n", "project"),
    "a.sbatch.j2": ("#!/bin/bash\nsrun x\n", "jinja"), "d.sbatch": ("#!/bin/bash\n#SBATCH -N {{ nodes }}\nsrun x\n", "jinja"),
    "e.conf": ("{% for node in nodes %}\nNodeName={{ node }}\n{% endfor %}\n", "jinja"),
    "shell.sh": ('#!/bin/bash\n#SBATCH -N 2\necho "${#x[@]}" "${{ github }}" "${x:-{a}}"\n', "sbatch"),
    "readme.md": ("# A title\n\nSome words = none.\n", None), "pyproject.toml": ("[project]\nname = 'x'\n", None),
    "image.bin": ("\x00\x01\ufffd", None), "empty": ("", None),
}


@pytest.mark.parametrize("name", FILES)
def test_a_kind_is_known_by_name_and_text(name: str) -> None:
    text, kind = FILES[name]
    assert kind_of(Path(name), text) == kind
    assert {kind for _, kind in FILES.values()} == {*KINDS, None}


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [*map(str, arguments)])


def found(path: Path, *options: str) -> list[dict[str, object]]:
    done = call(path, *options, "--json")
    findings: list[dict[str, object]] = json.loads(done.stdout)["findings"]
    assert done.exit_code == int(any(each["severity"] == "error" for each in findings))
    return findings


def test_a_jinja_template_gets_one_finding_and_the_same_script_without_brackets_more(tmp_path: Path) -> None:
    (finding,) = found(ROOT / "slurm" / "job.sbatch.j2")
    assert finding["code"] == "HM001" and "a template: its placeholders" in str(finding["message"])
    (tmp_path / "a.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n")
    assert len(found(tmp_path / "a.sbatch")) > 1


def test_an_unknown_file_is_refused_and_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("Some words.\n")
    done = call(path)
    assert isinstance(done.exception, HpcMpError) and "not a known kind of file" in str(done.exception)
    assert "--as sbatch" in str(done.exception) and found(path, "--as", "sbatch")


def test_several_files_are_one_document(tmp_path: Path) -> None:
    (tmp_path / "env.txt").write_text(ENV)
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG =WARN\n")
    done = call(tmp_path / "env.txt", tmp_path / "nccl.conf", "--json")
    document = json.loads(done.stdout)
    assert document["worst"] == "warning" and document["nagios"] == 1 and done.exit_code == 0
    assert {Path(each["file"]).name for each in document["findings"]} == {"env.txt", "nccl.conf"}


def test_variables_are_judged_by_line(tmp_path: Path) -> None:
    (tmp_path / "env.txt").write_text(ENV)
    assert [(each["code"], each["line"], each["subject"]) for each in found(tmp_path / "env.txt")] == [
        ("HM611", 2, "NCCL_SOCKET_IFNAME"), ("HM603", 5, "NCCL_TIMEOUT")]
    (tmp_path / "good.sh").write_text("export NCCL_SOCKET_IFNAME='eth0'  # the fast one\n")
    assert found(tmp_path / "good.sh") == []


def test_a_job_file_gets_its_first_fault_and_a_good_one_none(tmp_path: Path) -> None:
    good, bad = tmp_path / "job.toml", tmp_path / "bad.toml"
    good.write_text(JOB)
    bad.write_text(JOB.replace("steps = 3", "stesp = 3"))
    assert found(good) == []
    (finding,) = found(bad)
    assert finding["severity"] == "error" and "steps" in str(finding["fix"])


def test_slurm_conf_is_judged_as_the_running_cluster_would_be(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(SLURM_CONF)
    rows = {each["code"]: (each["line"], each["subject"]) for each in found(conf)}
    assert rows["cons-tres"] == (4, "SelectType=select/cons_res") and rows["kill-wait"][0] == 5 and "short-limit" in rows
    conf.write_text(SLURM_CONF.replace("cons_res", "cons_tres").replace("KillWait=5", "KillWait=120"))
    assert not {"cons-tres", "kill-wait"} & {each["code"] for each in found(conf)}
    (tmp_path / "gres.conf").write_text("NodeName=n[1-4] Name=gpu Count=8\n")
    assert {each["code"]: Path(str(each["file"])).name for each in found(conf)}["gres-file"] == "gres.conf"


def test_a_topology_that_slurm_would_not_read(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(TOPOLOGY)
    assert found(path) == []
    path.write_text(TOPOLOGY + "SwitchName=s1 Nodes=n9\n")
    (finding,) = found(path)
    assert finding["severity"] == "error" and "s1" in f"{finding['subject']} {finding['message']}"


def test_a_topology_that_slurm_takes_otherwise_than_it_is_written(tmp_path: Path) -> None:
    """What `hpc-mp cluster topology` notes, the linter says too."""
    path = tmp_path / "topology.conf"
    path.write_text("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[2-4]\n")
    assert {each["code"]: each["severity"] for each in found(path)} == {"topology-apart": "warning", "topology-amiss": "warning"}
    path.write_text("SwitchName=s1 Nodes=n[1-2]\nSwitchName=top Switches=s[1-2]\n")
    (finding,) = found(path)
    assert (finding["severity"], "s2" in str(finding["message"])) == ("error", True)


def test_one_file_that_is_not_there_hides_nothing_of_the_others(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(SLURM_CONF)
    done = CliRunner().invoke(command, [str(tmp_path / "nothing"), str(conf), "--json"])
    codes = [each["code"] for each in json.loads(done.stdout)["findings"]]
    assert done.exit_code == 1 and "file" in codes and "cons-tres" in codes


def test_a_project_is_judged_by_its_templates(tmp_path: Path) -> None:
    assert found(ROOT / "cyclecloud" / "project.ini") == []
    shutil.copytree(ROOT / "cyclecloud", tmp_path / "project")
    template = next((tmp_path / "project" / "templates").glob("*.txt"))
    template.write_text(template.read_text().replace("[[node defaults]]", "[[node defaults]", 1))
    assert any(each["severity"] == "error" for each in found(tmp_path / "project" / "project.ini"))
