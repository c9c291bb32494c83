"""A rendered cluster as a directory that ``cyclecloud project upload`` and ``cyclecloud import_cluster`` take."""

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
WHEELS = Path("specs", "scheduler", "cluster-init", "files")  # where the scheduler's script looks for one before it asks an index
PROJECT = ("project.ini", "specs", "templates", "blobs")  # of cyclecloud/; blobs where there are some


def write(directory: Path, plan: ClusterPlan, summary: AzureSummary, workspace: Workspace | None,
          wheel: Path | None = None) -> tuple[Path, ...]:
    """What was written, directories as such.

    Args:
        wheel: of hpc-mp, which the cluster installs; default: it asks pip's index.

    Raises:
        HpcMpError: the directory is there and not empty, or cannot be written; the wheel is none of hpc-mp.
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
    """
    Raises:
        HpcMpError: something is there that is no empty directory.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HpcMpError(f"--output {directory}", "is there, and is no empty directory", "give another one: nothing is replaced")


def _fill(directory: Path, texts: dict[str, str], wheel: Path | None) -> tuple[str, ...]:
    """What lies in the directory then, by name."""
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
    """copytree gathers those of all files: (source, target, words) each."""
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
    """Not every way of installing a package keeps that."""
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
