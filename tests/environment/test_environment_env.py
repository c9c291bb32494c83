"""The command ``hpc-mp env``: the sources end to end, its table, its JSON, copies of other machines, what it refuses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bare import machine
from click.testing import CliRunner, Result
from machines.tree import tree

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.env import command
from hpc_mp.environment.facts import facts


def env(*options: str, **environ: str) -> Result:
    """With no variable of NCCL or the network but these."""
    families = (name for name in os.environ if name.startswith(facts().families))
    return CliRunner(env=dict.fromkeys((*families, "LD_LIBRARY_PATH")) | environ).invoke(command, options)


def document(*options: str, **environ: str) -> dict[str, Any]:
    done = env("--json", *options, **environ)
    assert done.exit_code == 0, done.output
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def test_what_counts_is_shown_with_what_it_hides(tmp_path: Path) -> None:
    """All combinations are in ``test_environment_conf.py``."""
    machine(tmp_path, {"home/ann/.nccl.conf": "NCCL_IB_TC=user\n", "site": "NCCL_NET=named\n",
                       "etc/nccl.conf": "# c\nNCCL_NET=system\nNCCL_IB_TC=system\nNCCL_SOCKET_IFNAME=system\n"})
    shown = document("--profile", "azure-ndv4", "--root", str(tmp_path), HOME="/home/ann", NCCL_SOCKET_IFNAME="eth9",
                     NCCL_CONF_FILE="/site")
    variables = {each["name"]: each for each in shown["variables"]}
    assert {name: (variables[name]["value"], variables[name]["origin"]) for name in (
        "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_TC", "CUDA_DEVICE_ORDER", "NCCL_IB_TIMEOUT", "NCCL_TUNER_PLUGIN")} == {
        "NCCL_SOCKET_IFNAME": ("eth9", "process"), "NCCL_NET": ("named", "user file"), "NCCL_IB_TC": ("system", "system file"),
        "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "profile"), "NCCL_IB_TIMEOUT": ("20", "default"),
        "NCCL_TUNER_PLUGIN": (None, "default")}
    assert [(said["origin"], said["value"], said["where"]) for said in variables["NCCL_SOCKET_IFNAME"]["hides"]] == [
        ("system file", "system", "/etc/nccl.conf:4"), ("profile", "eth0", "azure-ndv4")]


def test_a_profile_is_shown_with_what_it_leaves_out(tmp_path: Path) -> None:
    shown = document("--profile", "aws-efa", "--root", str(tmp_path), HOME="/nowhere")
    assert {each["name"]: each["value"] for each in shown["variables"] if each["origin"] == "profile"} == {
        "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    assert {each["name"] for each in shown["profile"]["left_out"]} == {"FI_EFA_USE_DEVICE_RDMA", "FI_PROVIDER"}
    assert shown["profile"]["variables"][0].keys() >= {"name", "value", "reason", "source", "needs", "use"}


def test_the_document_has_every_variable_of_nccl() -> None:
    shown = document("--profile", "none")
    assert {each["name"] for each in shown["variables"]} >= facts().names
    assert shown["profile"] is None and "azure-ndv4" in shown["profiles"] and shown["platform"]["evidence"]


@pytest.mark.parametrize(("kind", "platform", "words"), [
    ("ndh200v5", "azure-ndh200v5", ["^mlx5_an0", "profile azure-ndh200v5", "issues 142 and 143", "8 × nvidia 0x2335"]),
    ("p5", "aws-efa", ["left out: needs ofi-nccl", "EFA: 32"])])
def test_a_copy_of_another_machine(kind: str, platform: str, words: list[str]) -> None:
    done = env("--root", str(tree(kind).root), HOME="/nowhere")
    assert done.exit_code == 0 and f"Platform {platform}" in done.stdout
    for word in words:
        assert word in done.stdout, done.stdout


def test_the_table_says_how_many_it_leaves_out_and_all_has_them(tmp_path: Path) -> None:
    short = env("--profile", "none", "--root", str(tmp_path), NCCL_DEBUG="WARN").stdout
    assert "NCCL_DEBUG  WARN   process" in short and "NCCL_IB_TIMEOUT" not in short
    assert f"{len(facts().names) - 1} others have NCCL's own defaults (--all)" in short
    everything = env("--profile", "none", "--all", "--root", str(tmp_path)).stdout
    assert "NCCL_IB_TIMEOUT" in everything and "(NCCL decides)" in everything


def test_what_cannot_be_printed_breaks_no_table_and_faults_do_not_fail_the_command(tmp_path: Path) -> None:
    done = env("--profile", "none", "--root", str(tmp_path), NCCL_NET="\x1b[31m[red]\n", NCCL_IB_HCA="\udcff")
    assert done.exit_code == 0 and "?[31m[red]?" in done.stdout and "\x1b[31m[" not in done.stdout
    # What hurts depends on the site: only an error makes exit 1, and no rule about variables is one on a machine
    done = env("--profile", "none", "--root", str(tmp_path), NCCL_TIMEOUT="3", NCCL_SOCKET_IFNAME="lo")
    assert done.exit_code == 0 and "HM603" in done.stdout and "warning HM611" in done.stdout


@pytest.mark.parametrize("options", [("--profile", "azure"), ("--root", "/does/not/exist")])
def test_what_is_wrong_is_refused(options: tuple[str, ...]) -> None:
    done = env(*options)
    assert done.exit_code == 2 or (isinstance(done.exception, HpcMpError) and "azure-ncv4" in str(done.exception))
