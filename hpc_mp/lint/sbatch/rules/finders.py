"""Finders of rules that judge a single option, variable, step or command: the judge returns the words of a hit.

A judge returns the item, or the item and the advice; True for a hit without words; "", None or False for none.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from hpc_mp.base.findings import Hit
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.header import Step
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import Command, ShellAssignment

Finder = Callable[[Script], Iterable[Hit]]
HitWords = str | tuple[str, str] | bool | None


def _hits(rows: Iterable[tuple[int, HitWords]]) -> Iterator[Hit]:
    for line, words in rows:
        if words:
            yield Hit(line, *(words if isinstance(words, tuple) else (words,) if isinstance(words, str) else ()))


def lacking(*names: str) -> Finder:
    """Make a finder of jobs without any of these directives."""
    return lambda script: () if any(map(script.option, names)) else (Hit(script.first_line),)


def of_job(name: str, judge: Callable[[Script, Option], HitWords]) -> Finder:
    """Make a finder that judges the directive of this name."""
    return lambda script: _hits((option.line, judge(script, option)) for option in filter(None, [script.option(name)]))


def of_directives(judge: Callable[[Script, Option], HitWords]) -> Finder:
    """Make a finder that judges each directive of all components."""
    return lambda script: _hits((option.line, judge(script, option)) for option in script.directives)


def of_options(judge: Callable[[Script, Option], HitWords]) -> Finder:
    """Make a finder that judges each option of the job and of its steps."""
    return lambda script: _hits((option.line, judge(script, option)) for option in script.everywhere)


def of_variables(names: Collection[str], judge: Callable[[Script, ShellAssignment], HitWords]) -> Finder:
    """Make a finder that judges the assignments to these variables."""
    return lambda script: _hits((variable.line, judge(script, variable)) for variable in script.shell.assignments
                                if variable.name in names)


def of_steps(judge: Callable[[Script, Step], HitWords]) -> Finder:
    """Make a finder that judges each step."""
    return lambda script: _hits((step.line, judge(script, step)) for step in script.steps)


def of_commands(judge: Callable[[Script, Command], HitWords]) -> Finder:
    """Make a finder that judges each command."""
    return lambda script: _hits((command.line, judge(script, command)) for command in script.shell.commands)
