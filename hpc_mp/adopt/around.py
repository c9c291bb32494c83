"""The text around a launch: on its line, in its statement and after it; and the fate of each part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.adopt.command import ProgramStart
from hpc_mp.adopt.expand import FixedValues
from hpc_mp.adopt.given import exported_by_srun
from hpc_mp.adopt.kinds import FILTERS, PRINTS, kind_of, writes
from hpc_mp.adopt.launches import LaunchCall, function_name, in_background
from hpc_mp.adopt.setup import in_place, is_loop
from hpc_mp.adopt.streams import drawn, is_fed, streams
from hpc_mp.lint.sbatch.shell import read_tree
from hpc_mp.lint.sbatch.statements import CallSite, Source, Statement

_PLAIN_AROUND = frozenset({"redirected_statement", "pipeline", "list", "negated_command"})


def is_simple(statement: Statement, launch: LaunchCall) -> bool:
    """Return True if only redirections, a pipe behind the launch and ``… &&`` before it surround the launch."""
    if launch.together or set(launch.call.inside) - _PLAIN_AROUND:
        return launch.together
    before = statement.text[:launch.call.start - statement.start].strip()
    return not before or (before.endswith("&&") and "||" not in before)


def without_subshell(text: str, source: Source, launch: LaunchCall) -> str | None:
    """Return the script with the subshell around its launch dissolved: the lines of the subshell run in the script's own shell.

    Nothing runs after the program that could observe the difference. None if something else depends on the subshell.
    """
    outer = next((kind for kind in launch.call.inside if kind not in _PLAIN_AROUND), "")
    if outer != "subshell":
        return None
    node, begin = read_tree(text)[0], source.statements[launch.statement].start
    while node.type != "subshell":
        node = next(child for child in node.children if child.start_byte <= launch.call.start < child.end_byte)
    before = text[begin:node.start_byte].strip()
    if before and (not before.endswith("&&") or "||" in before):
        return None
    first = f"{{ {before.removesuffix('&&')}; }} || exit;" if before else ""
    return f"{text[:begin]}{first} {text[node.start_byte + 1:node.end_byte - 1]} {text[node.end_byte:]}"


def before_it(statement: Statement, launch: LaunchCall) -> str:
    """Return the part of a line before the launch on it, which ``&&`` has joined to the launch."""
    if launch.together or is_fed(launch, statement):
        return ""
    return statement.text[:launch.call.start - statement.start].strip().removesuffix("&&").strip()


def around(statement: Statement, launch: LaunchCall, start: ProgramStart) -> tuple[list[str], LineFate]:
    """Return the setup lines for the text before a launch on its line, and the fate of that line."""
    left = before_it(statement, launch)
    gone, elsewhere = left_out(statement, start, launch)
    why = [*start.how, *elsewhere]
    lost = [*start.lost, *gone]
    if launch.srun and (options := _step_options(launch, start)):
        why.append(options)
    if any(each.source == "time" for each in launch.call.arguments[:1]) and not start.results:
        why.append("“time” is left out: hpc-mp status says how long it ran")
    if statement.background:
        why.append("& is left out: the job waits for its program")
    where = "program.command" + (", slurm.setup" if left else "")
    fate = Fate.LOST if lost else Fate.REPLACED if any("replaced" in each for each in why) else Fate.KEPT
    lines = [f"{{ {left}; }} || exit"] if left else []
    return lines, LineFate(statement.first, statement.last, statement.text, fate, where, "; ".join((*lost, *why)))


def left_out(statement: Statement, start: ProgramStart, launch: LaunchCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts behind the program's words that are not carried over, and those that only go elsewhere now."""
    found = streams(launch, statement, FixedValues())
    lost = tuple(_ODD.get(each.name, f"srun has no option --{each.name} by itself: what the site's plug-in does with it has to "
                          "be set by hand") for each in launch.options
                 if each.name in _ODD or (not each.is_known and "container" not in each.name))
    if found.asks and not start.reads:
        lost += ("what it reads from stdin: ranks read nothing there; give it as a file or an argument",)
    rest = " ".join(found.rest.split())
    if not rest or start.results:
        return lost, ()
    shown = f"“{rest if len(rest) <= 60 else f'{rest[:59]}…'}”"
    if found.result or drawn(launch):
        return (*lost, f"{shown}: its output lies in the run's logs, and has to be taken from there"), ()
    return lost, (f"{shown} is left out: output lies in the run's logs, and nothing runs behind the program",)


ENTERED = "srun's --chdir: the program enters it"
_ODD = {"multi-prog": "srun's --multi-prog: each rank's own program; write one that chooses by RANK",
        "task-prolog": "srun's --task-prolog: what it exports for each task; write it in front of the program"}
_SAID = frozenset({"nodes", "ntasks", "ntasks-per-node"})
_OF_THE_JOB = frozenset({"gpus", "gpus-per-node", "gres", "cpus-per-task", "gpus-per-task"})


def _step_options(launch: LaunchCall, start: ProgramStart) -> str:
    """Return a description of the fate of srun's options."""
    sizes = [f"--{option.name}" for option in launch.options if option.name in _SAID]
    of_job = [f"--{option.name}" for option in launch.options if option.name in _OF_THE_JOB]
    rest = [f"--{option.name}" for option in launch.options
            if option.is_known and option.name not in {*_SAID, *_OF_THE_JOB, "mpi"}]
    others = [name for name in rest if "container" not in name]
    exported = [name for name, _ in exported_by_srun(launch)]
    if exported:
        others.remove("--export")
    others = [name for name in others if name.removeprefix("--") not in (*_ODD, *(["chdir"] if ENTERED in start.how else []))]
    return "; ".join((*([f"srun's {', '.join(dict.fromkeys(sizes))}: job.nodes, job.ranks_per_node"] if sizes else []),
                      *([f"srun's {', '.join(dict.fromkeys(of_job))}: as the job has them on a node"] if of_job else []),
                      *([f"srun's {', '.join(dict.fromkeys(others))}: left out, as the job script says how its step runs"]
                        if others else []),
                      *([f"srun's --export: the program gets {', '.join(exported)}"] if exported else [])))


def called_by(source: Source, launch: LaunchCall) -> tuple[tuple[int, CallSite], ...]:
    """Return the calls that lead to a launch inside a function: the statement number and call site of the function's first call,
    then of the function around that call, and so on. Empty if the launch is in no function, or the function is not called."""
    found: list[tuple[int, CallSite]] = []
    number = launch.statement
    while source.statements[number].kind == "function_definition":
        name = function_name(source.statements[number])
        following = ((later, call) for later in range(number + 1, len(source.statements))
                     for call in source.statements[later].calls
                     if name and call.command.words[:1] and call.command.words[0].text == name)
        if (call := next(following, None)) is None:
            return ()
        found.append(call)
        number = call[0]
    return tuple(found)


def several(source: Source, launch: LaunchCall, launches: Sequence[LaunchCall],
            callers: Sequence[tuple[int, CallSite]]) -> str:
    """Return the way in which a script starts its program several times; empty if it starts the program once."""
    if any(is_loop(site.inside) for site in (launch.call, *(site for _, site in callers))):
        return "in a loop"
    calls = [call for each in source.statements for call in each.calls]
    names = {site.command.words[0].text for _, site in callers}
    if any(sum(call.command.words[0].text == name for call in calls if call.command.words) > 1 for name in names):
        return "by calls of a function"
    beside = [each for each in launches if each.tier == launch.tier and in_background(each, source)]
    if len(beside) > 1 and any(call.command.name == "wait" for call in calls):
        return "beside each other"
    return ""


_TAKEN = "its command is taken out for the ranks, the rest stays as it stands up to there"
_LOOP = "the loop: only the first round is the job; write [sweep] for the others, or a job for each with slurm.depends"


def taken_out(source: Source, launch: LaunchCall, callers: Sequence[tuple[int, CallSite]], start: ProgramStart,
              made: Mapping[LaunchCall, Sequence[str]]) -> tuple[list[str], list[LineFate]]:
    """Return the lines and fates of the compound statement that holds the launch, or of the function and the statements up to
    its first call."""
    statement, call = source.statements[launch.statement], launch.call
    uncalled = statement.kind == "function_definition" and not callers
    piped = re.search(r"(?<!\|)\|&?\s*$", statement.text[:call.start - statement.start]) is not None
    if uncalled or piped or {"subshell", "command_substitution"} & set(call.inside):
        read = ("what is piped into it: ranks read nothing there; give it as a file or an argument",) if piped else ()
        only = (*read, "of what stands around the program here only its command is taken", *start.lost)
        return list(made[launch]), [LineFate(statement.first, statement.last, statement.text, Fate.LOST, "program.command",
                                             "; ".join(only))]
    gone, elsewhere = left_out(statement, start, launch)
    lost = [*([_LOOP] if is_loop(call.inside) else []), *start.lost, *gone]
    why = "; ".join((*(lost or [_TAKEN]), *elsewhere))
    said = [LineFate(statement.first, statement.last, statement.text, Fate.LOST if lost else Fate.KEPT,
                     "slurm.setup, program.command", why)]
    lines = [in_place(statement, [(each.call, texts) for each, texts in made.items()])]
    sites = dict(callers)
    for number in range(launch.statement + 1, max(sites, default=launch.statement) + 1):
        each, site = source.statements[number], sites.get(number)
        text, fate, why = each.text + (" &" if each.background else ""), Fate.KEPT, "as it stands"
        if site is None and kind_of(each) in ("trap", "resubmit"):
            said.append(LineFate(each.first, each.last, each.text, Fate.LOST, "", "the job's shell becomes the supervisor, which "
                                 "takes signals and queues the job again (program.signal, program.resumes)"))
            continue
        if site is not None and set(site.inside) - _PLAIN_AROUND:  # nothing after the first call runs
            text = in_place(each, [(site, (source.text[site.start:site.end],))])
        if site is not None and is_loop(site.inside):
            fate, why = Fate.LOST, _LOOP
        lines.append(text)
        said.append(LineFate(each.first, each.last, each.text, fate, "slurm.setup", why))
    return lines, said


def afterwards(statement: Statement, number: int, launches: Sequence[LaunchCall]) -> LineFate:
    quiet = kind_of(statement) in ("print", "shell", "assign") or statement.text.split()[:1] in (
        ["wait"], ["exit"], ["conda"], ["deactivate"], ["module"], ["return"], ["sleep"], ["cd"], ["fi"], ["done"])
    quiet = quiet or (bool(statement.calls) and all(call.command.name in PRINTS | FILTERS for call in statement.calls)
                      and not writes(statement))
    if quiet and not any(each.statement == number for each in launches):
        return LineFate(statement.first, statement.last, statement.text, Fate.DROPPED, "", "it comes after the program, and "
            "does nothing "
                        "that lasts")
    return LineFate(statement.first, statement.last, statement.text, Fate.LOST, "", "it comes after the program: make it a "
        "job of its own "
                    "with slurm.depends, or a part of the program")
