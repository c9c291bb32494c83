"""``hpc-mp cloud render``: what it writes, what it prints, what it asks, what it leaves alone."""

import json
import os
import pty
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cyclecloud_rendered import FOLDER
from tables import table

from cyclecloud_lint.rules import lint
from cyclecloud_lint.template import read_parameters, read_project
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.cloud import command
from hpc_mp.clouds.azure.render.workspace import RELEASE
from hpc_mp.clouds.azure.render.write import WHEELS


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["render", *map(str, arguments)])


def test_the_command_writes_a_project_that_lints_clean(tmp_path: Path) -> None:
    directory = tmp_path / "a cluster" / "of mine"
    done = call("--sku", "Standard_ND96isr_H200_v5", "--nodes", 8, "--output", directory, "--workspace", "--region", "westeurope")
    assert done.exit_code == 0, done.output
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    of_project = {path.relative_to(FOLDER).as_posix() for name in ("specs", "templates", "blobs")
                  for path in (FOLDER / name).rglob("*") if path.is_file()}
    assert names == of_project | {"project.ini", "parameters.json", "workspace.json", "README.txt"}
    values = json.loads((directory / "parameters.json").read_text(encoding="utf-8"))
    text = (directory / "templates" / "hpc-mp-slurm.txt").read_text(encoding="utf-8")
    assert lint(text, parameters=read_parameters(directory / "parameters.json"), project=read_project(directory)) == ()
    assert values["SubnetId"] == "hpc-mp-rg/ccw-vnet/ccw-compute-subnet" and values["Credentials"] == "azure"
    readme = (directory / "README.txt").read_text(encoding="utf-8")
    assert "1 CycleCloud × 4" in done.output and f"{8 * 96 + 8 + 8 + 8 * 16 + 4}  Total Regional vCPUs" in readme
    for line in ("sudo hpc-mp-topology", "cyclecloud project upload azure-storage", "az deployment sub create",
                 f"git clone --branch {RELEASE}",
                 "cyclecloud import_cluster hpc-mp -c hpc-mp-slurm -f templates/hpc-mp-slurm.txt -p parameters.json"):
        assert line in readme
    assert "[cluster hpc-mp-slurm]" in text and done.output.split("\nwrote")[0].strip() in readme


def test_a_wheel_goes_where_the_scheduler_looks_for_one(tmp_path: Path) -> None:
    wheel = tmp_path / "hpc_mp-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hpc_mp/__init__.py", "")
    (tmp_path / "torch-2.whl").write_bytes(wheel.read_bytes())
    arguments = ("--sku", "Standard_D8ads_v5", "--nodes", 1, "--output", tmp_path / "out", "--wheel")
    assert "is not a wheel of hpc-mp" in str(call(*arguments, tmp_path / "torch-2.whl").exception)
    assert not (tmp_path / "out").exists()
    assert call(*arguments, wheel).exit_code == 0
    assert (tmp_path / "out" / WHEELS / wheel.name).read_bytes() == wheel.read_bytes()
    assert f"installs {wheel.name}" in (tmp_path / "out" / "README.txt").read_text(encoding="utf-8")


def test_json_is_one_document_with_all_that_is_told(tmp_path: Path) -> None:
    done = call("--sku", "Standard_ND96isr_H100_v5", "--nodes", 2, "--output", tmp_path / "out", "--json")
    document = json.loads(done.stdout)
    assert document["directory"] == str(tmp_path / "out") and document["network_gbytes"] == 400 and document["node_busbw"] == 460
    assert "Region" in document["open"] and document["quota"][0]["vcpus"] == 192 and document["placement_group"] == 100
    assert "null" in (tmp_path / "out" / "parameters.json").read_text(encoding="utf-8")


def test_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    for output in (tmp_path, tmp_path / "mine.txt"):
        done = call("--sku", "Standard_D8ads_v5", "--nodes", 1, "--output", output)
        assert isinstance(done.exception, HpcMpError) and "not an empty directory" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert call("--sku", "Standard_D8ads_v5", "--nodes", 1, "--output", tmp_path / "empty").exit_code == 0
    done = call("--sku", "Standard_D8ads_v5", "--nodes", 1, "--output", tmp_path / "mine.txt" / "below")
    assert isinstance(done.exception, HpcMpError) and "cannot be written" in str(done.exception)


SIZE = ("--sku", "Standard_HC44rs", "--nodes", "2")


@pytest.mark.parametrize(("arguments", "words"), table(__file__, "cyclecloud_render_command.toml", "missing"))
def test_what_is_missing_or_cannot_be_meant_is_named_as_it_was_given(arguments: tuple[str, ...], words: str,
                                                                     tmp_path: Path) -> None:
    done = call(*arguments, "--output", tmp_path / "out")
    assert isinstance(done.exception, HpcMpError) and words in str(done.exception)
    assert not (tmp_path / "out").exists()


def answer(directory: Path, answers: str, *arguments: str) -> tuple[int, str]:
    """Exit code and screen of somebody who types these lines, then goes away."""
    keyboard, screen = pty.openpty()
    command_line = [sys.executable, "-m", "hpc_mp", "cloud", "render", "--output", str(directory), *arguments]
    with subprocess.Popen(command_line, cwd=FOLDER.parent, stdin=screen, stdout=screen, stderr=screen) as process:
        os.close(screen)
        os.write(keyboard, answers.encode() + b"\x04")
        said = b""
        while chunk := _read(keyboard):
            said += chunk
    os.close(keyboard)
    return process.returncode, said.decode()


def test_a_terminal_is_asked_for_what_is_missing(tmp_path: Path) -> None:
    code, said = answer(tmp_path / "out", "Standard_D8adz_v5\nStandard_D8ads_v5\n3\ny\nnortheurope\nn\n")
    assert code == 0, said
    assert "Maximum number of them" in said and "did you mean" in said.lower()
    values = json.loads((tmp_path / "out" / "parameters.json").read_text(encoding="utf-8"))
    assert (values["MaxHPCExecuteNodeCount"], values["Region"]) == (3, "northeurope")
    assert values["configuration_slurm_accounting_enabled"] is False


def test_an_answer_that_cannot_be_meant_is_asked_again_at_once(tmp_path: Path) -> None:
    code, said = answer(tmp_path / "out", "two\n0\n101\n100\nn\n\nWest Europe\nwesteurope\ny\n", "--sku", "ND96isr_H200_v5")
    assert code == 0, said
    for words in ("two: is not a number", "must be from 1 to 1000", "one placement group holds 100",
                  "is not the name of a region"):
        assert words in said
    document = json.loads((tmp_path / "out" / "workspace.json").read_text(encoding="utf-8"))
    assert document["parameters"]["location"]["value"] == "westeurope" and "what it needs" not in said


def test_nothing_is_asked_that_an_option_says_and_nothing_in_vain(tmp_path: Path) -> None:
    code, said = answer(tmp_path / "out", "\n", "--sku", "Standard_HC44rs", "--region", "eastus", "--no-accounting",
                        "--subnet", "g/n/s")
    assert code == 0 and "Region, such" not in said and "MySQL server for" not in said and "CycleCloud server" not in said, said
    code, said = answer(tmp_path / "out", "")
    assert code == 2 and "not an empty directory" in said and "Size of the nodes" not in said
    code, said = answer(tmp_path / "gone", "")
    assert code == 1 and "Size of the training nodes" in said and not (tmp_path / "gone").exists()


def test_what_fails_half_way_leaves_nothing_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--sku", "Standard_ND128isr_NDR_GB200_v6", "--nodes", 18, "--output", tmp_path / "out")
    done = call(*arguments, "--workspace", "--region", "westeurope")  # needs an image
    assert isinstance(done.exception, HpcMpError) and not (tmp_path / "out").exists()

    def full(source: Path, target: Path, **_: object) -> None:
        raise shutil.Error([(source, target, "No space left on device")])

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        assert "cannot be written (No space left on device)" in str(call(*arguments).exception)
    assert list((tmp_path / "out").iterdir()) == []
    assert call(*arguments).exit_code == 0
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end was closed
        return b""
