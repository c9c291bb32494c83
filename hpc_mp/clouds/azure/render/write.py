"""Output of a rendered cluster as a directory for ``cyclecloud project upload`` and ``cyclecloud import_cluster``."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import StrictUndefined, Template

from hpc_mp import __version__
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.render.options import parameters
from hpc_mp.clouds.azure.render.summary import AzureSummary
from hpc_mp.clouds.azure.render.workspace import RELEASE, Workspace, workspace_parameters

WHEELS = Path("specs", "scheduler", "cluster-init", "files")  # the scheduler's script looks for a wheel here before pip's index


def write(directory: Path, summary: AzureSummary, workspace: Workspace | None, wheel: Path | None = None) -> tuple[Path, ...]:
    """Write the directory and return the paths of its entries. ``wheel``: wheel of hpc-mp that the cluster installs; default:
    from pip's index. Raises HpcMpError if the directory is not empty or cannot be written, or the wheel is not one of hpc-mp."""
    if wheel and not (re.fullmatch(r"hpc_mp-\S+\.whl", wheel.name) and zipfile.is_zipfile(wheel)):
        raise HpcMpError(f"--wheel {wheel}", "is not a wheel of hpc-mp",
                         "build one in a checkout: `make wheel` writes dist/hpc_mp-….whl")
    documents = {"parameters.json": parameters(summary.plan)}
    if workspace:
        documents["workspace.json"] = workspace_parameters(summary.plan, workspace)
    texts = {name: json.dumps(values, indent=2) + "\n" for name, values in documents.items()}
    texts["README.txt"] = _readme(summary, workspace, wheel)
    try:
        refuse_full(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=directory) as unfinished:
            _fill(Path(unfinished), texts, wheel)
            return tuple(path.rename(directory / path.name) for path in sorted(Path(unfinished).iterdir()))
    except OSError as error:  # copytree collects (source, target, reason) of all files
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise HpcMpError(f"--output {directory}", f"cannot be written ({reason})",
                         "use a path that you may write to, with room for 1 MB") from None


def refuse_full(directory: Path) -> None:
    """Raise HpcMpError if the path exists and is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HpcMpError(f"--output {directory}", "exists and is not an empty directory", "use another one: nothing is replaced")


def _fill(directory: Path, texts: dict[str, str], wheel: Path | None) -> None:
    """Copy the project, and make its scripts executable: some ways of installing a package drop the mode."""
    for folder in ("specs", "templates"):
        shutil.copytree(asset("cyclecloud") / folder, directory / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(asset("cyclecloud") / "project.ini", directory)
    for script in directory.glob("specs/*/cluster-init/scripts/*"):
        if script.is_file() and script.read_bytes().startswith(b"#!"):
            script.chmod(0o755)
    if wheel:
        (directory / WHEELS).mkdir(exist_ok=True)
        shutil.copy(wheel, directory / WHEELS)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")


def _readme(summary: AzureSummary, workspace: Workspace | None, wheel: Path | None) -> str:
    text = Path(__file__).with_name("next_steps.txt.j2").read_text(encoding="utf-8")
    template: Template = Template(text, undefined=StrictUndefined, keep_trailing_newline=True)
    return template.render(
        summary=summary, choices=summary.plan.choices, parameters=parameters(summary.plan), workspace=workspace, release=RELEASE,
        version=__version__, wheel=wheel.name if wheel else "", wheels=WHEELS, words="\n".join(summary.words()))
