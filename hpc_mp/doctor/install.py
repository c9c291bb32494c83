"""Installation of the health check on a node: one archive with all its code, and the script that Slurm calls."""

import io
import json
import re
import shlex
import stat
import zipfile
from dataclasses import dataclass
from modulefinder import ModuleFinder
from pathlib import Path

import hpc_mp
from hpc_mp.base.assets import asset
from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.packed import node_table
from hpc_mp.catalogue import PACKED_ROWS
from hpc_mp.catalogue.read import own_files, read_rows
from hpc_mp.cluster.node.mounts import SHARED, type_at
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.cluster.slurm.records import find_settings

ARCHIVE, SCRIPT = "hpc-mp-health.pyz", "hpc-mp-health"
PROGRAM = "hpc_mp.doctor.health"
PACKED_TABLES = ("node-checks", "xids")
_READ_HERE = ["hpc_mp.base.assets", "hpc_mp.catalogue.read"]  # they need tomllib or pydantic: their results are packed instead
_MAIN = f"import sys\nfrom {PROGRAM} import main\nsys.exit(main())\n"


@dataclass(frozen=True)
class Installed:
    """The result of an installation. ``chained``: the former HealthCheckProgram, which still runs."""

    script: Path
    chained: str | None


def install(directory: Path, chain: str | None, drain: bool, ask: Runner = ask, source: NodeSource | None = None) -> Installed:
    """Write both files, unless they are up to date. An existing HealthCheckProgram of Slurm is chained, never dropped. Raises
    HpcMpError if the directory is on a network file system or cannot be written."""
    directory = directory.absolute()
    if (type_ := type_at(source or NodeSource(), directory)) in SHARED:  # also behind a symlink or an automounter
        raise HpcMpError(f"--install {directory}", f"is on {type_}: the check would hang with the file server",
                         "name a directory on the node's own disk, such as /usr/local/libexec, in the image of the nodes")
    chained = chain or _present(directory, ask)
    options = (f" --chain {shlex.quote(chained)}" if chained else "") + (" --drain" if drain else "")
    script = asset("slurm/health-check.sh").read_text(encoding="utf-8").format(
        archive=shlex.quote(str(directory / ARCHIVE)), options=options,
        otherwise=f"exec {shlex.quote(chained)}" if chained else "exit 1")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        pack(directory / ARCHIVE)
        _write(directory / SCRIPT, script.encode(), 0o755)
    except OSError as error:
        raise HpcMpError(str(error.filename or directory), f"cannot be written ({error.strerror})",
                         "name a directory on the node's own disk, such as /usr/local/libexec, and run as root") from None
    return Installed(directory / SCRIPT, chained)


def pack(archive: Path) -> None:
    """Write one file that Python runs, with the catalogue of machines and the tables of ``env`` as JSON. Equal sources and rows
    give equal bytes."""
    root = Path(hpc_mp.__file__).parent
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
        for file in packed():
            pack.writestr(zipfile.ZipInfo(f"hpc_mp/{file.relative_to(root)}"), file.read_bytes(), zipfile.ZIP_DEFLATED)
        for name, table in ((PACKED_ROWS, read_rows(own_files())), *((name, node_table(name)) for name in PACKED_TABLES)):
            pack.writestr(zipfile.ZipInfo(f"hpc_mp/{name}.json"), json.dumps(table), zipfile.ZIP_DEFLATED)
    _write(archive, content.getvalue(), 0o644)


def packed() -> list[Path]:
    """Return the health check's own file and every file of this package that it imports, directly or not, sorted by path."""
    finder = ModuleFinder([str(Path(hpc_mp.__file__).parents[1])], excludes=_READ_HERE)
    finder.import_hook(PROGRAM)
    files = (module.__file__ for module in finder.modules.values())  # type: ignore[attr-defined]
    return sorted(Path(file) for file in files if file)


def _present(directory: Path, ask: Runner) -> str | None:
    """Return the program to chain: Slurm's current one, or the one that our previously installed script already chains."""
    script = directory / SCRIPT
    match = re.search(r"--chain ('[^']*'|\S+)", script.read_text(encoding="utf-8")) if script.exists() else None
    if match:
        return shlex.split(match[1])[0]
    program = find_settings(ask).get("HealthCheckProgram")
    return program if program and Path(program).name != SCRIPT else None


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write the file unless its content and mode are already right: Slurm may be running it."""
    if path.is_file() and path.read_bytes() == content and stat.S_IMODE(path.stat().st_mode) == mode:
        return
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(mode)
    new.replace(path)
