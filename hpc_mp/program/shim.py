"""``python -I -m hpc_mp.program.shim NAME ARG…``: the launcher that a script calls, with a witness before each of its programs.

A script of ``program.start = "script"`` finds programs of these names first on its PATH. The launcher itself is the
site's. It gets the arguments, directory, variables and input that the script gave it, and so do the programs that it starts.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_mp.base.launchers import LAUNCHERS, program_of_mpirun
from hpc_mp.cluster.slurm.srun_words import programs_of_srun
from hpc_mp.program.witness import LAUNCH, RUN
from hpc_mp.rundir import TOKEN, RunDirectory

SHIMS, BASH_ENV = "HPC_MP_SHIMS", "HPC_MP_BASH_ENV"
# Every bash reads this first. Modules and environments put their own directories before the shims: the trap puts these back.
# What it does is in braces, without a word to the script's errors, also under `set -x`.
_BASH = """\
[[ -z "${HPC_MP_BASH_ENV-}" || ! -r "${HPC_MP_BASH_ENV-}" ]] || . "$HPC_MP_BASH_ENV"
set -o functrace
trap '{ [[ "$PATH" == "$HPC_MP_SHIMS:"* ]] || PATH="$HPC_MP_SHIMS:$PATH"; } 2>/dev/null' DEBUG
"""


def write_shims(run: RunDirectory) -> None:
    """Write the programs, and the file that every bash reads first. Raises OSError."""
    run.shims.mkdir(mode=0o700, exist_ok=True)
    for name in LAUNCHERS:
        python = shlex.quote(sys.executable)
        (run.shims / name).write_text(f'#!/bin/sh\nexec {python} -I -m hpc_mp.program.shim {name} "$@"\n', encoding="utf-8")
        (run.shims / name).chmod(0o700)
    run.bash_env.write_text(_BASH, encoding="utf-8")


def with_shims(run: RunDirectory, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a script finds the shims first."""
    earlier = {BASH_ENV: environ["BASH_ENV"]} if environ.get("BASH_ENV") else {}
    return {**environ, **earlier, SHIMS: str(run.shims), "BASH_ENV": str(run.bash_env),
            "PATH": f"{run.shims}:{environ.get('PATH', os.defpath)}"}


def main(name: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Become the launcher. Return 127 if there is none."""
    others = os.pathsep.join(entry for entry in environ.get("PATH", os.defpath).split(os.pathsep) if entry != environ.get(SHIMS))
    program = shutil.which(name, path=others)
    if program is None:
        print(f"{name}: command not found", file=sys.stderr)
        return 127
    command = [name, *arguments]
    if TOKEN in environ and RUN in environ:
        command = witnessed(command, program, RunDirectory(Path(environ[RUN])), environ)
    os.execve(program if command[0] == name else command[0], command, environ)


def witnessed(command: Sequence[str], program: str, run: RunDirectory, environ: Mapping[str, str]) -> list[str]:
    """Return the command with a witness before each program; unchanged if it starts none, or none can stand there.

    Args:
        program: the path of the launcher.
    """
    launcher, arguments = LAUNCHERS[command[0]], command[1:]
    if launcher.verb and arguments[:1] != [launcher.verb]:
        return list(command)
    if launcher.family == "other":
        return [*_witness(number_of(command, run, environ)), program, *arguments] if arguments else list(command)
    places = programs_of_srun(arguments) if launcher.family == "srun" else program_of_mpirun(arguments)
    if places is None:
        return list(command)
    words, number = list(arguments), number_of(command, run, environ)
    for place in reversed(places):
        words[place:place] = _witness(number)
    return [command[0], *words]


def number_of(command: Sequence[str], run: RunDirectory, environ: Mapping[str, str]) -> int:
    """Record a launch, and return its number in the attempt, from 1: that of the launch around it if there is one.

    Raises OSError.
    """
    if LAUNCH in environ:
        return int(environ[LAUNCH])
    record = json.dumps({"command": list(command), "directory": os.getcwd(), "host": os.uname().nodename, "time": time.time()})
    number = len(run.launch.found()) + 1
    while True:
        try:
            with open(run.launch(number), "x", encoding="utf-8") as file:
                file.write(record)
            return number
        except FileExistsError:
            number += 1


def _witness(number: int) -> list[str]:
    return [sys.executable, "-I", "-m", "hpc_mp.program.witness", str(number)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
