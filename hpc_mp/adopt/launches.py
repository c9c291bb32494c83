"""The launches in a script's text: the commands that start ranks, and the watch over their ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_mp.base.launchers import LAUNCHERS, MODULES, program_of_mpirun
from hpc_mp.base.programs import PYTHON
from hpc_mp.cluster.slurm.srun_words import programs_of_srun
from hpc_mp.lint.sbatch.statements import Source


def launches(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the launches in the text, in order: the number of the statement, and its entry in the account. bash may run others,
    with names from run time."""
    for number, statement in enumerate(source.statements):
        for command in statement.commands:
            words = [word.text for word in command.words]
            name = words[0] if words else ""
            base = name.rpartition("/")[2]
            if PYTHON.fullmatch(base) and words[1:2] == ["-m"] and words[2:3] and words[2] in MODULES:
                yield number, f"python -m {words[2]}: its ranks are not watched individually"
            elif base in LAUNCHERS and (not LAUNCHERS[base].verb or words[1:2] == [LAUNCHERS[base].verb]):
                yield number, _account(name, base, words[1:])


def _account(name: str, base: str, arguments: list[str]) -> str:
    family = LAUNCHERS[base].family
    if "/" in name:
        return f"{name} is called by its path: its ranks are not watched individually"
    if family == "other":
        return f"{base} is watched, and reports its failed rank"
    places = programs_of_srun(arguments) if family == "srun" else program_of_mpirun(arguments)
    if places is None and not any("$" in word for word in arguments):
        return f"{base} with these options: its ranks are not watched individually"
    return f"each rank that {base} starts is watched"
