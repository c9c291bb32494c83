"""The conda file, the container definition and the module file: what can be told of them without conda, apptainer and Lmod."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from tables import table

ROOT = Path(__file__).resolve().parents[2]
ENV = ROOT / "env"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# --- conda ------------------------------------------------------------------------------------------------------------


def test_conda_brings_python_and_pip_brings_this_checkout() -> None:
    file = yaml.safe_load((ENV / "environment.yml").read_text(encoding="utf-8"))
    assert file["name"] == "hpc-mp"
    assert [each for each in file["dependencies"] if isinstance(each, str)] == [f"python{PROJECT['requires-python']}", "pip"]
    (pip,) = (each["pip"] for each in file["dependencies"] if isinstance(each, dict))
    assert [(ENV / path).resolve() for path in pip] == [ROOT], "pip reads paths from the file's own folder on"


# --- the container ----------------------------------------------------------------------------------------------------

DEFINITION = (ENV / "hpc-mp.def").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    parts = re.split(r"^%(\w+)$", DEFINITION, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)) | {"": parts[0]}


def test_the_container_has_the_sections_that_apptainer_knows() -> None:
    assert sections().keys() == {"", "files", "post", "environment", "test", "labels"}
    header = [line for line in sections()[""].splitlines() if line and not line.startswith("#")]
    assert header[0] == "Bootstrap: docker" and re.fullmatch(r"From: docker\.io/library/python:3\.1[1-9]-slim-\w+", header[1])


@pytest.mark.parametrize("section", ["post", "test", "environment"])
def test_its_scripts_are_shell(section: str) -> None:
    text = sections()[section]
    assert subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True).stderr == ""
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "--shell=sh", "-"], input=text, text=True, capture_output=True).stdout == ""


def test_it_installs_the_wheel_that_it_takes_along() -> None:
    (files,) = (line.split() for line in sections()["files"].splitlines() if line.strip())
    assert files == ["dist/*.whl", "/usr/local/share/hpc-mp/"] and f"pip install {files[1]}*.whl" in sections()["post"]
    for name in ("ibverbs-providers", "libibverbs1", "librdmacm1"):
        assert name in sections()["post"], "without it NCCL goes over TCP inside"


# --- the module -------------------------------------------------------------------------------------------------------

STAND_INS = table(__file__, "environment_files.toml", "stand_ins")


@pytest.mark.skipif(shutil.which("tclsh") is None, reason="needs tclsh, which Environment Modules bring")
def test_the_module_puts_the_command_on_the_path_or_refuses(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    shutil.copy(ENV / "modulefile", tmp_path / "env" / "modulefile")
    (tmp_path / "stand-ins.tcl").write_text(STAND_INS)

    def load() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["tclsh", str(tmp_path / "stand-ins.tcl"), str(tmp_path / "env/modulefile")], text=True,
                              capture_output=True, timeout=60)

    missing = load()
    assert missing.stdout.split() == ["conflict", "hpc-mp", "refused"] and "change the line" in missing.stderr
    command = tmp_path / ".venv/bin/hpc-mp"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert load().stdout.splitlines() == ["conflict hpc-mp", f"PATH {tmp_path}/.venv/bin"]


def test_the_module_is_one_for_both_programs() -> None:
    text = (ENV / "modulefile").read_text(encoding="utf-8")
    assert text.startswith("#%Module1.0\n"), "by this both know it"
    assert "setenv" not in text
