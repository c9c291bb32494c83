"""The statements before the program starts: some become keys of the job file, others stay as lines of ``slurm.setup``.

A line stays if a later line, or a word of the command that the job's own shell expands, may need it. It is then kept as written
and in order. When in doubt it stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from hpc_mp.adopt.account import Fate
from hpc_mp.adopt.blanks import restored
from hpc_mp.adopt.expand import FixedValues, fields, uses
from hpc_mp.adopt.kinds import LISTS, PRINTS, VERBS, Kind, environment_part, kind_of, makes_files
from hpc_mp.adopt.known import HARMLESS, SETS, KnownShell, movers
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import IDENTITY
from hpc_mp.lint.sbatch.statements import Source, Statement

OF_THE_SHELL = re.compile(r"BASHOPTS|BASH_VERSINFO|SHELLOPTS|E?UID|PPID|IFS|HPC_MP_\w*")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
OF_PYTHON = re.compile(r"PYTHON\w+|LD_PRELOAD")  # hpc-mp's own Python would read them too
OF_GPUS = re.compile(r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK")  # srun sets them for its tasks
# Variables that are in every job's environment: an assignment to them is an export.
_ALL_EXPORT = re.compile(r"set\s+([-+])(?:[b-z]*a\w*|o\s+allexport)\b")
INHERITED = frozenset({"PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ"})


def is_for_ranks_alone(name: str, by_srun: bool) -> bool:
    """Return True if a variable must be set only for the program itself.

    Args:
        by_srun: True if the script starts its program by srun, which resets the GPU variables as hpc-mp's srun does.
    """
    return bool(OF_PYTHON.fullmatch(name) or (not by_srun and OF_GPUS.fullmatch(name)))


def with_inherited(source: Source, gpus: bool) -> Source:
    """Return the script with assignments to variables already in its environment marked as exports, which they are in bash.

    Args:
        gpus: True if the job asks for GPUs, for which Slurm sets variables.
    """
    every = False
    statements: list[Statement] = []
    for each in source.statements:
        if (allexport := _ALL_EXPORT.match(each.text)) is not None:
            every = allexport[1] == "-"
        statements.append(replace(each, exported=each.exported | {
            one.name for one, _ in each.assignments
            if every or one.name in INHERITED or (gpus and OF_GPUS.fullmatch(one.name))}))
    return replace(source, statements=tuple(statements))


@dataclass(frozen=True, slots=True)
class Disposition:
    """The treatment of a statement.

    Attributes:
        keys: dotted keys of the job file with their values; lists are appended to.
        text: its text in ``slurm.setup``; None if it is not there.
    """

    statement: Statement
    fate: Fate
    where: str
    why: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None


def environment_keys(statements: Sequence[Statement], known: KnownShell) -> dict[int, Disposition]:
    """Return the modules, conda and virtual environments that keys of ``[slurm]`` can express, by statement. The rest stay lines.

    The job script loads modules first, then conda, then the virtual environment, then it runs the lines of ``slurm.setup``.
    """
    found: dict[int, Disposition] = {}
    stage, blocked = 0, False
    rows = [(number, each, kind_of(each)) for number, each in enumerate(statements)]
    if any(kind == "environment" and environment_part(each) == "modules" and _modules(each, known.fixed[number]) is None
           for number, each, kind in rows):
        blocked = True
    for number, statement, kind in rows:
        if kind == "code":
            blocked = blocked or not _harmless(statement)
        elif kind == "assign":
            blocked = blocked or any(each.name.startswith(("MODULEPATH", "CONDA", "LMOD")) for each, _ in statement.assignments)
        elif kind == "environment":
            part = environment_part(statement)
            order = {"initial": 0, "modules": 0, "hook": 1, "conda": 1, "venv": 2}[part or "venv"]
            keys = None if blocked or order < stage else _keys_of(statement, part or "", known.fixed[number])
            if keys is None:
                blocked = True
                continue
            stage = order if part in ("conda", "venv") else stage
            found[number] = keys
            if part in ("conda", "venv"):
                stage = order + 1
    said = {key for each in found.values() for key in each.keys}
    return {number: each for number, each in found.items() if each.keys or not each.where or each.where in said}


def _harmless(statement: Statement) -> bool:
    """Return True if a statement changes nothing that modules or environments depend on."""
    names = {call.command.name for call in statement.calls}
    return statement.kind == "function_definition" or (bool(names) and names <= _QUIET_FILES)


_QUIET_FILES = frozenset({*PRINTS, "mkdir", "ulimit", "umask", "sleep", "touch", "chmod", "cp", "rm", "test", "[", "[["})
# Commands that start no program that would read the environment.
_QUIET = _QUIET_FILES | {"cd", "mv", "scontrol", "head", "module", "ml", "tail", "awk", "sed", "cut", "tr", "wc", "basename",
                         "dirname", "cat", "set", "exit", "export"}


def _modules(statement: Statement, fixed: FixedValues) -> tuple[str, ...] | None:
    """Return the modules that the statement loads; None if it does anything else."""
    words = [fields(each.source, fixed) for each in statement.calls[0].arguments]
    texts = [text for word in words for text in word or ("$",)]
    verb, names = ("load", texts[1:]) if texts[0] == "ml" else (texts[1], texts[2:])
    if texts[0] == "ml" and names[:1] and names[0] in VERBS:
        verb, names = names[0], names[1:]
    if verb in LISTS or (texts[0] == "ml" and not names):
        return ()
    if verb == "purge" or (verb in ("load", "add") and not any("$" in name or name.startswith("-") for name in names)):
        return tuple(names)
    return None


def _keys_of(statement: Statement, part: str, fixed: FixedValues) -> Disposition | None:
    if part in ("initial", "hook"):
        return Disposition(statement, Fate.REPLACED, "slurm.modules" if part == "initial" else "slurm.conda",
                           "the job script prepares its shell for that by itself")
    if part == "modules":
        names = _modules(statement, fixed)
        if names is None:
            return None
        if not names and not statement.text.endswith("purge"):
            return Disposition(statement, Fate.DROPPED, "", "it only prints; logs and status say what runs where")
        if not names:
            return Disposition(statement, Fate.REPLACED, "slurm.modules", "`module purge` comes before them in any case")
        return Disposition(statement, Fate.KEPT, "slurm.modules", "", {"slurm.modules": names})
    words = [text for each in statement.calls[0].arguments for text in fields(each.source, fixed) or ("$",)]
    if "$" in words or (part == "venv" and fixed.directory is None):
        return None
    if part == "venv":
        path = str(PurePath(fixed.directory or "/") / PurePath(words[1]).parent.parent)
        return Disposition(statement, Fate.KEPT, "slurm.venv", "", {"slurm.venv": path})
    if len(words) != 3 and not (words[0] in ("source", ".") and len(words) == 3):
        return None
    name = words[2]
    if "/" in name and not name.startswith("/"):
        if fixed.directory is None:
            return None
        name = str(PurePath(fixed.directory) / name)
    return Disposition(statement, Fate.KEPT, "slurm.conda", "", {"slurm.conda": name})


@dataclass(frozen=True, slots=True)
class Needs:
    """The command's dependencies on the lines before it.

    Attributes:
        names: variables that the job's own shell expands in the command.
        shell: True if the job's own shell builds words of the command.
        stands: variables that the launch line uses.
        words: the variables in ``stands`` that the program's own words use.
        by_srun: True if the script starts its program by srun.
        lines: statements of the launch itself that follow the lines of the setup.
    """

    names: frozenset[str]
    shell: bool
    stands: frozenset[str]
    words: frozenset[str]
    by_srun: bool
    lines: tuple[Statement, ...] = ()


def dispositions(source: Source, launch: int, known: KnownShell, needs: Needs,
                 unreadable: Collection[int | None] = (), together: Collection[int] = ()) -> list[Disposition]:
    """Return the treatment of each statement before the number ``launch``.

    Args:
        unreadable: numbers of the statements that bash cannot parse.
        together: numbers of the statements that start the program on another node.
    """
    statements = source.statements[:launch]
    keyed = {number: each for number, each in environment_keys(statements, known).items() if number not in unreadable}
    kinds: list[Kind] = ["unreadable" if number in unreadable else "together" if number in together else kind_of(each)
                         for number, each in enumerate(statements)]
    stays = {number for number, kind in enumerate(kinds) if kind in ("code", "environment") and number not in keyed}
    needed = set(needs.names)
    stays |= {number for number, each in enumerate(statements)
              if kinds[number] == "assign" and (SETS.search(each.text) or makes_files(each))}
    grown = True
    while grown:
        grown = False
        moves = bool(stays or needs.shell or needs.lines) or known.directories[launch] is None
        kept = stays | {number for number, kind in enumerate(kinds) if moves and kind in ("shell", "directory")}
        texts = [*((number, statements[number]) for number in sorted(kept)),
                 *((launch + number, each) for number, each in enumerate(needs.lines))]
        for number, statement in texts:
            names = _names_of(statement, known)
            grown = grown or not names <= needed
            needed |= names
            before = number - 1  # its exit status is read
            if _STATUS.search(statement.text) and 0 <= before < launch and kinds[before] in ("print", "assign") \
                    and before not in stays:
                stays.add(before)
                grown = True
        for number, statement in enumerate(statements):
            if kinds[number] == "assign" and number not in stays and _assignment_stays(
                    statement, number, needed | (_READ_BY_BASH if moves else set()), stays, statements, known):
                stays.add(number)
                grown = True
    found = [_disposition(number, statement, kinds[number], keyed, stays, known, moves, needs)
             for number, statement in enumerate(statements)]
    _check_lost(found, needs.lines, known)
    return found


_STATUS = re.compile(r"\$\{?(?:\?|PIPESTATUS|!(?!\w))|\$_\b")
_INDIRECT = re.compile(r"\$\{!\w")
_READ_BY_BASH = {"IFS", "CDPATH", "GLOBIGNORE", "HOME", "PWD", "OLDPWD", "OPTIND"}


def _names_of(statement: Statement, known: KnownShell) -> frozenset[str]:
    """Return the variables that a line may read: all of them if it uses indirect names or sources another file."""
    if _reads(statement) or _INDIRECT.search(statement.text):
        return known.names
    return frozenset(re.findall(r"[A-Za-z_]\w*", statement.text)) & known.names


def _check_lost(found: Sequence[Disposition], lines: Sequence[Statement], known: KnownShell) -> None:
    """Raise HpcMpError if a line that is not carried over changes the directory or sets variables that later lines read."""
    for number, each in enumerate(found):
        below = [*(later.statement for later in found[number + 1:] if later.text is not None), *lines]
        sets = {name.partition("[")[0] for name in (assigned.name for assigned, _ in each.statement.assignments)}
        for line in below if each.fate is Fate.LOST and each.text is None else ():
            names = sets & set(re.findall(r"[A-Za-z_]\w*", line.text))
            if movers(each.statement, known.movers) or names:
                raise HpcMpError(restored(each.statement.text.split("\n")[0]),
                                 f"(line {each.statement.first}) cannot be carried over, and line {line.first} would "
                                 + (f"run without {', '.join(sorted(names))}" if names else "run in another directory"),
                                 "fill in what stands in < >, or give it a line of its own")


def _assignment_stays(statement: Statement, number: int, needed: set[str], stays: set[int], statements: Sequence[Statement],
                      known: KnownShell) -> bool:
    """Return True if an assignment must be a line of the setup."""
    if not statement.assignments and not statement.exported:
        return True
    named = {each.name.partition("[")[0] for each, _ in statement.assignments} | statement.exported
    if named & needed:
        return True
    if not statement.exported or named <= set(IDENTITY):
        return False
    if not all(_fixed(each.name, raw, number, known) for each, raw in statement.assignments) \
            or statement.exported - {each.name for each, _ in statement.assignments}:
        return True
    if any(OF_THE_SHELL.fullmatch(name) for name in named):
        return True
    return any(later > number and _runs_programs(statements[later]) for later in stays)


def _fixed(name: str, raw: str, number: int, known: KnownShell) -> bool:
    return fields(raw, known.fixed[number], value=True) is not None and name in known.fixed[-1].texts


def _reads(statement: Statement) -> bool:
    """Return True if the statement sources another file, which may use any variable."""
    return any(call.command.name in ("source", ".", "eval") and not HARMLESS.search(call.arguments[-1].source.strip("\"'"))
               for call in statement.calls)


def _runs_programs(statement: Statement) -> bool:
    return any(call.command.name not in _QUIET for call in statement.calls)


def _disposition(number: int, statement: Statement, kind: Kind, keyed: Mapping[int, Disposition], stays: set[int],
                 known: KnownShell, moves: bool, needs: Needs) -> Disposition:
    if number in keyed:
        return keyed[number]
    text = statement.text + (" &" if statement.background else "")
    setup = Disposition(statement, Fate.KEPT, "slurm.setup", "as it stands", {}, text)
    match kind:
        case "print" if number not in stays:
            return Disposition(statement, Fate.DROPPED, "", "it only prints; logs and status say what runs where")
        case "trap":
            return Disposition(statement, Fate.LOST, "", "the job's shell becomes the supervisor, which takes signals and "
                                                         "queues the job "
                               "again (program.signal, program.resumes); what a trap cleans up, the program has to")
        case "unreadable":
            return Disposition(statement, Fate.LOST, "", "bash cannot read it: a name in < > has to be filled in, or "
                                                         "something is not closed")
        case "together":
            return Disposition(statement, Fate.REPLACED, "program.command", "its node is one of those of the one step")
        case "resubmit":
            return Disposition(statement, Fate.LOST, "", "a job hands in no jobs here: slurm.chain, slurm.depends and "
                               "program.resumes do that")
        case "shell":
            return setup if moves or stays else Disposition(statement, Fate.DROPPED, "", "no line of the script's shell is "
                "left for it")
        case "directory":
            return _directory(number, statement, known, moves, setup)
        case "assign":
            return _assigned(number, statement, stays, known, needs, setup)
    return setup


def _directory(number: int, statement: Statement, known: KnownShell, moves: bool, setup: Disposition) -> Disposition:
    if known.directories[number + 1] is None:
        return Disposition(statement, Fate.KEPT, "slurm.setup", "as it stands, and the program runs where it leads: that is "
                                                                "known on the "
                           "cluster alone", {}, setup.text)
    if moves:
        return Disposition(statement, Fate.KEPT, "slurm.setup, program.directory", "", {}, setup.text)
    return Disposition(statement, Fate.KEPT, "program.directory", "")


def _assigned(number: int, statement: Statement, stays: set[int], known: KnownShell, needs: Needs,
              setup: Disposition) -> Disposition:
    names = {each.name for each, _ in statement.assignments} | statement.exported
    ours = names & set(IDENTITY)
    if number in stays:
        if ours:
            return Disposition(statement, Fate.REPLACED, "slurm.setup", "the lines below still read it; every rank gets "
                "hpc-mp's own "
                               f"{', '.join(sorted(ours))}", {}, setup.text)
        return setup
    if ours == names:
        return Disposition(statement, Fate.REPLACED, "the variables of a rank", f"hpc-mp sets {', '.join(sorted(ours))} for "
            "every attempt")
    if not statement.exported and names & needs.stands:
        stands = names & needs.words and all(name in known.fixed[-1].texts for name in names)
        return Disposition(statement, Fate.REPLACED, "program.command", "its value stands in the command" if stands else
                           "what the launch line says with it, the job file says")
    if not statement.exported:
        return Disposition(statement, Fate.DROPPED, "", "nothing that is left uses it")
    keys: dict[str, str] = {}
    for each, _ in statement.assignments:
        if each.name in IDENTITY:
            continue
        apart = is_for_ranks_alone(each.name, needs.by_srun) or SECRET.search(each.name)
        table = "program.environment" if apart else "environment.set"
        keys[f"{table}.{each.name}"] = known.fixed[-1].texts[each.name][0]
    return Disposition(statement, Fate.KEPT, ", ".join(keys), "", keys)


def names_in(text: str) -> frozenset[str]:
    """Return the variables that a piece of shell text uses."""
    return uses(text)[0] | frozenset(re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", text))


_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", re.DOTALL)
_ARGUMENT = re.compile(r"(?<!\\)\$(?:[1-9@*]|\{[1-9@*][^}\s]*\}?)")


def _unquoted(found: re.Match[str]) -> str:
    """Return the part of a quoted text that bash expands, line ends included. Single-quoted text is removed, also in
    ``"$(awk '…')"``."""
    if found[0][0] == '"' and "$(" not in found[0]:
        return found[0]
    return re.sub(r"'[^']*'", lambda each: "\n" * each[0].count("\n"), found[0])


def argument_read(source: Source, statements: Iterable[Statement]) -> tuple[int, str] | None:
    """Return the first line that reads an argument of the script (``$1``, ``$@``), and that text. Functions are ignored."""
    for statement in statements:
        if statement.kind == "function_definition":
            continue
        plain = _QUOTED.sub(_unquoted, statement.text)
        for number, line in enumerate(plain.split("\n"), start=statement.first):
            if number not in source.comments and (found := _ARGUMENT.search(re.sub(r"(^|\s)#.*", "", line))):
                return number, found[0]
    return None
