"""Output of a rendered cluster as a directory for ``cyclecloud project upload`` and ``cyclecloud import_cluster``."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_mp import __version__
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.render.options import ClusterPlan
from hpc_mp.clouds.azure.render.parameters import parameters
from hpc_mp.clouds.azure.render.summary import AzureSummary, words
from hpc_mp.clouds.azure.render.workspace import RELEASE, Workspace, workspace_parameters

HERE = Path(__file__).parent
WHEELS = Path("specs", "scheduler", "cluster-init", "files")  # the scheduler's script looks for a wheel here before pip's index
PROJECT = ("project.ini", "specs", "templates", "blobs")  # copied from cyclecloud/ if they exist


def write(directory: Path, plan: ClusterPlan, summary: AzureSummary, workspace: Workspace | None,
          wheel: Path | None = None) -> tuple[Path, ...]:
    """Write the directory and return the paths of its entries.

    Args:
        wheel: wheel of hpc-mp that the cluster installs; default: from pip's index.

    Raises:
        HpcMpError: the directory is not empty or cannot be written, or the wheel is not one of hpc-mp.
    """
    if wheel and not (re.fullmatch(r"hpc_mp-\S+\.whl", wheel.name) and zipfile.is_zipfile(wheel)):
        raise HpcMpError(f"--wheel {wheel}", "is no wheel of hpc-mp",
                         "make one in a checkout: `make wheel` writes dist/hpc_mp-….whl")
    texts = {"parameters.json": as_json(parameters(plan)), "README.txt": _readme(plan, summary, workspace, wheel)}
    if workspace:
        texts["workspace.json"] = as_json(workspace_parameters(plan, workspace))
    try:
        refuse_full(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=directory) as unfinished:
            names = _fill(Path(unfinished), texts, wheel)
            for name in names:
                Path(unfinished, name).rename(directory / name)
    except OSError as error:
        raise HpcMpError(f"--output {directory}", f"cannot be written ({_reason(error)})",
                         "give a path that you may write to, with room for 1 MB") from None
    return tuple(directory / name for name in names)


def refuse_full(directory: Path) -> None:
    """Refuse an existing path that is not an empty directory.

    Raises:
        HpcMpError: the path exists and is not an empty directory.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HpcMpError(f"--output {directory}", "is there, and is no empty directory", "give another one: nothing is replaced")


def _fill(directory: Path, texts: dict[str, str], wheel: Path | None) -> tuple[str, ...]:
    """Fill the directory and return the names of its entries."""
    sources = [source for name in PROJECT if (source := asset("cyclecloud") / name).exists()]
    for source in sources:
        _copy(source, directory / source.name)
    _make_executable(directory)
    if wheel:
        (directory / WHEELS).mkdir(exist_ok=True)
        shutil.copy(wheel, directory / WHEELS)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return (*(source.name for source in sources), *texts)


def _reason(error: OSError) -> str:
    """Return the reason of an error; copytree collects (source, target, reason) of all files."""
    return str(error.args[0][0][2]) if isinstance(error, shutil.Error) else str(error.strerror)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _copy(source: Path, target: Path) -> Path:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
    return target


def _make_executable(directory: Path) -> None:
    """Make the scripts executable: some ways of installing a package drop the mode."""
    for script in directory.glob("specs/*/cluster-init/scripts/*"):
        if script.is_file() and script.read_bytes().startswith(b"#!"):
            script.chmod(0o755)


def _readme(plan: ClusterPlan, summary: AzureSummary, workspace: Workspace | None, wheel: Path | None) -> str:
    environment = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("next_steps.txt.j2").render(
        topology=parameters(plan)["HpcMpTopology"],
        summary=summary, wheel=wheel.name if wheel else "", wheels=WHEELS, words="\n".join(words(summary)),
        workspace=workspace, release=RELEASE, version=__version__,
        database=bool(plan.choices.database), lustre=plan.choices.storage == "amlfs" and not plan.choices.storage_address)
