"""An srun line: its options, its tasks and their program."""

from dataclasses import dataclass

from hpc_mp.cluster.slurm.option_syntax import Option, parse, syntax
from hpc_mp.lint.sbatch.shell import Command
from hpc_mp.lint.sbatch.word import Word


@dataclass(frozen=True, slots=True)
class Step:
    """An srun call.

    Attributes:
        program: the words that every task runs.
        opaque: True if options may be in a variable of unknown value.
    """

    command: Command
    options: tuple[Option, ...]
    program: tuple[Word, ...]
    opaque: bool

    @property
    def line(self) -> int:
        return self.command.words[0].line

    def option(self, name: str) -> Option | None:
        """Return the last option of that name: srun uses the last."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def value(self, name: str) -> str | None:
        option = self.option(name)
        return option.value if option else None


def read_step(command: Command) -> Step:
    options, program = parse(command.words[1:], syntax("srun"), permute=False)
    return Step(command, options, program, bool(program) and program[0].text.startswith("$"))
