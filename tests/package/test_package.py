"""The package around the code: what a wheel holds, what an import costs, which room may import which."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

import pytest

import hpc_mp
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpc_mp"
DATA = ("slurm", "env", "cyclecloud")
HEAVY = ("torch", "transformers")


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)


# --- cost of an import -----------------------------------------------------------------------------------------------

LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))"


def loaded_after(code: str, watched: tuple[str, ...]) -> list[str]:
    done = run(sys.executable, "-c", f"{code}\n{LOADED}", *watched)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2].split()


RANK_HALF = [("hpc_mp", "train", room) for room in ("engine", "rank", "checkpoint")]
RANK_PROGRAMS = ("hpc_mp/doctor/bench/ranks/", "hpc_mp/doctor/compute/")  # what the doctor starts on nodes


def test_everything_that_ranks_do_not_run_imports_neither_torch_nor_transformers() -> None:
    files = [file.relative_to(ROOT).with_suffix("") for file in PACKAGE.rglob("*.py") if file.name != "__main__.py"]
    files = [file for file in files if not str(file).startswith(RANK_PROGRAMS)]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files if file.parts[:3] not in RANK_HALF]
    assert {"hpc_mp.base.errors", "hpc_mp.cli", "hpc_mp.cli.main"} <= set(names)
    assert loaded_after(f"import {', '.join(names)}", HEAVY) == []


def test_an_import_of_torch_would_be_seen() -> None:
    assert loaded_after("import torch", HEAVY) == ["torch"]


@pytest.mark.parametrize("arguments", [("--help",), ("placement", "--tp", "2", "--pp", "2", "--dp", "2")],
                         ids=lambda arguments: arguments[0])
def test_light_verbs_stay_light(arguments: tuple[str, ...]) -> None:
    watched = (*HEAVY, "numpy", "matplotlib", "submitit", "tokenizers", "safetensors")
    code = f"import sys\nfrom hpc_mp.cli.main import cli\ncli({list(arguments)!r}, standalone_mode=False)"
    assert loaded_after(code, watched) == []

    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert run(sys.executable, "-m", "hpc_mp", *arguments).returncode == 0
        seconds.append(time.perf_counter() - start)
    print(f"hpc-mp {' '.join(arguments)}: {min(seconds):.2f} s, the best of 3")
    assert min(seconds) < 2.0, "a generous guard; with a warm disk it is a few tenths"


# --- what is shipped -------------------------------------------------------------------------------------------------


def test_assets_of_a_checkout() -> None:
    assert [asset(name) for name in DATA] == [ROOT / name for name in DATA]


def test_a_missing_asset_is_named() -> None:
    with pytest.raises(HpcMpError, match=r"asset slurm/none\.j2: was not installed"):
        asset("slurm/none.j2")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_wheel_through_sdist_runs_from_another_directory(tmp_path: Path) -> None:
    """``build`` makes the sdist first and the wheel out of it, so both are tried."""
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    print(f"{wheel.name}: {wheel.stat().st_size} bytes; {sdist.name}: {sdist.stat().st_size} bytes")

    home = tmp_path / "an empty environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # the dependencies, borrowed from here

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = home / "bin" / "hpc-mp"
    assert run(command, "--version", cwd=elsewhere).stdout.strip() == f"hpc-mp, version {hpc_mp.__version__}"
    placed = run(command, "placement", "--tp", "2", "--pp", "2", "--dp", "2", "--json", cwd=elsewhere)
    assert len(json.loads(placed.stdout)["ranks"]) == 8, placed.stderr

    code = "import sys; from hpc_mp.base.assets import asset; print(*map(asset, sys.argv[1:]), sep='\\n')"
    found = run(python, "-c", code, *DATA, cwd=elsewhere).stdout.splitlines()
    assert [Path(path) for path in found] == [site / "hpc_mp" / "_assets" / name for name in DATA]
    for name in DATA:
        assert contents(site / "hpc_mp" / "_assets" / name) == contents(ROOT / name) != {}
    assert (site / "hpc_mp" / "py.typed").exists()
    scripts = {path.name: path.read_bytes() for path in (PACKAGE / "lab").glob("*.sh")}
    assert {path.name: path.read_bytes() for path in (site / "hpc_mp" / "lab").glob("*.sh")} == scripts != {}


# --- import arrows ---------------------------------------------------------------------------------------------------

ARROWS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", ARROWS, "--no-cache", "--no-logo", cwd=root)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that a test may spoil."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "hpc_mp", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_arrows_hold_in_an_unspoilt_copy(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("importer", "line", "imported"), [
    ("base/errors.py", "import hpc_mp.layout.placement", "hpc_mp.layout.placement"),
    ("layout/schedule/__init__.py", "import hpc_mp.cluster", "hpc_mp.cluster"),
    ("launch/__init__.py", "from hpc_mp.train import engine", "hpc_mp.train.engine"),
    ("train/rank/__init__.py", "import hpc_mp.launch", "hpc_mp.launch"),
    ("train/engine/__init__.py", "import hpc_mp.rundir", "hpc_mp.rundir"),
    ("report/__init__.py", "import hpc_mp.cli.main", "hpc_mp.cli.main"),
    ("rundir/__init__.py", "def lazily():\n    import torch", "torch"),
    ("cluster/__init__.py", "from transformers import AutoConfig", "transformers"),
    ("lab/__init__.py", "import hpc_mp.launch", "hpc_mp.launch"),
], ids=lambda value: value if value.endswith(".py") else "")
def test_a_forbidden_import_is_found(copy: Path, importer: str, line: str, imported: str) -> None:
    file = copy / "hpc_mp" / importer
    file.write_text(file.read_text() + "\n" + line + "\n")
    done = lint_imports(copy)
    module = "hpc_mp." + importer.removesuffix(".py").removesuffix("/__init__")
    assert done.returncode == 1 and f"{module} -> {imported}" in done.stdout, done.stdout + done.stderr


def test_every_room_has_its_arrows() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    (layers,) = (contract for contract in contracts if contract["type"] == "layers")
    assert {room for floor in layers["layers"] for room in floor.split(" | ")} == rooms
    (torch_free,) = (contract for contract in contracts if "torch" in contract.get("forbidden_modules", ()))
    assert set(torch_free["source_modules"]) == {f"hpc_mp.{room}" for room in rooms - {"train"} | {"__main__", "train.data"}}


# --- house rules -----------------------------------------------------------------------------------------------------


# Not meant: /home as a place that every machine has, where makers install what they make, places of a cluster in the files
# that make them there.
MAKERS = "amazon|aws-ofi-nccl|hpcx|microsoft|slurm"
SITE_PATH = re.compile(rf"(?<![\w.\-}}~])/((home|root|users?)/\w|opt/(?!({MAKERS})\b)\w|"
                       r"(work|scratch|lustre|gpfs|mnt|nfs|fsx)\b)", re.IGNORECASE)


def test_no_site_paths_in_what_is_shipped() -> None:
    files = [file for folder in (PACKAGE, *(ROOT / name for name in DATA)) for file in folder.rglob("*")
             if file.is_file() and "__pycache__" not in file.parts and "other-clouds" not in file.parts]
    found = [f"{file.relative_to(ROOT)}: {hit[0]}" for file in files for hit in SITE_PATH.finditer(file.read_text())]
    assert SITE_PATH.search('open("/home/me/x")')
    assert found == []
