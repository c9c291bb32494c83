"""What a command names that must be here: a program without which every rank would fail after hours in the queue."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import PYTHON
from hpc_mp.job import ProgramSpec

MADE_BY_SETUP = re.compile(r"\bADOPTED_(COMMAND|DIRECTORY)\b")  # variables of a job file that `hpc-mp adopt` has written


def check_files(spec: ProgramSpec, in_script: bool) -> None:
    """Refuse a command whose own files, named from its directory, are not there: all nodes see that directory as we do.

    A path from the root may be in a container, or on the nodes alone; then nobody can tell here.

    Args:
        in_script: whether a job script runs before the ranks, with ``slurm.setup`` in it.

    Raises:
        HpcMpError: a program that is not there or not executable, a script of Python that is not there, a command that only
            ``slurm.setup`` can make where that does not run, an environment to be staged that nobody knows.
    """
    command, directory = spec.program.command, Path(spec.program.directory)
    for copied in spec.program.stage:
        if not os.path.exists(copied):
            raise HpcMpError(f"program.stage: {copied}", "is not there", "name files or directories that all nodes see")
    if in_script and spec.environment.stage:
        program_python(spec)
    if not in_script and any(MADE_BY_SETUP.search(word) for word in command) and spec.slurm.setup:
        raise HpcMpError("program.command", "is made by lines of slurm.setup, which run in a job script of Slurm alone",
                         "launch it with --on slurm, or write the words themselves into program.command")
    program = command[0]
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


def _own_path(spec: ProgramSpec) -> bool:
    """Whether the program finds the PATH of this machine: nothing of the job file puts another one in its place."""
    slurm = spec.slurm
    return not (slurm.container or slurm.setup or slurm.modules or slurm.venv or slurm.conda) and "PATH" not in {
        **spec.environment.set, **spec.program.environment}


def program_python(spec: ProgramSpec) -> str:
    """The Python of the program's environment: that of ``slurm.venv`` or ``slurm.conda``, else the one that its command names.

    Raises:
        HpcMpError: nobody can tell which it is.
    """
    environment = spec.slurm.venv or spec.slurm.conda
    if environment is not None:
        return f"{environment}/bin/python"
    name = spec.program.command[0]
    found = shutil.which(name) if PYTHON.fullmatch(Path(name).name) else None
    if found is None:
        raise HpcMpError("environment.stage = true", f"packs the environment of the program's Python, and {name!r} does not say "
                         "which that is", "name it in slurm.venv or slurm.conda")
    return found


def _script(command: Sequence[str]) -> str | None:
    """The file that a plain ``python [-u …] FILE`` runs; None for all else."""
    if not PYTHON.fullmatch(command[0].rpartition("/")[2]):
        return None
    for word in command[1:]:
        if not word.startswith("-"):
            return word if word.endswith(".py") else None
        if not re.fullmatch(r"-[bBdEiIOPqsSuv]+", word):
            return None
    return None
