"""Check of the files that a program's command names: without them every rank would fail after hours in the queue."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import PYTHON
from hpc_mp.job import ProgramSpec


def check_files(spec: ProgramSpec, in_script: bool) -> None:
    """Refuse a command whose own files, named relative to its directory, are missing. All nodes see that directory as we do.

    An absolute path may be in a container, or only on the nodes; it cannot be checked here. ``in_script``: True if a job script
    with ``slurm.setup`` runs before the ranks. Raises HpcMpError if a program is missing or not executable, a script is missing,
    or an environment to stage is unknown.
    """
    command, directory = spec.program.command, Path(spec.program.directory)
    for source in spec.program.stage:
        if not os.path.exists(source):
            raise HpcMpError(f"program.stage: {source}", "does not exist", "name files or directories that all nodes see")
    if in_script and spec.environment.stage:
        program_python(spec)
    program = command[0]
    if spec.by_script:
        _check_job_script(directory / program)
        return
    if "/" in program and not program.startswith("/"):
        path = directory / program
        if not path.exists():
            raise HpcMpError(f"program.command[0] = {program!r}", f"is not in {directory}",
                             "name a program of that directory (program.directory), or one on PATH without a slash")
        if not os.access(path, os.X_OK) or path.is_dir():
            raise HpcMpError(f"program.command[0] = {program!r}", f"is not executable ({path})",
                             "name its interpreter before it (python, bash), or make it executable: chmod +x")
    if "/" not in program and _own_path(spec) and (directory / program).is_file() and shutil.which(program) is None:
        raise HpcMpError(f"program.command[0] = {program!r}", f"is a file of {directory}, and a name without a slash is looked "
                         "up on PATH", f"write ./{program}, or its interpreter before it (python, bash)")
    script = _script(command)
    if script is not None and not script.startswith("/") and not (directory / script).exists():
        raise HpcMpError(f"program.command: {script}", f"is not in {directory}",
                         "name a script that is there, or its directory in program.directory")


def _check_job_script(path: Path) -> None:
    """Refuse a job script that cannot be read, or that its first line does not name an interpreter for. Raises HpcMpError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError as error:
        raise HpcMpError(f"program.command[0] = {str(path)!r}", f"cannot be read ({error.strerror})",
                         "name the job script that is given to sbatch") from None
    if not first.startswith("#!"):
        raise HpcMpError(f"program.command[0] = {str(path)!r}", "does not begin with #!, so that sbatch refuses it",
                         "write #!/bin/bash into its first line")


def _own_path(spec: ProgramSpec) -> bool:
    """Return True if the program gets the PATH of this machine: the job file does not replace it."""
    slurm = spec.slurm
    return not (slurm.container or slurm.setup or slurm.modules or slurm.venv or slurm.conda) and "PATH" not in {
        **spec.environment.set, **spec.program.environment}


def program_python(spec: ProgramSpec) -> str:
    """Return the Python of the program's environment: that of ``slurm.venv`` or ``slurm.conda``, else the one in its command.
    Raises HpcMpError if it cannot be determined."""
    environment = spec.slurm.venv or spec.slurm.conda
    if environment is not None:
        return f"{environment}/bin/python"
    name = spec.program.command[0]
    path = shutil.which(name) if PYTHON.fullmatch(Path(name).name) else None
    if path is None:
        raise HpcMpError("environment.stage = true", f"packs the environment of the program's Python, and {name!r} does not say "
                         "which that is", "name it in slurm.venv or slurm.conda")
    return path


def _script(command: Sequence[str]) -> str | None:
    """Return the file that a plain ``python [-u …] FILE`` runs; None for other commands."""
    if not PYTHON.fullmatch(command[0].rpartition("/")[2]):
        return None
    for word in command[1:]:
        if not word.startswith("-"):
            return word if word.endswith(".py") else None
        if not re.fullmatch(r"-[bBdEiIOPqsSuv]+", word):
            return None
    return None
