"""Variables that a launch line passes to its program besides words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hpc_mp.adopt.command import ProgramStart, starts_ranks
from hpc_mp.adopt.expand import FixedValues, WordPiece, fields, pieces
from hpc_mp.adopt.known import KnownShell
from hpc_mp.adopt.launches import LaunchCall
from hpc_mp.adopt.request import Request
from hpc_mp.adopt.setup import array_numbers
from hpc_mp.adopt.steps import is_for_ranks_alone
from hpc_mp.base.programs import IDENTITY
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.statements import Source

# Variables about the ranks that the script itself must pass to a program that starts its own ranks.
OF_ITS_OWN = frozenset(IDENTITY) - {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}


def with_variables(start: ProgramStart, launch: LaunchCall, source: Source, at: int, fixed: FixedValues,
                   known: KnownShell) -> tuple[ProgramStart, dict[str, str]]:
    """Return the start with the variables set in front of the command, and the variables that only the program must see."""
    front: list[WordPiece] = []
    environment = dict(start.environment)
    through_env = {each.word.text.partition("=")[0] for each in launch.call.arguments if "=" in each.word.text}
    for each in launch.call.command.assignments:
        if (each.name in IDENTITY and start.start == "rank") or each.name in through_env:
            continue
        value = fields(each.raw, fixed, value=True)
        if value is not None and each.name not in IDENTITY:
            environment[each.name] = value[0]
        else:
            front += pieces(f"{each.name}={each.raw}", fixed)
    for name, text in exported_by_srun(launch):
        if re.search(r"[$`]", text):  # only the job's shell knows it
            front += pieces(f'{name}="{text}"', fixed)
        elif name not in IDENTITY:
            environment[name] = text
    passed: dict[str, str] = {}
    alone = start.start == "node" and not starts_ranks(launch.texts)
    for statement in source.statements[:at]:
        for assigned, raw in statement.assignments:
            unknown = fields(raw, known.fixed[0], value=True) is None and assigned.name not in known.fixed[-1].texts
            apart = is_for_ranks_alone(assigned.name, launch.srun) and (unknown or assigned.appended)
            if assigned.name in statement.exported and (apart or (alone and assigned.name in OF_ITS_OWN)):
                passed[assigned.name] = f'"${{{assigned.name}-}}"'
    front += [WordPiece("batch", f"{name}={value}") for name, value in passed.items()]
    if any("OMP_NUM_THREADS" in (each.name, *statement.exported) for statement in source.statements
           for each, _ in statement.assignments) and "OMP_NUM_THREADS" in start.environment:
        environment.pop("OMP_NUM_THREADS")
    words = (WordPiece("literal", "env"), *front, *start.words) if front else start.words
    return replace(start, words=words, environment=environment), passed


def of_slurm(text: str, script: Script, request: Request, launch: LaunchCall, start: ProgramStart) -> dict[str, str]:
    """Return the Slurm variables that the program sees under the script but would miss or see changed under hpc-mp's step.

    Args:
        text: the statements of the script.
    """
    found = {f"SLURM_{name.upper().replace('-', '_')}": value for name in ("gpus", "gpus-per-node", "gpus-per-task")
             if (value := script.value(name))}
    found |= array_numbers(request)
    found = {name: value for name, value in found.items() if re.search(rf"\b{name}\b", text)}
    if start.start == "node" and not launch.srun and request.total_tasks > 1:
        found |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), f"{request.total_tasks}")
    tasks = 1 if start.start == "node" else start.ranks_per_node
    if request.cpus and tasks != request.tasks_per_node:  # the same per node, but different per task
        found["SLURM_CPUS_PER_TASK"] = f"{request.cpus}"
    return found


def exported_by_srun(launch: LaunchCall) -> Iterator[tuple[str, str]]:
    """Yield the variables that ``srun --export=ALL,NAME=VALUE`` sets, with their values as bash source text."""
    for part in re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^,'\"])+", launch.value("export") or ""):
        name, equals, value = part.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            yield name, re.sub(r"^(['\"])(.*)\1$", r"\2", value)
