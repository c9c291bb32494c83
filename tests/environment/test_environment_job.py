"""``environment.profile`` in a job: what its ranks get and why, who goes before whom, which profile it is, what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bare import machine
from click.testing import CliRunner, Result
from machines.tree import KINDS, tree
from rendering import GPUS, job
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cluster.bandwidth import LinkRates, noted, where, write_measured
from hpc_mp.environment.job import ProfiledJob, of_interpreter, profile_job
from hpc_mp.environment.profiles import APPLIED, MakerScript, load_profile, profile_names
from hpc_mp.environment.view import view_of
from hpc_mp.job import JobSpec, resolve_any
from hpc_mp.launch.choices import choose_profile
from hpc_mp.rundir import RunDirectory
from hpc_mp.supervisor.prepare import apply_profile


def with_profile(name: str | None, **sections: Any) -> JobSpec:
    return job(**{"job": GPUS} | sections | {"environment": {"profile": name} | sections.get("environment", {})})


def none(name: str) -> str | None:
    """No Python package is installed."""


def actions(found: ProfiledJob) -> dict[str, str]:
    return {change.name: change.action for change in found.changes}


ROUTE = {"proc/net/route": "Iface\tDestination\nib0\t0010000A\neth7\t00000000\n"}
EFA = {"opt/amazon/efa_installed_packages": "libnccl-ofi_1.6.2-1_amd64\nlibfabric1-aws_1.18.0\n"}


@pytest.mark.parametrize("name", profile_names())
def test_ranks_get_what_the_profile_says(name: str, tmp_path: Path) -> None:
    profile, found = load_profile(name), profile_job(name, machine(tmp_path), {"SLURM_JOB_ID": "77"}, installed=none)
    said = {each.name: each for each in profile.variable if each.use in APPLIED}
    plain = {each.name: each.value.replace("$SLURM_JOB_ID", "77") for each in said.values() if not each.needs and not each.finds}
    assert {each: found.environ.get(each) for each in plain} == plain
    assert found.environ.keys() == {"SLURM_JOB_ID"} | plain.keys(), "nothing optional, nothing for benchmarks, no condition"
    log = "\n".join(found.lines())
    for each in plain:
        assert re.search(rf"set +{each}=.*# .*{re.escape(said[each].source)}", log)
    for each in said.keys() - plain.keys():
        assert re.search(rf"left out +{each}\b.*# ", log)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", profile_names())
def test_a_job_gets_what_env_shows(kind: str, name: str) -> None:
    """Two doors: what ``hpc-mp env`` shows on a machine is what the ranks of a job on it get."""
    source = tree(kind)
    view, found = view_of(source, {"HOME": "/root"}, name, none), profile_job(name, source, {"HOME": "/root"}, installed=none)
    assert view.applied is not None
    shown = {each.name: each.value for each in view.variables if each.origin == "profile"}
    assert {each: found.environ[each] for each in shown} == shown
    assert set(found.exported) == shown.keys()
    assert {each.name for each in found.changes if each.action == "left out"} >= {
        each.variable.name for each in view.applied.left_out}


def test_conditions_are_decided_on_the_node(tmp_path: Path) -> None:
    """A route that is found, a release that is old enough, one that is not: with the reasons."""
    found = profile_job("ethernet", machine(tmp_path / "a", ROUTE), {}, installed=none)
    assert (found.environ["NCCL_SOCKET_IFNAME"], found.environ["GLOO_SOCKET_IFNAME"]) == ("=eth7", "eth7")
    nowhere = profile_job("ethernet", machine(tmp_path / "b"), {}, installed=none)
    assert set(actions(nowhere).values()) == {"left out"} and "this machine has no default route" in "\n".join(nowhere.lines())
    old = profile_job("aws-efa", machine(tmp_path / "c", EFA), {}, installed=none)
    assert old.environ["FI_EFA_USE_DEVICE_RDMA"] == "1" and "FI_PROVIDER" not in old.environ
    (line,) = (line for line in old.lines() if "FI_PROVIDER" in line)
    assert line.startswith("left out") and "needs ofi-nccl <1.6, but the release here is 1.6.2" in line


def test_who_goes_before_whom(tmp_path: Path) -> None:
    def socket(environ: dict[str, str], home: str = "", *decided: str, **more: Any) -> tuple[str | None, str]:
        source = machine(tmp_path, {"home/.nccl.conf": home})
        found = profile_job("azure-ndv4", source, {"HOME": "/home"} | environ, decided, installed=none, **more)
        return found.environ.get("NCCL_SOCKET_IFNAME"), actions(found)["NCCL_SOCKET_IFNAME"]

    assert socket({}) == ("eth0", "set")
    assert socket({"NCCL_SOCKET_IFNAME": "hsn"}) == ("hsn", "kept"), "a module or a line of slurm.setup"
    assert socket({"NCCL_SOCKET_IFNAME": ""}) == ("", "kept"), "empty is said too, as for NCCL"
    assert socket({}, "NCCL_SOCKET_IFNAME=ib0\n") == (None, "kept"), "NCCL reads its file itself"
    assert socket({}, "#NCCL_SOCKET_IFNAME=ib0\n") == ("eth0", "set")
    assert socket({}, "NCCL_SOCKET_IFNAME=ib0\n", container=True) == ("eth0", "set"), "the host's files are not in the container"
    assert socket({"NCCL_SOCKET_IFNAME": "x"}, "", "NCCL_SOCKET_IFNAME") == ("x", "kept")


def test_a_container_hides_the_libraries_of_the_host(tmp_path: Path) -> None:
    found = profile_job("aws-efa", machine(tmp_path, EFA), {}, container=True, installed=lambda name: "2.30.7")
    assert "FI_EFA_USE_DEVICE_RDMA" not in found.environ
    assert any("FI_EFA_USE_DEVICE_RDMA" in line and "the release here is unknown" in line for line in found.lines())


def test_lists_are_extended_and_names_taken_away(tmp_path: Path) -> None:
    high = profile_job("gcp-a3-high", machine(tmp_path), {"LD_LIBRARY_PATH": "/a:/b c", "SLURM_JOB_ID": "7"}, installed=none)
    assert high.environ["LD_LIBRARY_PATH"] == "/var/lib/tcpx/lib64:/a:/b c"
    leave = [(name, each.name) for name in profile_names() for each in load_profile(name).variable
             if each.use == "leave" and not each.needs]
    for name, variable in leave:
        gone = profile_job(name, machine(tmp_path), {variable: "1"}, installed=none)
        assert variable not in gone.environ and actions(gone)[variable] == "unset"
        assert profile_job(name, machine(tmp_path), {variable: "1"}, (variable,), installed=none).environ[variable] == "1"
    assert leave, "some profile takes a variable away"


def test_the_makers_script_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = tmp_path / "set nccl env.sh"
    maker.write_text("echo noise\nexport NCCL_NET=$FLAVOUR NCCL_CROSS_NIC=0 NCCL_X=script\n"
                     "export LD_LIBRARY_PATH=/gib:$LD_LIBRARY_PATH\n")
    script = MakerScript(files=["/nowhere/x.sh", str(maker)], given={"FLAVOUR": "newIB"}, reason="why", source="where")
    profile = load_profile("gcp-a3-ultra").model_copy(update={"script": [script]})
    monkeypatch.setattr("hpc_mp.environment.job.load_profile", lambda name: profile)
    given = {"PATH": "/usr/bin:/bin", "NCCL_X": "module", "LD_LIBRARY_PATH": "/a"}
    found = profile_job("gcp-a3-ultra", machine(tmp_path / "m"), given, ("NCCL_CROSS_NIC",), installed=none)
    assert {name: found.environ.get(name) for name in ("NCCL_NET", "NCCL_CROSS_NIC", "NCCL_X", "LD_LIBRARY_PATH", "FLAVOUR")} == {
        "NCCL_NET": "newIB", "NCCL_CROSS_NIC": None, "NCCL_X": "module", "LD_LIBRARY_PATH": "/gib:/a", "FLAVOUR": None}
    monkeypatch.undo()
    absent = profile_job("gcp-a3-ultra", machine(tmp_path / "m"), given, installed=none)
    assert any(line.startswith("left out") and "this script does not exist here" in line for line in absent.lines())


def test_the_supervisor_tells_pyxis_the_names_and_writes_why(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.log.mkdir()
    spec = with_profile("aws-efa", slurm={"container": "nvcr.io#nvidia/pytorch:25.06-py3", "container_runtime": "pyxis"})
    command = ["srun", "--container-env=HF_HOME,GREETING", "python3", "-P", "-m", "hpc_mp", "train", "job.toml"]
    told, environ, said = apply_profile(run, spec, command, {"A": "1"}, machine(tmp_path / "m"))
    assert told[1] == "--container-env=HF_HOME,GREETING,NCCL_SOCKET_IFNAME" and told[2:] == command[2:]
    assert environ == {"A": "1", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    assert said and "reasons: log/profile.log" in said
    log = run.profile_log.read_text().splitlines()
    assert "outside of the container, whose libraries and files are not visible" in log[0]
    assert any(re.match(r"set +NCCL_SOCKET_IFNAME='\^docker,lo,veth'  # containers' interfaces", line) for line in log)
    assert apply_profile(run, with_profile(None), command, {"A": "1"}) == (command, {"A": "1"}, None)


def test_releases_are_those_of_a_programs_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python on the job's PATH, or the one that its command names; nobody looks into an image."""
    for place in ("a", "b"):
        python = tmp_path / place / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\n[ "$4" = nvidia-nccl-cu12 ] && echo 2.{ord(place)} || exit 1\n')
        python.chmod(0o755)
    seen: list[str | None] = []

    def ask(name: str, *args: object, installed: Callable[[str], str | None], **more: object) -> None:
        seen.append(installed("nvidia-nccl-cu12"))
        assert installed("nvidia-nccl-cu13") is None
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_mp.supervisor.prepare.profile_job", ask)
    for command, slurm in (("python", {}), (f"{tmp_path}/b/python", {}), ("./solve", {}), ("python", {"container": "x"})):
        spec = resolve_any({"program": {"command": [command]}, "environment": {"profile": "aws-efa"}, "slurm": slurm}, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            apply_profile(RunDirectory(tmp_path), spec, ["srun"], {"PATH": f"{tmp_path}/a"})
    assert seen == ["2.97", "2.98", "2.97", None] and of_interpreter("/nowhere/python")("x") is None


@pytest.mark.parametrize(("wanted", "platform", "name", "words"), table(__file__, "environment_job.toml", "profiles"))
def test_which_profile_a_job_gets(wanted: str | None, platform: str | None, name: str | None, words: str | None) -> None:
    chosen = choose_profile(with_profile(wanted), platform)
    applied = " The job's first node applies it, and log/profile.log says what it set and why." if name else ""
    assert (chosen.value, chosen.why) == (name, (words or "") + applied)


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
    with pytest.raises(HpcMpError, match=r"environment\.profile = 'azure-ndv6': is not one of .* Did you mean 'azure-ndv"):
        choose_profile(with_profile("azure-ndv6"), None)
    with pytest.raises(HpcMpError, match=r"environment\.profile = 'two words'"):
        with_profile("two words")


def launch(folder: Path, place: str, profile: str, *options: str) -> Result:
    (folder / "a.txt").write_text("text " * 100)
    (folder / "job.toml").write_text('[model]\nconfig = { model_type = "gpt2", n_layer = 2, n_embd = 8, n_head = 2 }\n'
                                     '[data]\nfiles = ["a.txt"]\nsequence_length = 8\n[train]\nsteps = 1\nglobal_batch = 1\n'
                                     f'[environment]\nprofile = "{profile}"\n')
    return CliRunner().invoke(cli, ["launch", str(folder / "job.toml"), "--on", place, "--slurm-version", "24.11", *options])


def test_launch_says_where_to_read_what_was_set(tmp_path: Path) -> None:
    done = launch(tmp_path, "slurm", "azure-ndh200v5", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert "NCCL_IB_HCA" not in json.loads(done.stdout)["script"], "the script holds none of it: the first node applies it"
    key = choose_profile(with_profile("azure-ndh200v5"), None)
    assert key.why and "The job's first node applies it, and log/profile.log says what it set and why" in key.why


def test_a_wrong_name_is_refused_wherever_the_job_would_run(tmp_path: Path) -> None:
    for place in ("slurm", "local"):
        done = launch(tmp_path, place, "azure-ndv9", "--dry-run")
        assert "environment.profile = 'azure-ndv9'" in str(done.exception) + done.output
