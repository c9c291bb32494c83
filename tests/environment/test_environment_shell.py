"""``hpc-mp env --shell``, read by real shells under ``set -eu``: any value comes through, and nothing else happens."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from bare import machine
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_mp.cli.env import command
from hpc_mp.environment.profiles import profile_names
from hpc_mp.environment.view import shell_lines, view_of

SHELLS = [name for name in ("bash", "dash", "ksh", "zsh", "busybox") if shutil.which(name)]
EVIL = "'\"`$(touch {folder}/evil)\\ $HOME ${{X:?}} !! ~ * ;&|<>#\t\r\n\x01\x7f\x1b[31m é \u2028"


def lines(environ: dict[str, str], folder: Path, profile: str = "none") -> bytes:
    return os.fsencode("\n".join(shell_lines(view_of(machine(folder), environ, profile, lambda name: None))) + "\n")


def sourced(shell: str, script: bytes, before: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of what a shell starts after it has read the lines; it fails on any error."""
    path = folder / "env.sh"
    path.write_bytes(script)
    start = [shell, "sh"] if shell == "busybox" else [shell]
    done = subprocess.run([*start, "-euc", '. "$1"; exec env -0', "sh", str(path)], capture_output=True, timeout=60,
                          env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"} | before)
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    return dict(os.fsdecode(each).split("=", 1) for each in done.stdout.split(b"\0")[:-1])


def test_the_shells_that_matter_are_here() -> None:
    assert {"bash", "dash"} <= set(SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_values_come_through_and_do_nothing(shell: str, tmp_path: Path) -> None:
    evil = EVIL.format(folder=tmp_path)
    said = {"NCCL_NET": evil, "NCCL_DEBUG": "", "NCCL_IB_HCA": "-n", "UCX_TLS": os.fsdecode(bytes(range(1, 256))),
            "FI_PROVIDER": "\n\n"}
    found = sourced(shell, lines(said, tmp_path), {}, tmp_path)
    assert {name: found[name] for name in said} == said
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("shell", ["bash", "dash"])
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"")), min_size=4, max_size=4))
@example([b"\x81\x82\x83\x84\x85\x86\x87\x88", b"\\", b"'", b"'\\''"])
def test_any_bytes_come_through(shell: str, values: list[bytes]) -> None:
    said = {f"NCCL_{at}": os.fsdecode(value) for at, value in enumerate(values)}
    with tempfile.TemporaryDirectory() as folder:
        found = sourced(shell, lines(said, Path(folder)), {}, Path(folder))
    assert {name: found[name] for name in said} == said


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_what_a_conf_file_says_is_brought_along_and_hostile_lines_are_not(shell: str, tmp_path: Path) -> None:
    """As for a container, which does not see the host's file. A line that sets PATH or UID must not reach a shell."""
    machine(tmp_path, {"etc/nccl.conf": (
        b"NCCL_TOPO_FILE=/x/$(touch evil)\nUID=0\nIFS=x\nBASH_ENV=/evil\nexport NCCL_A=1\nA B=2\nNCCL_\xff=1\n;touch evil;=1\n")})
    found = sourced(shell, lines({}, tmp_path), {}, tmp_path)
    assert found["NCCL_TOPO_FILE"] == "/x/$(touch evil)"
    assert not {"UID", "IFS", "BASH_ENV", "A", "NCCL_A"} & found.keys() and not Path("evil").exists()


def test_a_path_with_a_line_feed_ends_no_comment(tmp_path: Path) -> None:
    path = tmp_path / "x\nNCCL_NET=evil\n"
    path.write_text("NCCL_NET=IB\n")
    assert sourced("dash", lines({"NCCL_CONF_FILE": str(path)}, Path("/")), {}, tmp_path)["NCCL_NET"] == "IB"


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_what_must_not_be_set_is_unset_whether_it_was_set_or_not(shell: str, tmp_path: Path) -> None:
    for before in ({}, {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": ""}):
        found = sourced(shell, lines(before, tmp_path, "nvlink-node"), before | {"NCCL_SHM_DISABLE": "1"}, tmp_path)
        assert not {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE"} & found.keys()


def test_nothing_of_this_process_is_left_behind(tmp_path: Path) -> None:
    """The negative control: a variable that no library reads is not exported, and a shell without the lines has none of them."""
    script = lines({"SECRET_TOKEN": "x", "NCCL_NET": "IB"}, tmp_path)
    assert b"SECRET_TOKEN" not in script and b"export NCCL_NET=IB\n" in script
    assert "NCCL_NET" not in sourced("dash", b"", {}, tmp_path)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_can_be_sourced(name: str, tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "7", "LD_LIBRARY_PATH": "/usr/lib/a b"}
    for shell in ("bash", "dash"):
        found = sourced(shell, lines(environ, tmp_path, name), environ, tmp_path)
        view = view_of(machine(tmp_path), environ, name, lambda package: None)
        said = {each.name: each.value for each in view.variables if each.origin == "profile"}
        assert {each: found[each] for each in said} == said
    if name == "gcp-a3-high":
        assert found["LD_LIBRARY_PATH"] == "/var/lib/tcpx/lib64:/usr/lib/a b"
        assert found["NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX"] == "/run/tcpx-7"


def test_twice_is_the_same_as_once(tmp_path: Path) -> None:
    """Also for a list that the profile extends."""
    environ = {"SLURM_JOB_ID": "7"}
    first = sourced("bash", lines(environ, tmp_path, "gcp-a3-high"), environ, tmp_path)
    assert {**first, "_": ""} == {**sourced("bash", lines(first, tmp_path, "gcp-a3-high"), first, tmp_path), "_": ""}


def test_the_command_writes_bytes_as_they_are(tmp_path: Path) -> None:
    done = CliRunner(env={"NCCL_NET": "\udcff'"}).invoke(command, ["--shell", "--profile", "none", "--root", str(tmp_path)])
    assert done.exit_code == 0 and b"export NCCL_NET='\xff'\"'\"''\n" in done.stdout_bytes
