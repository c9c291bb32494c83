"""``adopt``: from a job script to a job file that runs it, with an account of every line.

A script that consists of one srun launch becomes ``[program]``: its ranks have the numbers and places of hpc-mp.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.adopt.account import Fate, LineFate, job_tree, joined
from hpc_mp.adopt.request import Request, name_keys, read_request, script_keys, size_fates
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.launchers import LAUNCHERS, MODULES, program_of_mpirun
from hpc_mp.base.programs import PYTHON
from hpc_mp.cluster.slurm.allocation import ARRAY_ELEMENT
from hpc_mp.cluster.slurm.option_syntax import parse, programs_of_srun, syntax
from hpc_mp.job import ProgramSpec
from hpc_mp.job.load import resolve_any
from hpc_mp.launch.program.launchers import check_command, launcher
from hpc_mp.lint.sbatch.rules.form import bash_refusal
from hpc_mp.lint.sbatch.script import Script, read_script
from hpc_mp.lint.sbatch.shell import SHELLS, for_a_shell
from hpc_mp.lint.sbatch.statements import Source, read_statements

EXPANDED = re.compile(r"[$`*?\[\]{}~<>|&;()!#\\\n]")  # characters that bash interprets
LOGIN_SHELL = re.compile(r"#!.*\s(-\w*l|--login\b)")  # it reads the user's profile, from which programs have their variables
WITHOUT_EFFECT = frozenset({"kill-on-bad-exit", "label", "unbuffered", "nodes", "ntasks", "ntasks-per-node"})
OF_THE_JOB = frozenset({"account", "comment", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres",
                        "job-name", "mail-type", "mail-user", "mem", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
                        "partition", "qos", "requeue", "reservation", "time"})


def literal_keys(source: Source, request: Request) -> dict[str, Any] | None:
    """Return the keys of ``[program]`` and its sizes; None for any other script."""
    statement = source.statements[0] if len(source.statements) == 1 else None
    if statement is None or statement.kind != "command" or statement.background or EXPANDED.search(statement.text) \
            or LOGIN_SHELL.match(source.text):
        return None
    call = statement.commands[0]
    if call.words[0].text != "srun" or call.prefixes or call.assignments or not request.options <= OF_THE_JOB:
        return None
    options, program = parse(call.words[1:], syntax("srun"), permute=False)
    command = [word.text for word in program]
    nodes, tasks = request.nodes, request.tasks_per_node
    sizes = {"nodes": nodes, "ntasks": (nodes or 0) * tasks, "ntasks-per-node": tasks}
    if not command or nodes is None or request.ntasks not in (None, nodes * tasks) or launcher(command) is not None \
            or command[0].rpartition("/")[2] in SHELLS:
        return None
    if any(option.name not in WITHOUT_EFFECT or (option.name in sizes and option.value != str(sizes[option.name]))
           for option in options):
        return None
    gpus = request.gpus
    if gpus is not None and (gpus.count != tasks or gpus.others or gpus.form == "auto"):
        return None
    keys: dict[str, Any] = {"job.nodes": nodes, "job.ranks_per_node": tasks, "program.command": tuple(command),
                            "slurm.gpu_request": gpus.form if gpus else "none"}
    if gpus is not None and gpus.type:
        keys["slurm.gpu_type"] = gpus.type
    keys["slurm.extra.cpus-per-task"] = request.cpus or False  # else each rank would get its share of a node
    for name, others in (("exclusive", ("oversubscribe",)), ("mem", ("mem-per-cpu", "mem-per-gpu"))):
        if not any(f"slurm.extra.{other}" in request.keys for other in (name, *others)):
            keys[f"slurm.extra.{name}"] = False  # else the job would request whole nodes and all their memory
    return keys


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


_ARGUMENT = re.compile(r"(?<!\\)\$(?:[1-9@*]|\{[1-9@*])")
_PLACEHOLDER = re.compile(r"(?<![<0-9&])<(?! )[A-Za-z][^<>\n|;&()$]*(?<! )>(?!>)|\{\{[^{}\n]*\}\}")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")


@dataclass(frozen=True, slots=True)
class AdoptedJob:
    """A script converted to a job file."""

    tree: Mapping[str, Any]  # the job file's tables
    spec: ProgramSpec  # the validated job file, with absolute paths
    account: tuple[LineFate, ...]  # the fate of every line, in order
    notes: tuple[str, ...]  # remarks about the whole job

    @property
    def lost(self) -> tuple[LineFate, ...]:
        return tuple(line for line in self.account if line.fate is Fate.LOST)


def adopt(text: str, *, directory: Path, job_directory: Path, file: Path, arguments: Sequence[str] = ()) -> AdoptedJob:
    """Convert a script to a job file.

    Args:
        text: the text of the script.
        directory: the directory in which sbatch would be called.
        job_directory: the directory of the job file.
        file: the path of the script.
        arguments: the arguments that sbatch would pass to the script.

    Raises:
        HpcMpError: sbatch would refuse the script, or a job file cannot express its request.
    """
    if not text.startswith("#!"):
        raise HpcMpError(str(file), "does not begin with #!: sbatch refuses it", "make #!/bin/bash its first line")
    if "\r\n" in text:
        raise HpcMpError(str(file), "has DOS line ends (CR LF): sbatch refuses it", f"sed -i 's/\\r$//' {file}")
    script = read_script(text.replace("\0", ""), directory=directory, version=None)
    source = read_statements("\n".join(script.lines)) if for_a_shell(script.lines[0]) else Source(script.text, (), frozenset())
    request = read_request(script)
    begins = os.path.normpath(directory / (request.directory or "."))
    keys = literal_keys(source, request) if not arguments else None
    if keys is not None:
        body = [LineFate(statement.first, statement.last, statement.text, Fate.REPLACED, "program.command",
                         "hpc-mp starts its ranks") for statement in source.statements]
        fates = [*request.fates, *size_fates(script, literal=True), *body]
    else:
        keys = script_keys(script, request, file.absolute(), arguments, directory)
        fates = [*request.fates, *size_fates(script, literal=False), *_body(script, source)]
    keys = {**request.keys, **name_keys(script, request, file), **keys, "program.directory": begins}
    tree = job_tree(keys, job_directory)
    spec = resolve_any(tree, job_directory)
    assert isinstance(spec, ProgramSpec)  # it has [program]
    check_command(spec)
    account = joined((*_form(script, source), *fates), script.lines)
    return AdoptedJob(tree, spec, account, tuple(_notes(script, source, request, arguments)))


def _form(script: Script, source: Source) -> Iterator[LineFate]:
    """Yield the fates of the first line, and of the lines that neither sbatch nor the shell reads."""
    yield LineFate(1, 1, script.lines[0], Fate.KEPT, "program.command", "")
    directives = {option.line for component in script.header.components for option in component}
    directives |= {word.line for word in script.header.strays} | set(script.header.unmatched)
    comments = {number for number, line in enumerate(script.lines, start=1)
                if line.lstrip().startswith("#") and number < script.header.end} | set(source.comments)
    for number in sorted(comments - directives - {1}):
        line = script.lines[number - 1].strip()
        ignored = re.match(r"#+\s*SBATCH\b", line, re.IGNORECASE)
        other = re.match(r"#(PBS|BSUB)\s+-", line) is not None and number < script.header.end
        late = ignored is not None and number > script.header.end
        why = ("sbatch reads some options of other schedulers in this form: set its request in the job file" if other
               else f"sbatch reads no directive after the first command (line {script.header.end})" if late
               else "sbatch treats it as a comment" if ignored else "a comment")
        if line.startswith("#"):  # else it follows a statement on the same line
            yield LineFate(number, number, line, Fate.LOST if other else Fate.DROPPED, "", why)


def _body(script: Script, source: Source) -> Iterator[LineFate]:
    """Yield the fates of the lines that the script's interpreter runs."""
    if not source.statements:
        for number, line in enumerate(script.lines, start=1):
            if number >= script.header.end and number > 1 and line.strip():
                yield LineFate(number, number, line, Fate.KEPT, "program.command", "its interpreter runs it")
        return
    unreadable = bash_refusal(script.text)
    faulty = next((statement for statement in source.statements if unreadable and (
        statement.kind == "ERROR" or statement.first <= unreadable[0] <= statement.last)), source.statements[-1])
    accounts: dict[int, list[str]] = {}
    for number, account in launches(source):
        accounts.setdefault(number, []).append(account)
    for number, statement in enumerate(source.statements):
        blank = _PLACEHOLDER.search(_QUOTED.sub("x", statement.text)) if statement.kind != "heredoc" else None
        if unreadable is not None and statement is faulty:
            why = f"bash cannot parse line {unreadable[0]}: {unreadable[1]} (bash -n FILE)"
        elif blank is not None and "<<" not in statement.text:
            why = f"{blank[0]} is a placeholder to fill in: bash parses it as a redirection"
        else:
            why = "; ".join(dict.fromkeys(accounts.get(number, ()))) or "bash runs it unchanged"
            yield LineFate(statement.first, statement.last, statement.text, Fate.KEPT, "program.command", why)
            continue
        yield LineFate(statement.first, statement.last, statement.text, Fate.LOST, "program.command", why)


def _notes(script: Script, source: Source, request: Request, arguments: Sequence[str]) -> Iterator[str]:
    text = "\n".join(line for number, line in enumerate(script.lines, start=1) if number not in source.comments)
    if "job.time_limit" not in request.keys:
        yield "the script sets no time limit: job.time_limit is 1 hour; set it"
    if not arguments and (argument := _argument_read(source)) is not None:
        yield (f"line {argument[0]} reads {argument[1]}, an argument of the script: pass the arguments after the script "
               "(hpc-mp adopt SCRIPT -- ARG…)")
    if own := re.search(r"^[^#\n]*(\$\{?(0|BASH_SOURCE)\b\}?)", text, re.MULTILINE):
        yield (f"the script reads {own[1]}: by sbatch that is a copy in slurmd's directory on the node, by hpc-mp a copy in the "
               "run directory; write the path of what the script needs beside it")
    if request.nodes is None and request.ntasks and request.ntasks > 1:
        yield f"--ntasks={request.ntasks} without --nodes: Slurm may spread them, but the job has one node; set job.nodes"
    if request.nodes is None and not request.ntasks:
        yield "the script sets no number of nodes: job.nodes is 1; set it if sbatch was called with --nodes"
    if not request.elements and script.value("array") is None and re.search(rf"^[^#\n]*\b{ARRAY_ELEMENT}\b", text, re.MULTILINE):
        yield f"the script reads {ARRAY_ELEMENT} but has no array: write [sweep] for the --array of the sbatch call"
    if "scontrol requeue" in text:
        yield "the script requeues itself: set program.resumes = true if the program continues from its saved state"
    if any(script.commands("sbatch")):
        yield "the script submits other jobs: adopt their scripts too"


def _argument_read(source: Source) -> tuple[int, str] | None:
    """Return the first line that reads an argument of the script, and its form there. Functions have their own arguments."""
    for statement in source.statements:
        if statement.kind == "function_definition":
            continue
        for number, line in enumerate(statement.text.split("\n"), start=statement.first):
            plain = re.sub(r"(^|\s)#.*", "", re.sub(r"'[^']*'", "", line))
            if number not in source.comments and (match := _ARGUMENT.search(plain)):
                return number, match[0]
    return None
