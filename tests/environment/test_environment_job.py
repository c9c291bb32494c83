"""``environment.profile`` in a job: the lines of its script, who goes before whom when bash runs them, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rendering import CPU, GPUS, PYTHON, RUN, executable, execute, facts, job, text

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cluster.bandwidth import LinkRates, noted, where, write_measured
from hpc_mp.environment.profiles import APPLIED, load_profile, profile_names
from hpc_mp.job import JobSpec
from hpc_mp.launch.choices import choose_profile
from hpc_mp.launch.render import ScriptTemplate, render
from hpc_mp.lint.sbatch import lint

# In place of the launching interpreter: notes what it got.
NOTES = """#!/bin/bash
env -0 > "$RECORD.env"
printf '%s\\0' "$0" -- > "$RECORD.argv"
pwd > "$RECORD.cwd"
"""


def with_profile(name: str | None, **sections: Any) -> JobSpec:
    return job(**{"job": GPUS} | sections | {"environment": {"profile": name} | sections.get("environment", {})})


def lines(spec: JobSpec) -> dict[str, str]:
    """Line to reason, of those that are the profile's."""
    shown = render(spec, RUN, facts((24, 11)), python=PYTHON).explanations
    return {line: why for line, why in shown if "environment.profile" in why}


def run(spec: JobSpec, folder: Path, home: str = "", before: str = "", **environ: str) -> dict[str, str]:
    """What the profile's lines export, when bash runs them behind ``before``."""
    (folder / ".nccl.conf").write_text(home)
    script = "\n".join([before, *lines(spec), "exec env -0"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "SLURM_JOB_ID": "77"} | environ)
    assert done.stderr == ""
    return dict(each.split("=", 1) for each in done.stdout.split("\0")[:-1])


@pytest.mark.parametrize("name", profile_names())
def test_a_script_says_what_its_profile_says_with_reasons(name: str, tmp_path: Path) -> None:
    profile, shown = load_profile(name), lines(with_profile(name))
    said = [each for each in profile.variable if each.use in (*APPLIED, "leave")]
    for each in said:
        (line,) = (line for line in shown if re.search(rf"(export|unset|out:) {each.name}(=|$)", line))
        assert f"environment.profile = {name}: {each.reason} ({each.source})." in shown[line]
    assert len(shown) == len(said) + len(profile.script) + 1
    exported = run(with_profile(name), tmp_path)
    wanted = {each.name: each.value.replace("$SLURM_JOB_ID", "77") for each in said
              if each.use != "leave" and not each.needs and not each.finds}
    assert {each: exported.get(each) for each in wanted} == wanted
    assert not {each.name for each in said if each.use == "leave"} & exported.keys()
    assert not {each.name for each in profile.variable if each.use in ("optional", "bench")} & exported.keys() - wanted.keys()


def test_a_job_without_a_profile_has_none_of_it() -> None:
    assert lines(with_profile(None)) == {} and "hpc_mp_said" not in text(with_profile(None))


def test_who_goes_before_whom(tmp_path: Path) -> None:
    spec = with_profile("azure-ndv4")
    assert run(spec, tmp_path)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert run(spec, tmp_path, before="export NCCL_SOCKET_IFNAME=hsn")["NCCL_SOCKET_IFNAME"] == "hsn", "a module"
    assert run(spec, tmp_path, NCCL_SOCKET_IFNAME="")["NCCL_SOCKET_IFNAME"] == "", "empty is said too, as for NCCL"
    assert "NCCL_SOCKET_IFNAME" not in run(spec, tmp_path, home="# x\nNCCL_SOCKET_IFNAME=ib0\n"), "NCCL reads its file itself"
    assert run(spec, tmp_path, home="#NCCL_SOCKET_IFNAME=ib0\n")["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_TOPO_FILE" not in run(spec, tmp_path, home="NCCL_TOPO_FILE=")
    named = tmp_path / "named"
    named.write_text("NCCL_TOPO_FILE=/x\n")
    assert "NCCL_TOPO_FILE" not in run(spec, tmp_path, NCCL_CONF_FILE=str(named))


def test_in_a_container_the_hosts_files_count_for_nothing(tmp_path: Path) -> None:
    spec = with_profile("azure-ndv4", slurm={"container": "/images/torch.sif"})
    assert run(spec, tmp_path, home="NCCL_SOCKET_IFNAME=ib0\n")["NCCL_SOCKET_IFNAME"] == "eth0"
    assert run(spec, tmp_path, NCCL_SOCKET_IFNAME="hsn")["NCCL_SOCKET_IFNAME"] == "hsn"


def test_the_script_as_a_whole(tmp_path: Path) -> None:
    """environment.set has the last word, a setup line comes behind the profile, what the submitting shell held is gone."""
    python = executable(tmp_path / "python", NOTES)
    spec = with_profile("azure-ndv4", job=CPU | {"nodes": 2}, slurm={"setup": ["export NCCL_IB_HCA=mlx5_7"]},
                        environment={"set": {"NCCL_IGNORE_CPU_AFFINITY": "0"}})
    script = render(spec, tmp_path / "run", facts((24, 11)), python=str(python)).text
    seen = execute(tmp_path, script, tmp_path / "run", NCCL_SOCKET_IFNAME="docker0")["env"]
    assert {name: seen[name] for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IGNORE_CPU_AFFINITY", "UCX_TLS")} == {
        "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5_7", "NCCL_IGNORE_CPU_AFFINITY": "0", "UCX_TLS": "tcp"}
    assert script.count("NCCL_IGNORE_CPU_AFFINITY") == 1, "what environment.set says is said once"


def test_a_list_is_extended_and_the_makers_script_is_read_first(tmp_path: Path) -> None:
    high = run(with_profile("gcp-a3-high"), tmp_path, LD_LIBRARY_PATH="/a:/b c")
    assert high["LD_LIBRARY_PATH"] == "/var/lib/tcpx/lib64:/a:/b c"
    assert run(with_profile("gcp-a3-high"), tmp_path)["LD_LIBRARY_PATH"] == "/var/lib/tcpx/lib64"
    shown = list(lines(with_profile("gcp-a3-ultra")))
    assert shown[1].startswith("for file in /usr/local/gib/scripts/set_nccl_env.sh /var/lib/gib/scripts/set_nccl_env.sh; do")
    maker = executable(tmp_path / "set_nccl_env.sh", "export NCCL_NET=$FLAVOUR NCCL_CROSS_NIC=0\n")
    moved = shown[1].replace("/var/lib/gib/scripts/set_nccl_env.sh", str(maker)).replace("{ .", "{ FLAVOUR=newIB .")
    script = [shown[0], moved, *shown[2:], "echo $NCCL_NET $NCCL_CROSS_NIC $NCCL_SOCKET_IFNAME"]
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, env={"HOME": "/no", "PATH": "/bin"})
    assert done.stdout.split() == ["newIB", "0", "enp0s19,enp192s20"] and done.stderr == ""


def test_pyxis_is_told_every_name() -> None:
    spec = with_profile("aws-efa", slurm={"container": "nvcr.io#nvidia/pytorch:25.06-py3", "container_runtime": "pyxis"},
                        environment={"set": {"GREETING": "x"}})
    (line,) = (line for line in text(spec).splitlines() if "--container-env" in line)
    assert ",NCCL_SOCKET_IFNAME,GREETING " in line and "FI_PROVIDER" not in line


def test_what_is_left_out_is_said() -> None:
    why = lines(with_profile("aws-efa"))["# left out: FI_EFA_USE_DEVICE_RDMA=1"]
    assert "Only for ofi-nccl <1.7, and which release the nodes have, is not known here" in why
    said = choose_profile(with_profile("aws-efa"), None).why
    assert said and "only a node can tell: FI_EFA_USE_DEVICE_RDMA, FI_PROVIDER" in said
    said = choose_profile(with_profile("aws-efa", environment={"set": {"FI_PROVIDER": "efa"}}), None).why
    assert said and "FI_PROVIDER" not in said


@pytest.mark.parametrize("name", profile_names())
def test_our_own_linter_has_nothing_against_it(name: str, tmp_path: Path) -> None:
    assert [each for each in lint(text(with_profile(name)), directory=tmp_path) if each.severity != "info"] == []


# --- which profile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "platform", "name", "words"), [
    (None, "azure-ndv5", None, None),
    ("none", "azure-ndv5", None, "none"),
    ("auto", "azure-ncv4", "azure-ncv4",
     "azure-ncv4 (Azure NC A100 v4: 4 A100 on PCIe, no fast network, as the doctor saw it on the nodes)."),
    ("auto", None, None, "none (auto: the doctor has noted no platform of this cluster's nodes)"),
    ("roce", "azure-ndv5", "roce", "roce (RoCE, any machine with GPUs)."),
])
def test_which_profile_a_job_gets(wanted: str | None, platform: str | None, name: str | None, words: str | None) -> None:
    chosen = choose_profile(with_profile(wanted), platform)
    assert (chosen.value, chosen.why) == (name, words or "")


def test_the_doctors_note_is_found_by_cluster(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert noted("lab", environ) is None and noted(None, environ) is None
    write_measured(where("lab", environ), LinkRates("lab", 0.0, ("n1", "n2"), ((0, 1, 1.0),), platform="azure-ndv4"))
    found = noted("lab", environ)
    assert found is not None and found.platform == "azure-ndv4" and noted("other", environ) is None


def test_a_container_is_told_what_it_lacks() -> None:
    said = choose_profile(with_profile("gcp-a3-mega", slurm={"container": "/images/torch.sif"}), None).why
    assert said and "/dev/aperture_devices" in said


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(HpcMpError, match=r"environment\.profile = 'azure-ndv6': is none of .* Did you mean 'azure-ndv"):
        choose_profile(with_profile("azure-ndv6"), None)
    with pytest.raises(HpcMpError, match=r"environment\.profile = 'two words'"):
        with_profile("two words")


def test_a_template_that_passes_over_the_profile_is_refused(tmp_path: Path) -> None:
    own = ScriptTemplate(tmp_path / "job.sbatch.j2", "srun true {# why #}\n")
    with pytest.raises(HpcMpError, match=r"environment\.profile: has no effect with the template .*Take over the lines"):
        render(with_profile("azure-ndv4"), RUN, facts((24, 11)), python=PYTHON, template=own)
    assert render(with_profile(None), RUN, facts((24, 11)), python=PYTHON, template=own).text == "srun true\n"


# --- end to end -------------------------------------------------------------------------------------------------------


def launch(folder: Path, place: str, profile: str, *options: str) -> Result:
    (folder / "a.txt").write_text("text " * 100)
    (folder / "job.toml").write_text('[model]\nconfig = { model_type = "gpt2", n_layer = 2, n_embd = 8, n_head = 2 }\n'
                                     '[data]\nfiles = ["a.txt"]\nsequence_length = 8\n[train]\nsteps = 1\nglobal_batch = 1\n'
                                     f'[environment]\nprofile = "{profile}"\n')
    return CliRunner().invoke(cli, ["launch", str(folder / "job.toml"), "--on", place, "--slurm-version", "24.11", *options])


def test_launch_explains_every_line(tmp_path: Path) -> None:
    done = launch(tmp_path, "slurm", "azure-ndh200v5", "--explain")
    assert done.exit_code == 0, done.output
    line, why = "hpc_mp_said NCCL_IB_HCA || export NCCL_IB_HCA='^mlx5_an0'", "environment.profile = azure-ndh200v5: mlx5_an0 is"
    assert f"{line}\n    {why}" in done.stdout


def test_auto_without_a_note_adds_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "slurm", "auto", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert "hpc_mp_said" not in json.loads(done.stdout)["script"]


def test_a_wrong_name_is_refused_wherever_the_job_would_run(tmp_path: Path) -> None:
    for place in ("slurm", "local"):
        done = launch(tmp_path, place, "azure-ndv9", "--dry-run")
        assert "environment.profile = 'azure-ndv9'" in str(done.exception) + done.output
