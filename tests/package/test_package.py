"""The package around the code: what a wheel holds, what an import costs, which room may import which."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from launching import write_job
from prose import PACKAGES
from tables import table

import hpc_mp
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import TRAIN

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpc_mp"
DATA = ("slurm", "env", "cyclecloud")
OTHERS = ("lint", "lab")  # folders of these that are distributions of their own
HEAVY = ("torch", "transformers")


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Without ``PYTHONPATH``: it would have an installed package shadowed by a checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


# --- cost of an import -----------------------------------------------------------------------------------------------

LOADED = "import sys; print(*sorted({*sys.modules} & {*sys.argv[1:]}))"


def loaded_after(code: str, watched: tuple[str, ...]) -> list[str]:
    done = run(sys.executable, "-c", f"{code}\n{LOADED}", *watched)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2].split()


RANK_HALF = [("hpc_mp", "train", room) for room in (
    "rank", "checkpoint", "dry_run", "own_loop", "device", "model", "optimizer", "parallel", "pipeline", "step", "verify")]
RANK_PROGRAMS = ("hpc_mp/doctor/bench/ranks/", "hpc_mp/doctor/compute/")  # what the doctor starts on nodes


def test_everything_that_ranks_do_not_run_imports_neither_torch_nor_transformers() -> None:
    files = [file.relative_to(ROOT).with_suffix("") for file in PACKAGE.rglob("*.py") if file.name != "__main__.py"]
    files = [file for file in files if not str(file).startswith(RANK_PROGRAMS)]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files if file.parts[:3] not in RANK_HALF]
    assert {"hpc_mp.base.errors", "hpc_mp.cli", "hpc_mp.cli.main"} <= set(names)
    assert loaded_after(f"import {', '.join(names)}", HEAVY) == []


def test_the_front_door_shows_its_names_and_imports_nothing_and_an_import_would_be_seen() -> None:
    code = "import hpc_mp; assert {'submit', 'run_job', 'log', 'HpcMpError', 'RunFailed'} <= set(dir(hpc_mp))"
    assert loaded_after(code, (*HEAVY, "submitit", "click")) == []
    assert hpc_mp.HpcMpError is HpcMpError
    assert loaded_after("import torch", HEAVY) == ["torch"]


# What a rank imports when it has met the others, or never. Of these torch itself imports none.
LATER = ("transformers", "accelerate", "huggingface_hub", "safetensors", "torch._dynamo", "torch._inductor",
         "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy")


def test_a_rank_meets_the_others_without_what_builds_its_model() -> None:
    assert loaded_after("import torch, hpc_mp.train.rank.main", LATER) == []


def test_an_import_of_what_builds_a_model_would_be_seen() -> None:
    assert "transformers" in loaded_after("import torch, hpc_mp.train.rank.assemble", LATER)


# The libraries that these verbs need and may import: whatever else is there costs everybody time at each call.
LIGHT = {"--help": {"click"},
         "placement": {"click", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "rich",
                       "yaml", "tomli_w"}}
LIBRARIES = """
import sys
before = set(sys.modules)
from hpc_mp.cli.main import cli
cli({arguments!r}, standalone_mode=False)
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""


@pytest.mark.parametrize("arguments", [["--help"], ["placement", "--tp", "2", "--pp", "2", "--dp", "2"]],
                         ids=lambda arguments: arguments[0])
def test_light_verbs_stay_light(arguments: list[str]) -> None:
    """What they import is what they take their time for, on a busy machine as well."""
    done = run(sys.executable, "-c", LIBRARIES.format(arguments=arguments))
    assert done.returncode == 0, done.stderr
    imported = {*done.stdout.splitlines()[-1].split()} & packages_distributions().keys()
    assert "click" in imported and imported - {"hpc_mp"} <= LIGHT[arguments[0]]


# --- what is shipped -------------------------------------------------------------------------------------------------


def test_assets_of_a_checkout_and_a_missing_one() -> None:
    assert [asset(name) for name in DATA] == [ROOT / name for name in DATA]
    with pytest.raises(HpcMpError, match=r"asset slurm/none\.j2: is not installed"):
        asset("slurm/none.j2")


def environment_of(home: Path, wheel: Path) -> tuple[Path, Path]:
    """A new environment with the wheel and nothing else: its Python, and the folder of its packages."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    return python, Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``build`` makes the sdist first and the wheel out of it, so both are tried."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (made,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    print(f"{made.name}: {made.stat().st_size} bytes; {sdist.name}: {sdist.stat().st_size} bytes")
    return made


def test_the_wheel_runs_from_another_directory(tmp_path: Path, wheel: Path) -> None:
    python, site = environment_of(tmp_path / "an empty environment", wheel)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # the dependencies, borrowed from here

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = python.parent / "hpc-mp"
    assert run(command, "--version", cwd=elsewhere).stdout.strip() == f"hpc-mp, version {hpc_mp.__version__}"
    placed = run(command, "placement", "--tp", "2", "--pp", "2", "--dp", "2", "--json", cwd=elsewhere)
    assert len(json.loads(placed.stdout)["ranks"]) == 8, placed.stderr

    code = "import sys; from hpc_mp.base.assets import asset; print(*map(asset, sys.argv[1:]), sep='\\n')"
    found = run(python, "-c", code, *DATA, cwd=elsewhere).stdout.splitlines()
    assert [Path(path) for path in found] == [site / "hpc_mp" / "_assets" / name for name in DATA]
    for name in DATA:
        shipped = {path: text for path, text in contents(ROOT / name).items() if path.parts[0] not in OTHERS}
        assert contents(site / "hpc_mp" / "_assets" / name) == shipped != {}
    assert (site / "hpc_mp" / "py.typed").exists()


# --- without the rank half -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def control_half(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """``bin`` of an environment with the wheel and its plain dependencies: no file of a library of the rank half is in it."""
    python, site = environment_of(tmp_path_factory.mktemp("control") / "venv", wheel)
    others = "torchgen|functorch|triton|nvidia|mpi4py|hpc_mp|cyclecloud_lint"
    packages = "|".join(name.partition(".")[0] for name in TRAIN)
    left_out = re.compile(rf"({packages}|{others}|__)", re.IGNORECASE)
    for folder in map(Path, sys.path):
        for entry in folder.iterdir() if folder.name == "site-packages" else ():
            if not left_out.match(entry.name) and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return python.parent


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a job file and its text."""
    (tmp_path / "work").mkdir()
    return write_job(tmp_path / "work").parent


def test_every_library_of_the_rank_half_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {re.split(r"[<>=;]", name)[0] for name in extras["train"]} == {*TRAIN, "backports.zstd"} - {"compression.zstd"}
    assert not set(TRAIN) & {re.split(r"[<>=]", name)[0] for name in project["dependencies"]} and "hpc-mp[train]" in extras["dev"]


@pytest.mark.parametrize("words", table(__file__, "package.toml", "without_torch"), ids=" ".join)
def test_the_control_half_works_without_torch(words: tuple[str, ...], control_half: Path, work: Path) -> None:
    (work / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1:00:00\n#SBATCH --mem=0\nsrun hostname\n")
    done = run(control_half / "hpc-mp", *words, cwd=work)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("words", table(__file__, "package.toml", "needs_torch"), ids=lambda words: words[0])
def test_what_needs_torch_says_what_to_install(words: tuple[str, ...], control_half: Path, work: Path) -> None:
    (work / "runs/t/0001").mkdir(parents=True)
    shutil.copy(work / "job.toml", work / "runs/t/0001")
    done = run(control_half / "hpc-mp", *words, cwd=work)
    assert done.returncode == 2 and 'pip install "hpc-mp[train]"' in done.stderr and "Traceback" not in done.stderr, done.stderr


def installed(source: Path, control_half: Path, dist: Path) -> None:
    """Build a distribution, and install its wheel beside that of hpc-mp."""
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source)
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", control_half / "python")
    assert run(*pip, "install", "--no-deps", "--no-index", made).returncode == 0


def test_the_linter_of_templates_is_a_wheel_of_its_own(control_half: Path, tmp_path: Path) -> None:
    template = ROOT / "cyclecloud" / "templates" / "hpc-mp-slurm.txt"
    words = (control_half / "hpc-mp", "cloud", "lint", template)
    for command in (words, (control_half / "hpc-mp", "lint", template)):
        absent = run(*command, cwd=tmp_path)
        assert absent.returncode == 2 and "pip install cyclecloud-lint" in absent.stderr and not absent.stdout, absent.stderr

    installed(ROOT / "cyclecloud" / "lint", control_half, tmp_path)
    assert run(*words, cwd=tmp_path).stdout == "no findings\n"
    assert run(control_half / "hpc-mp", "lint", ROOT / "cyclecloud" / "project.ini", cwd=tmp_path).stdout == "no findings\n"


def test_the_lab_is_a_wheel_of_its_own(control_half: Path, tmp_path: Path) -> None:
    command = (control_half / "hpc-mp", "lab")
    for words in ((*command, "up"), (*command, "up", "--help"), (control_half / "hpc-mp", "cluster", "up")):
        absent = run(*words, cwd=tmp_path)
        assert (absent.returncode, absent.stdout) == (2, "") and absent.stderr.endswith(
            "lab: needs hpc-mp-lab, a package of its own that is not installed. Install it with: pip install hpc-mp-lab.\n")
    assert re.search(r"^  lab +Run a Slurm cluster", run(control_half / "hpc-mp", "--help").stdout, re.MULTILINE)
    completed = run("env", "_HPC_MP_COMPLETE=bash_complete", "COMP_WORDS=hpc-mp l", "COMP_CWORD=1", control_half / "hpc-mp")
    assert "plain,lab\n" in completed.stdout and not completed.stderr

    source = ROOT / "slurm" / "lab"
    installed(source, control_half, tmp_path)
    shown = run(*command, "up", "--help", cwd=tmp_path)
    assert shown.returncode == 0 and "--accounting" in shown.stdout, shown.stderr
    found = run(control_half / "python", "-c", "import hpc_mp_lab; print(*hpc_mp_lab.__path__)", cwd=tmp_path).stdout
    place = Path(found.strip())
    shipped = {path: text for path, text in contents(source / "hpc_mp_lab").items() if path.suffix != ".pyc"}
    assert {path: text for path, text in contents(place).items() if path.suffix != ".pyc"} == shipped
    assert not place.is_relative_to(ROOT) and len([path for path in shipped if path.suffix == ".sh"]) == 4


@pytest.mark.prove
def test_pip_installs_the_control_half_from_the_index(tmp_path: Path) -> None:
    """What a centre types, with whatever pip resolves today."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    assert run(python, "-m", "pip", "install", "--quiet", ROOT).returncode == 0
    listed = run(python, "-m", "pip", "list", "--format", "freeze").stdout.casefold()
    assert "numpy==" in listed and not any(f"{name}==" in listed.replace("-", "_") for name in TRAIN)
    assert run(python.parent / "hpc-mp", "doctor", "--check", "memory-free").returncode == 0


# --- import arrows ---------------------------------------------------------------------------------------------------

ARROWS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", ARROWS, "--no-cache", "--no-logo", cwd=root)


def copied(directory: Path) -> Path:
    """A copy of the packages that a test may spoil."""
    shutil.copy(ROOT / "pyproject.toml", directory)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


# A file, a line that does not belong there, and what it must not import. Each breaks a contract by itself, all in one copy.
FORBIDDEN = table(__file__, "package.toml", "forbidden")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    spoilt = copied(tmp_path_factory.mktemp("spoilt"))
    for importer, line, _ in FORBIDDEN:
        file = spoilt / importer
        file.write_text(file.read_text() + "\n" + line + "\n")
    return lint_imports(spoilt)


def test_the_arrows_hold_in_an_unspoilt_copy(tmp_path: Path) -> None:
    done = lint_imports(copied(tmp_path))
    assert done.returncode == 0, done.stdout
    assert not [imported for importer, _, imported in FORBIDDEN if arrow(importer, imported) in done.stdout]


@pytest.mark.parametrize(("importer", "imported"), [(importer, imported) for importer, _, imported in FORBIDDEN],
                         ids=lambda value: value if value.endswith(".py") else "")
def test_a_forbidden_import_is_found(findings: subprocess.CompletedProcess[str], importer: str, imported: str) -> None:
    assert findings.returncode == 1 and arrow(importer, imported) in findings.stdout, findings.stdout + findings.stderr


def arrow(importer: str, imported: str) -> str:
    module = importer.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{module} -> {imported}"


def test_every_room_has_its_arrows() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    layers = next(contract for contract in contracts if contract["type"] == "layers")
    assert {room for floor in layers["layers"] for room in floor.split(" | ")} == rooms
    (torch_free,) = (contract for contract in contracts if contract.get("forbidden_modules") == ["torch", "transformers"])
    assert set(torch_free["source_modules"]) == {f"hpc_mp.{room}" for room in rooms - {"train"} | {"__main__", "train.data"}}


# --- house rules -----------------------------------------------------------------------------------------------------


# Not meant: /home as a place that every machine has, where makers install what they make, places of a cluster in the files
# that make them there.
MAKERS = "amazon|aws-ofi-nccl|hpcx|microsoft|slurm"
SITE_PATH = re.compile(rf"(?<![\w.\-}}~])/((home|root|users?)/\w|opt/(?!({MAKERS})\b)\w|"
                       r"(work|scratch|lustre|gpfs|mnt|nfs|fsx)\b)", re.IGNORECASE)


def test_no_site_paths_in_what_is_shipped() -> None:
    files = [file for folder in (PACKAGE, *(ROOT / name for name in DATA)) for file in folder.rglob("*")
             if file.is_file() and "__pycache__" not in file.parts]
    found = [f"{file.relative_to(ROOT)}: {hit[0]}" for file in files for hit in SITE_PATH.finditer(file.read_text())]
    assert SITE_PATH.search('open("/home/me/x")')
    assert found == []
