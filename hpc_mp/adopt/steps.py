"""What a script does before its program starts: what becomes a key of the job file, and what stays as lines of ``slurm.setup``.

A line stays where a later one, or a word of the command that the job's own shell expands, may need it; it then stands there as
it was written and in its order. When in doubt it stays.
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
OF_PYTHON = re.compile(r"PYTHON\w+|LD_PRELOAD")  # would be read by hpc-mp's own Python too
OF_GPUS = re.compile(r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK")  # srun sets them anew for its tasks
# What every environment of a job has: to set it is to export it.
_ALL_EXPORT = re.compile(r"set\s+([-+])(?:[b-z]*a\w*|o\s+allexport)\b")
INHERITED = frozenset({"PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ"})


def is_for_ranks_alone(name: str, by_srun: bool) -> bool:
    """Whether a variable has to be set for the program itself.

    Args:
        by_srun: the script starts its program by srun, which sets its GPUs' variables anew as ours does.
    """
    return bool(OF_PYTHON.fullmatch(name) or (not by_srun and OF_GPUS.fullmatch(name)))


def with_inherited(source: Source, gpus: bool) -> Source:
    """The script with assignments to variables that its environment has as exports, which they are.

    Args:
        gpus: the job asks for GPUs, of which Slurm sets variables.
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
    """What becomes of a statement.

    Attributes:
        keys: dotted keys of the job file with their values; those of lists are added to.
        text: what stands in ``slurm.setup``; None: nothing.
    """

    statement: Statement
    fate: Fate
    where: str
    why: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None


def environment_keys(statements: Sequence[Statement], known: KnownShell) -> dict[int, Disposition]:
    """The modules, the conda environment and the virtual environment that keys of ``[slurm]`` can say; the others stay as lines.

    The job script has modules first, then conda, then the virtual environment, then the lines of ``slurm.setup``.
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
    """Whether a statement changes nothing that modules or environments depend on."""
    names = {call.command.name for call in statement.calls}
    return statement.kind == "function_definition" or (bool(names) and names <= _QUIET_FILES)


_QUIET_FILES = frozenset({*PRINTS, "mkdir", "ulimit", "umask", "sleep", "touch", "chmod", "cp", "rm", "test", "[", "[["})
# What starts no program that would read the environment.
_QUIET = _QUIET_FILES | {"cd", "mv", "scontrol", "head", "module", "ml", "tail", "awk", "sed", "cut", "tr", "wc", "basename",
                         "dirname", "cat", "set", "exit", "export"}


def _modules(statement: Statement, fixed: FixedValues) -> tuple[str, ...] | None:
    """The names that it loads; None where it does anything else."""
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
    """What the command needs of the lines before it.

    Attributes:
        names: variables that the job's own shell puts into it.
        shell: whether the job's own shell makes words of it.
        stands: variables that the launch line uses.
        words: those of them in the program's own words.
        by_srun: the script starts its program by srun.
        lines: what of the launch's own statements stands behind the lines of the setup.
    """

    names: frozenset[str]
    shell: bool
    stands: frozenset[str]
    words: frozenset[str]
    by_srun: bool
    lines: tuple[Statement, ...] = ()


def dispositions(source: Source, launch: int, known: KnownShell, needs: Needs,
                 unreadable: Collection[int | None] = (), together: Collection[int] = ()) -> list[Disposition]:
    """What becomes of the statements before the number ``launch``.

    Args:
        unreadable: numbers of those that bash cannot read.
        together: numbers of those that start the program on another node.
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
            before = number - 1  # whose end it asks for
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
    """The variables that a line may read: all, if it reads them by names that it makes or runs the text of another file."""
    if _reads(statement) or _INDIRECT.search(statement.text):
        return known.names
    return frozenset(re.findall(r"[A-Za-z_]\w*", statement.text)) & known.names


def _check_lost(found: Sequence[Disposition], lines: Sequence[Statement], known: KnownShell) -> None:
    """Raises HpcMpError where a line that is not carried over would have led elsewhere, or set what lines below it read."""
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
    """Whether an assignment has to be a line of the setup."""
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
    """Whether it runs text of another file in the same shell, which may use any variable."""
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
    """Variables that a piece of shell text uses."""
    return uses(text)[0] | frozenset(re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", text))


_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", re.DOTALL)
_ARGUMENT = re.compile(r"(?<!\\)\$(?:[1-9@*]|\{[1-9@*][^}\s]*\}?)")


def _unquoted(found: re.Match[str]) -> str:
    """What bash expands of a quoted text, with its line ends: nothing between single quotes, those in ``"$(awk '…')"`` too."""
    if found[0][0] == '"' and "$(" not in found[0]:
        return found[0]
    return re.sub(r"'[^']*'", lambda each: "\n" * each[0].count("\n"), found[0])


def argument_read(source: Source, statements: Iterable[Statement]) -> tuple[int, str] | None:
    """The first line that reads an argument of the script (``$1``, ``$@``), and how; a function's own arguments are others."""
    for statement in statements:
        if statement.kind == "function_definition":
            continue
        plain = _QUOTED.sub(_unquoted, statement.text)
        for number, line in enumerate(plain.split("\n"), start=statement.first):
            if number not in source.comments and (found := _ARGUMENT.search(re.sub(r"(^|\s)#.*", "", line))):
                return number, found[0]
    return None
