"""``adopt``: conversion of the user's job script, which is read but never run, to a job file and an account of its lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_mp.adopt.account import Fate, LineFate, joined
from hpc_mp.adopt.around import ENTERED, afterwards, around, before_it, called_by, is_simple, several, taken_out, without_subshell
from hpc_mp.adopt.blanks import BLANK, marked, obvious, restored
from hpc_mp.adopt.command import FIRST, ProgramStart, number_in, on_first, program_start, slurm_numbers, starts_ranks
from hpc_mp.adopt.containers import StepContainer, step_container
from hpc_mp.adopt.expand import FixedValues, WordPiece, pieces
from hpc_mp.adopt.given import of_slurm, with_variables
from hpc_mp.adopt.keys import ENV_TABLES, job_tree, machine_keys
from hpc_mp.adopt.known import KnownShell, moves, sourced, what_is_known
from hpc_mp.adopt.launches import MPI, LaunchCall, choose, find_launches, in_background
from hpc_mp.adopt.nodes import on_every_node
from hpc_mp.adopt.request import ELEMENT, Request, job_name, read_request
from hpc_mp.adopt.setup import DIRECTORY, JOB, command_form, epilogue, of_modules, preface, seen_by_a_script, stopping
from hpc_mp.adopt.steps import Disposition, Needs, argument_read, dispositions, is_for_ranks_alone, names_in, with_inherited
from hpc_mp.adopt.streams import is_fed, runs_once, with_results, with_stdin
from hpc_mp.job import ProgramSpec
from hpc_mp.job.load import resolve_any
from hpc_mp.launch.program.launchers import check_command
from hpc_mp.lint.sbatch.rules.form import bash_refusal
from hpc_mp.lint.sbatch.script import Script, read_script
from hpc_mp.lint.sbatch.shell import SHELLS
from hpc_mp.lint.sbatch.statements import Source, read_statements

# Without it a step would wait forever for the CPUs of another step: one that earlier lines have started, or the one that the
# program runs in. Steps that srun starts inside that one would also inherit its CPU binding.
OVERLAP = "export SLURM_OVERLAP=1"
STEPS = f"{OVERLAP} SLURM_CPU_BIND=none"
SILENT_NOTE = "a program of which no rank prints a line for an hour counts as hung, which the script did not say: set " \
    "program.silent_limit"
STEPS_NOTE = "what the program may start by srun itself runs beside it, in the same CPUs and GPUs (SLURM_OVERLAP)"


@dataclass(frozen=True, slots=True)
class AdoptedJob:
    """A script converted to a job file.

    Attributes:
        tree: the job file's tables.
        spec: the validated job file, with absolute paths.
        account: the fate of every line, in order.
        notes: remarks about the whole job that belong to no line.
    """

    tree: Mapping[str, Any]
    spec: ProgramSpec
    account: tuple[LineFate, ...]
    notes: tuple[str, ...]

    @property
    def lost(self) -> tuple[LineFate, ...]:
        return tuple(each for each in self.account if each.fate is Fate.LOST)


def adopt(text: str, *, directory: Path, job_directory: Path, file: Path, arguments: Sequence[str] = ()) -> AdoptedJob:
    """Convert a script to a job file.

    Args:
        text: the text of the script.
        directory: the directory in which sbatch would be called.
        job_directory: the directory of the job file.
        file: the path of the script.
        arguments: the arguments that sbatch would pass to the script.

    Raises:
        HpcMpError: the script starts no program, or it asks for something that a job file cannot express.
    """
    plain = marked(text.replace("\r\n", "\n").replace("\0", ""), directives=True)
    if (obvious(plain) or bash_refusal(plain) is not None) and bash_refusal(blanks := marked(plain)) is None:
        plain = blanks
    script = read_script(plain, directory=directory, version=None)
    request = read_request(script)
    begins = os.path.normpath(directory / (request.directory or "."))
    if _for_a_shell(script):
        body = _of_shell(script, request, begins, file, arguments)
    else:
        body = _of_another(script, request, begins, file, arguments)
    tree = restored(job_tree({"job.name": job_name(file.name)} | dict(body.keys), job_directory))  # as sbatch names it
    spec = resolve_any(tree, job_directory)
    assert isinstance(spec, ProgramSpec)  # it has [program]
    check_command(spec)
    account = joined((*_form(script), *body.fates), script.lines)
    return AdoptedJob(tree, spec, tuple(replace(each, text=restored(each.text), where=restored(each.where),
                                                why=restored(each.why)) for each in account), body.notes)


@dataclass(frozen=True, slots=True)
class _Body:
    """The keys, fates and notes that a script and its directives yield."""

    keys: Mapping[str, Any]
    fates: tuple[LineFate, ...]
    notes: tuple[str, ...]


def _for_a_shell(script: Script) -> bool:
    first = script.lines[0]
    return not first.startswith("#!") or any(part.rpartition("/")[2] in SHELLS for part in first[2:].split())


def _form(script: Script) -> list[LineFate]:
    """Return the fates of the lines that neither sbatch nor the shell reads."""
    found = []
    directives = {option.line for component in script.header.components for option in component}
    directives |= {word.line for word in script.header.strays} | set(script.header.unmatched)
    if script.lines[0].startswith("#!"):
        login = " its shell is no login shell, and reads no files of yours but what slurm.setup names" \
            if re.search(r"\s-\w*l|--login", script.lines[0]) else ""
        found.append(LineFate(1, 1, script.lines[0], Fate.REPLACED, "#!/bin/bash", "the job script is hpc-mp's "
            f"own{login and ';'}{login}"))
    comments = {number for number, line in enumerate(script.lines, start=1)
                if line.lstrip().startswith("#") and number < script.header.end}
    if _for_a_shell(script):
        comments = set(read_statements("\n".join(script.lines)).comments)
    for number in comments - directives - {1 if found else 0}:
        line = script.lines[number - 1].strip()
        if re.match(r"#\s*SBATCH\b", line, re.IGNORECASE) and number > script.header.end:
            why = f"sbatch reads no directive behind the first command (line {script.header.end})"
        elif line.startswith("#SBATCH"):
            why = "it says nothing"
        elif re.match(r"#+\s*SBATCH\b", line, re.IGNORECASE):
            why = "sbatch takes it for a comment"
        else:
            why = "a comment"
        others = re.match(r"#(PBS|BSUB)\s+-", line) is not None and number < script.header.end
        if others:
            why = "sbatch reads some options of other schedulers in this form: write what it asks for into the job file"
        if line.startswith("#"):  # else it follows a statement on the same line
            found.append(LineFate(number, number, line, Fate.LOST if others else Fate.DROPPED, "", why))
    return found


def _of_shell(script: Script, request: Request, begins: str, file: Path, arguments: Sequence[str]) -> _Body:
    source = with_inherited(read_statements("\n".join(script.lines)), request.gpus is not None)
    there = begins if os.path.isdir(begins) else None
    known = what_is_known(source, begins, request.exported)
    launches = find_launches(source)
    launch = choose(launches, source, lambda each: _ranks(each, request))
    unreadable = _unreadable(source)
    blank = any(BLANK in each.text for each in source.statements)
    inner = without_subshell(source.text, source, launch) if launch is not None and not unreadable else None
    if inner is not None and bash_refusal(inner) is None:
        return _of_shell(replace(script, lines=tuple(inner.split("\n"))), request, begins, file, arguments)
    if launch is None or None in unreadable or (launch.statement in unreadable and not blank):
        return _of_another(script, request, begins, file, arguments,
                           unreadable="which bash cannot read: mend it (bash -n FILE)" if unreadable else "")
    if (together := on_every_node(launch, launches, source, request)) is not None:
        launch, launches = together.launch, tuple(each for each in launches if each not in together.others)
    callers = called_by(source, launch)
    at = callers[-1][0] if callers else launch.statement
    fixed = known.fixed[at]
    line = source.statements[launch.statement]
    simple = is_simple(line, launch) or (runs_once(launch) and is_fed(launch, line))
    if not simple:  # the words may be in a loop or a function
        fixed = replace(fixed, directory=None)
    start = with_results(program_start(launch, request, fixed), launch, line, known, at)
    alone = not launch.srun and start.start != "mpi" and start.nodes == 1 == (request.nodes or 1) and not blank
    if alone and not request.container.keys and not any(each.srun or each.texts[0] in MPI for each in launches) \
            and (way := several(source, launch, launches, callers)):
        return _of_another(script, request, begins, file, arguments, because=f": it starts its programs {way}")
    if together is not None:
        start = replace(start, how=(*start.how, "the steps of one node each are one step on all nodes"), lost=(*start.lost, *(
            f"{each} in its words differs from node to node: say it by $NODE_RANK or in the program" for each in (
                *(f"${name}" for name in together.differs),
                *(word.text for word in start.words if word.kind == "batch" and re.search(r"(?<!\\)\$NODE_RANK", word.text))))))
    if not start.results:
        start = with_stdin(start, launch, line, fixed)
    steps, by_ssh = _served(source, launches, launch)
    start = on_first(start, launch, request) if steps or by_ssh else start
    if beside := [each for each in launches if each.tier > 1 and each is not launch and in_background(each, source)
                  and in_background(launch, source) and each.call.start < launch.call.start]:
        start = replace(start, lost=(*start.lost, "the job ends with it, and ends what runs beside it (line "
                                     f"{', '.join(str(each.call.line) for each in beside)}): make a job of each, or a [sweep]"))
    start, passed = with_variables(start, launch, source, at, fixed, known)
    container = step_container(launch, fixed) if launch.srun else StepContainer()
    start = replace(start, how=(*start.how, *container.kept), lost=(*start.lost, *container.lost))
    inside = {**request.container.keys, **container.keys}
    inner, outer = container.enters or request.container.enters, launch.value("chdir") if launch.srun and not inside else None
    if inner or outer:
        enters = [WordPiece("literal", inner)] if inner else pieces(f'"{outer}"', fixed)
        start = replace(start, words=(WordPiece("literal", "env"), WordPiece("literal", "-C"), *enters, *start.words),
                        how=start.how if inner else (*start.how, ENTERED))
    stands = read_statements(before_it(line, launch)).statements if simple else source.statements[launch.statement:at + 1]
    moved = (known.directories[at] is None or there is None or any(
        call.command.name in known.movers for each in stands for call in each.calls)) and not inside
    shell_words = [piece.text for piece in start.words if piece.kind == "batch"]
    needs = Needs(frozenset().union(*map(names_in, (*shell_words, *start.before))), bool(shell_words) or not simple,
                  names_in(source.text[launch.call.start:launch.call.end]), names_in(_own_words(launch)), launch.srun, stands)
    if blank and BLANK in source.statements[launch.statement].text:
        start = replace(start, lost=(*start.lost, "a name in < > has to be filled in"))
    found = dispositions(source, launch.statement if simple else min(at, launch.statement), known, needs, unreadable,
                         {each.statement for each in together.others} if together else ())
    form = command_form(start, moved, made=not simple)
    lines = [each.text for each in found if each.text is not None]
    fates = [_fate(each) for each in found]
    if simple:
        more, said = around(source.statements[launch.statement], launch, start)
        lines += more
        fates.append(said)
    else:
        others = {launch: form.lines}
        for each in launches:
            if each.statement == launch.statement and each.tier == launch.tier and each is not launch:
                other = with_stdin(program_start(each, request, fixed), each, source.statements[each.statement], fixed)
                other, _ = with_variables(other, each, source, at, fixed, known)
                if (other.start, other.nodes, other.ranks_per_node) == (start.start, start.nodes, start.ranks_per_node):
                    others[each] = command_form(other, moved, made=True).lines
        more, said_all = taken_out(source, launch, callers, start, others)
        lines += more
        fates += said_all
    later = max(at, launch.statement) + 1
    fates += [afterwards(each, number, launches) for number, each in enumerate(source.statements[later:], start=later)]
    own = [*lines, *(form.lines if simple else ())]
    keys = _keys(request, launch, start, found, passed, fixed)
    for disposition in found:  # later lines may need the variable, and hpc-mp's own Python must not see it
        for assigned, _ in disposition.statement.assignments if disposition.text is not None else ():
            if is_for_ranks_alone(assigned.name, launch.srun) and assigned.name in known.fixed[-1].texts:
                keys[f"program.environment.{assigned.name}"] = known.fixed[-1].texts[assigned.name][0]
                passed[assigned.name] = ""
    keys |= {f"program.environment.{name}": value
             for name, value in of_slurm(source.text, script, request, launch, start).items()}
    keys["program.command"] = form.command
    goes_to = begins if moved else known.directories[at]
    keys["program.directory"] = goes_to if there is not None and goes_to is not None else str(script.directory)
    keys |= inside
    lines = stopping(_with_step_sizes(lines, launches, launch, request))
    lines = [each if "<<" in each else re.sub(r"^#(?=SBATCH)", "# ", each, flags=re.MULTILINE) for each in lines]
    needs_shell = any(not _is_plain(line) for line in lines) or form.lines
    if bash_refusal("\n".join((*lines, *form.lines, ""))) is not None:
        return _of_another(script, request, begins, file, arguments, unreadable="whose statements cannot be told apart, as in a "
                           "template that is not filled in")
    nested = not launch.srun and _opens_steps(start)
    overlap = steps or nested
    lines += [STEPS] if nested and start.start == "node" else [OVERLAP] if overlap else []
    if own and needs_shell:
        shebang = script.lines[0] if script.lines[0].startswith("#!") else ""
        flags = "".join(letter for letter in "eux" if re.search(rf"\s-[a-z]*{letter}", shebang))
        login = bool(re.search(r"\s-\w*l|--login", shebang))
        text = [*lines, *form.lines]
        unset = [f"unset {' '.join(sorted(passed))}"] if passed else []
        keys["slurm.setup"] = (*preface(text, request, begins, arguments, login, flags), *lines, *(form.lines if simple else ()),
                               *unset, *epilogue(text, request))
    elif lines:
        keys["slurm.setup"] = tuple(lines)
    kept = [each.statement for each in found if each.text is not None]
    used = None if arguments else argument_read(source, (*kept, *source.statements[launch.statement:at + 1]))
    notes = (*_notes(script, request, used, moved), *_unread(found, known))
    if overlap:
        notes += (STEPS_NOTE,)
    if _may_be_silent(launch, start):
        keys["program.silent_limit"] = 0
    else:
        notes += (SILENT_NOTE,)
    machine, fates_of_sizes = machine_keys(script, request, start, number_in(launch.value("cpus-per-task"), request))
    return _Body(keys | machine, (*request.fates, *fates_of_sizes, *fates), notes)


def _unread(found: Sequence[Disposition], known: KnownShell) -> Iterator[str]:
    """Yield a note for each file that the job's shell sources and that cannot be read here."""
    for number, each in enumerate(found):
        for name in sourced(each.statement, known.fixed[number]) if each.text is not None else ():
            if name and moves(name) is None:
                yield (f"line {each.statement.first} runs {name}, which is not here: if it enters another directory (cd), set "
                       "program.directory")


def _may_be_silent(launch: LaunchCall, start: ProgramStart) -> bool:
    """Return True if silence does not indicate a hang. Under the user's script a program may be silent indefinitely.

    Python on several ranks is taken for a training, whose hangs are detected by hpc-mp's silence limit.
    """
    trains = any(re.search(r"(^|/)(python|torchrun|accelerate|deepspeed|horovodrun)|\.py\b", text) for text in launch.texts)
    alone = start.start == "node" and not starts_ranks(launch.texts)
    if any(piece.text == FIRST[2] for piece in start.words):
        return True
    return not trains or (start.nodes if alone else start.nodes * start.ranks_per_node) == 1


_BY_SSH = frozenset({"ssh", "pdsh", "clush", "pssh"})


def _served(source: Source, launches: Sequence[LaunchCall], launch: LaunchCall) -> tuple[bool, bool]:
    """Return (True if earlier lines start helpers of the program on the job's nodes as steps, True if they do so by ssh)."""
    steps = any(each.srun and each.call.start < launch.call.start and (
        (in_background(each, source) and each.tier > 1) or "ray start" in " ".join(each.texts)) for each in launches)
    return steps, any(call.command.name in _BY_SSH and (call.command.background or each.background)
                      and call.start < launch.call.start for each in source.statements for call in each.calls)


def _ranks(launch: LaunchCall, request: Request) -> int:
    """Return the number of ranks that a launch starts, as far as its text shows."""
    start = program_start(launch, request, FixedValues())
    return start.nodes * start.ranks_per_node if launch.srun or start.start != "node" else 1


def _own_words(launch: LaunchCall) -> str:
    """Return the program and its arguments as written in the script."""
    first = launch.words[launch.program][1] if launch.program < len(launch.words) else 0
    return " ".join(each.source for each in launch.call.arguments[first:])


def _opens_steps(start: ProgramStart) -> bool:
    """Return True if a program may call srun itself, which would wait forever for the CPUs of the program's own step."""
    words = [piece.text for piece in start.words]
    return any(re.search(r"\bsrun\b", text) for text in words) or any(text.endswith(".sh") for text in words[:2])


def _unreadable(source: Source) -> frozenset[int | None]:
    """Return the numbers of the statements that bash cannot parse; None stands for the whole script. bash only parses it."""
    if bash_refusal(source.text) is None:
        return frozenset(number for number, each in enumerate(source.statements) if BLANK in each.text)
    found = {number for number, each in enumerate(source.statements) if bash_refusal(f"{each.text}\n") is not None}
    rest = "\n".join(each.text for number, each in enumerate(source.statements) if number not in found)
    return frozenset(found if found and bash_refusal(f"{rest}\n") is None else {None})


def _keys(request: Request, launch: LaunchCall, start: ProgramStart, found: Sequence[Disposition], passed: Mapping[str, str],
          fixed: FixedValues) -> dict[str, Any]:
    keys: dict[str, Any] = dict(request.keys)
    for name, value in request.exported.items():
        keys[f"environment.set.{name}"] = value
    for each in found:
        for key, value in each.keys.items():
            keys[key] = (*keys.get(key, ()), *value) if isinstance(value, tuple) else value
    for name, value in start.environment.items():
        keys[f"{ENV_TABLES[not launch.srun or name != 'CUDA_VISIBLE_DEVICES']}.{name}"] = value
    if start.mpi is not None:
        keys["slurm.mpi"] = start.mpi
    return keys | {"job.nodes": start.nodes, "job.ranks_per_node": start.ranks_per_node, "program.start": start.start}


def _fate(each: Disposition) -> LineFate:
    statement = each.statement
    return LineFate(statement.first, statement.last, statement.text, each.fate, each.where, each.why)


def _is_plain(line: str) -> bool:
    """Return True if a line depends on no directory and no Slurm variable."""
    return bool(re.fullmatch(r"(export |ulimit |umask |unset |set )?[^/`$(]*", line.split("\n")[0])) and "\n" not in line \
        and line.startswith(("export ", "ulimit ", "umask ", "unset "))


def _with_step_sizes(lines: Sequence[str], launches: Sequence[LaunchCall], chosen: LaunchCall, request: Request) -> list[str]:
    """Add the script's task count to each srun without a size, because the job script unsets Slurm's variables."""
    size = f"srun --ntasks={request.total_tasks}"
    return [_SIZELESS.sub(lambda found: f"{found[1]}{size}", line) for line in lines]


_SIZELESS = re.compile(r"(^|[;&|(!\n]\s*|\b(?:then|do|else)\s+)srun(?=\s)"
                       r"(?![^\n;|&]*\s(?:-n|-N|--n(?:tasks|odes)|--ntasks-per-node))")


def _notes(script: Script, request: Request, used: tuple[int, str] | None, moved: bool) -> tuple[str, ...]:
    """Return the notes about the whole job.

    Args:
        used: the line that reads an argument of the script that was not passed, and the way it is written there.
    """
    found = []
    if "job.time_limit" not in request.keys:
        found.append("job.time_limit is 1 hour, as the script names none: set it")
    text = "\n".join(script.lines)
    if used is not None:
        found.append(f"line {used[0]} reads {used[1]}, an argument of the script: name the arguments behind the script "
                     "(hpc-mp adopt SCRIPT -- ARG…)")
    if moved:
        found.append(f"the program runs where the script's shell is by then, which is not known here ({DIRECTORY})")
    if request.nodes is None and request.ntasks and request.ntasks > 1:
        found.append(f"--ntasks={request.ntasks} without --nodes: Slurm may spread them, the job has them on one node; set "
                     "job.nodes")
    if request.nodes is None and not request.ntasks:
        found.append("job.nodes is 1, as the script names none: set it where sbatch was given --nodes")
    if not request.elements and script.value("array") is None and re.search(rf"^[^#\n]*\b{ELEMENT}\b", text, re.MULTILINE):
        found.append(f"the script reads {ELEMENT} and names no array: write [sweep] for what sbatch was given as --array")
    if "scontrol requeue" in text:
        found.append("the script queues itself again: set program.resumes = true if the program goes on from what it saved")
    return tuple(found)


def _of_another(script: Script, request: Request, begins: str, file: Path, arguments: Sequence[str], *,
                unreadable: str = "", because: str = "") -> _Body:
    """Return a job whose program is the script itself, run once. It is used for scripts that are not shell scripts, in which no
    program is found, or that start several programs on their only node."""
    words = script.lines[0][2:].split() if script.lines[0].startswith("#!") else ["bash"]
    gpus = request.gpus.count if request.gpus and request.gpus.count else 1
    words += [str(file.absolute()), *arguments]
    start = ProgramStart("node", 1, gpus, tuple(WordPiece("literal", word) for word in words))
    keys = dict(request.keys) | {"job.nodes": 1, "job.ranks_per_node": gpus, "program.start": "node",
                                 "program.silent_limit": 0,
                                 "program.command": tuple(words), "program.directory": begins} | dict(request.container.keys)
    for name, value in request.exported.items():
        keys[f"environment.set.{name}"] = value
    source = read_statements("\n".join(script.lines)) if _for_a_shell(script) else Source("", (), frozenset())
    notes = _notes(script, request, None if arguments else argument_read(source, source.statements), False)
    text = "\n".join(line for number, line in enumerate(script.lines, start=1) if number not in source.comments)
    setup = [*of_modules(text, script.lines[0])] if source.statements else []
    keys |= {f"program.environment.{name}": value for name, value in seen_by_a_script(text, request, begins).items()
             if name not in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", JOB)}
    if opens := re.search(r"^[^#\n]*\bsrun\b", text, re.MULTILINE) is not None:  # in any language
        setup.append(STEPS)
        notes += (STEPS_NOTE,)
        if request.total_tasks > 1:  # the sizes that its steps use
            keys |= {f"program.environment.{name}": value for name, value in slurm_numbers(request).items() if "NTASKS" in name}
            keys["program.environment.SLURM_NPROCS"] = f"{request.total_tasks}"
            keys["program.environment.SLURM_TASKS_PER_NODE"] = f"{request.tasks_per_node}" + (
                f"(x{request.nodes})" if (request.nodes or 1) > 1 else "")
    if setup:
        keys["slurm.setup"] = tuple(setup)
    several_nodes = (request.nodes or 1) > 1
    if several_nodes and opens and not unreadable:
        start = replace(start, nodes=request.nodes or 1, words=(*(WordPiece("literal", text) for text in FIRST), *start.words))
        keys |= {"job.nodes": start.nodes, "program.command": tuple(piece.text for piece in start.words)}
        several_nodes, because = False, f"{because}, on the first node; the job keeps all, on which it starts steps of its own"
    machine, sizes = machine_keys(script, request, start)
    fate = Fate.LOST if unreadable or several_nodes else Fate.KEPT
    why = f"the program is this file itself, once{because}" + (
        f", {unreadable}" if unreadable else
        ", on one node: no program was found in it that the job could start on all nodes" if several_nodes else "")
    if several_nodes and (far := next((call for each in source.statements for call in each.calls
                                       if call.command.name in _BY_SSH), None)):
        why += f"; line {far.line} reaches them by {far.command.name}, which the job does not: start there with srun " \
            "what it starts"
    fates = [LineFate(number, number, line, fate, "program.command", why)
             for number, line in enumerate(script.lines, start=1) if number >= script.header.end and line.strip()
             and number not in source.comments and (source.statements or not line.startswith("#"))]
    if any(script.commands("sbatch")):
        notes += ("the script hands in jobs of its own: adopt the scripts that it hands in",)
    return _Body(keys | machine, (*request.fates, *sizes, *fates), notes)
