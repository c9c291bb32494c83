"""A line with srun: its options, its tasks, the program in them."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.lint.sbatch.options import Option, parse, syntax
from hpc_mp.lint.sbatch.shell import Command
from hpc_mp.lint.sbatch.word import Word


@dataclass(frozen=True, slots=True)
class Step:
    """An srun.

    Attributes:
        program: the words that every task runs.
        opaque: options may stand in a variable whose value the script does not tell.
    """

    command: Command
    options: tuple[Option, ...]
    program: tuple[Word, ...]
    opaque: bool

    @property
    def line(self) -> int:
        return self.command.words[0].line

    def option(self, name: str) -> Option | None:
        """The last one of that name, which srun takes."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def value(self, name: str) -> str | None:
        found = self.option(name)
        return found.value if found else None


def read_step(command: Command) -> Step:
    options, program = parse(command.words[1:], syntax("srun"), permute=False)
    return Step(command, options, program, bool(program) and program[0].text.startswith("$"))
