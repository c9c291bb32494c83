"""Launchers that come first on a script's PATH: they start the site's own launchers, with a witness before each program.

A shim is a small Python program, because a shell between bash and the launcher could drop a variable. The launcher and its
programs get the arguments, directory, variables and input from the script.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_mp.base.assets import asset
from hpc_mp.base.launchers import LAUNCHERS, program_of_mpirun
from hpc_mp.cluster.slurm.option_syntax import programs_of_srun
from hpc_mp.program.witness import ATTEMPT, LAUNCH, RESTORED, RUN, Witness
from hpc_mp.rundir import TOKEN, RunDirectory

SUBMITTERS = ("sbatch", "salloc")  # a job that the script submits is not ours
STARTING = "HPC_MP_STARTING"  # set for an mpirun, which may start its daemons by srun
FORWARDS = "HPC_MP_FORWARDS"  # "1": Slurm signals only the direct children of slurmstepd (proctrack/cgroup)
MARK = ".shims"  # a file in each directory of shims
LONGEST_LINE = 120  # of the kernel, for `#!`
# Every bash reads this file first. Modules and environments put their directories before the shims; the trap restores the order.
# Braces hide both lines from `bash -x`. The trap reads no variable but PATH. It does nothing in an image without our Python.
_EARLIER = """\
{{ [[ ! -r {earlier} ]]; }} 2>/dev/null || . {earlier}
"""
_BASH = """\
{{
[[ ! -x {python} ]] || trap '{{ [[ "${{PATH-}}" == {shims}:* ]] || PATH={shims}:"${{PATH-}}"; }} 2>/dev/null' DEBUG
}} 2>/dev/null
"""


def write_shims(run: RunDirectory, environ: Mapping[str, str]) -> None:
    """Write the programs, and the file that every bash reads first. Raises OSError. ``environ``: the script's variables; BASH_ENV
    in them may name another file."""
    run.shims.mkdir(mode=0o700, exist_ok=True)
    (run.shims / MARK).touch()
    text = asset("slurm/launcher-shim").read_text(encoding="utf-8").format(interpreter=_interpreter(sys.executable), mark=MARK)
    for name in (*LAUNCHERS, *SUBMITTERS):
        (run.shims / name).write_text(text, encoding="utf-8")
        (run.shims / name).chmod(0o700)
    earlier = environ.get("BASH_ENV", "")
    words = {"earlier": earlier if earlier != str(run.bash_env) else "", "python": sys.executable, "shims": str(run.shims)}
    inner = shlex.quote(words["shims"]).replace("'", "'\\''")  # within the quotes of the trap
    first = _EARLIER.format(earlier=shlex.quote(words["earlier"])) if words["earlier"] else ""
    run.bash_env.write_text(first + _BASH.format(python=shlex.quote(words["python"]), shims=inner), encoding="utf-8")


def _interpreter(python: str) -> str:
    """Return the first line of a shim: Python itself, or sh if Python's path has a blank or is too long for the kernel."""
    if " " not in python and len(python) < LONGEST_LINE:
        return f"{python} -PE"
    return f"/bin/sh\n'''exec' {shlex.quote(python)} -PE \"$0\" \"$@\"\n' '''"


def with_shims(run: RunDirectory, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the shims first on PATH."""
    return {**environ, "BASH_ENV": str(run.bash_env), "PATH": f"{run.shims}:{environ.get('PATH', os.defpath)}"}


def main(name: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Become the launcher. Return 127 if it does not exist."""
    entries = environ.get("PATH", os.defpath).split(os.pathsep)
    others = os.pathsep.join(entry for entry in entries if not os.path.exists(os.path.join(entry or ".", MARK)))
    program = shutil.which(name, path=others)
    if program is None:
        print(f"{name}: command not found", file=sys.stderr)
        return 127
    command, variables = [name, *arguments], dict(environ)
    if name in SUBMITTERS:
        variables = without_us(environ) | {"PATH": others}
    elif STARTING not in environ and (witness := _witness(environ)) is not None:
        command = witnessed(command, program, witness)
        if LAUNCHERS[name].family == "mpi":
            variables |= {STARTING: "1", "PATH": others}
    for number in RESTORED:
        signal.signal(number, signal.SIG_DFL)
    os.execve(program if command[0] == name else command[0], command, variables)


def without_us(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that assign a process to the run."""
    return {name: value for name, value in environ.items() if not name.startswith("HPC_MP_") and not (
        name == "BASH_ENV" and value == str(RunDirectory(Path(environ.get(RUN, "/"))).bash_env))}


def _witness(environ: Mapping[str, str]) -> Witness | None:
    """Return the witness of a launch's tasks; None outside of the run's job."""
    if not {RUN, TOKEN, ATTEMPT} <= environ.keys() or environ.get("SLURM_JOB_ID", "") not in ("", environ[TOKEN].split(".")[0]):
        return None
    forwards = environ.get(FORWARDS) == "1"
    return Witness(environ[RUN], environ[TOKEN], int(environ[ATTEMPT]), int(environ.get(LAUNCH, 0)), "srun", forwards)


def witnessed(command: Sequence[str], program: str, witness: Witness) -> list[str]:
    """Return the command with a witness before each program; unchanged if it starts no program, or a witness is impossible.
    ``program``: the path of the launcher."""
    launcher, arguments = LAUNCHERS[command[0]], command[1:]
    if launcher.verb and arguments[:1] != [launcher.verb]:
        return list(command)
    if launcher.family == "other":
        return [*witness.of(number_of(command, witness), "other"), program, *arguments] if arguments else list(command)
    places = programs_of_srun(arguments) if launcher.family == "srun" else program_of_mpirun(arguments)
    if places is None:
        return list(command)
    words, number = list(arguments), number_of(command, witness)
    for place in reversed(places):
        words[place:place] = witness.of(number, launcher.family)
    return [command[0], *words]


def number_of(command: Sequence[str], witness: Witness) -> int:
    """Record a launch, and return its number in the attempt, from 1; inside of another launch, return that launch's number.
    Raises OSError."""
    if witness.launch:
        return witness.launch
    run = RunDirectory(Path(witness.run))
    record = json.dumps({"command": list(command), "directory": os.getcwd(), "host": os.uname().nodename, "time": time.time()})
    number = len(run.launch.found()) + 1
    while True:
        try:
            with open(run.launch(number), "x", encoding="utf-8") as file:
                file.write(record)
            return number
        except FileExistsError:
            number += 1
