"""A job script, parsed once and with its variables expanded, and the queries of the rules."""

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.base.launchers import MPIRUNS
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch import shell as bash
from hpc_mp.lint.sbatch.header import MAGIC, Header, Step, read_header, read_step
from hpc_mp.lint.sbatch.shell import Word

DEPTH = 6  # nesting of srun and bash -c
GPUS = {"gpus": r"(?:[a-zA-Z]\w*:)?(\d+)"}
GPUS_PER_NODE = {"gpus-per-node": r"(?:[a-zA-Z]\w*:)?(\d+)", "gres": r"(?:gres/)?gpu:(?:[a-zA-Z]\w*:)?(\d+)"}
ELSEWHERE = MPIRUNS | {"ssh", "pdsh", "clush", "parallel"}  # they run on other nodes


@dataclass(frozen=True, slots=True)
class Script:
    """The script that the rules examine."""

    text: str
    lines: tuple[str, ...]  # the lines without line ends
    header: Header
    shell: bash.Shell  # everything that runs, also inside ``bash -c``; ``task`` marks commands in the tasks of a step
    steps: tuple[Step, ...]
    directory: Path  # the directory in which sbatch would be called
    version: tuple[int, int] | None  # the release of Slurm, (23, 11) for 23.11; None if unknown

    @property
    def options(self) -> tuple[Option, ...]:
        """The options of the job, or of the first component of a heterogeneous job."""
        return self.header.components[0]

    @property
    def directives(self) -> tuple[Option, ...]:
        """The options of all components."""
        return tuple(option for options in self.header.components for option in options)

    @property
    def everywhere(self) -> tuple[Option, ...]:
        """The options of the job and of its steps."""
        return (*self.options, *(option for step in self.steps for option in step.options))

    @property
    def asks_for_gpus(self) -> bool:
        return any(map(asks_for_gpus, self.everywhere))

    @property
    def only_writes_jobs(self) -> bool:
        """True if it runs on a login node: all its directives are in the text of job scripts that it writes and submits."""
        own = self.header.words or any(text.startswith(MAGIC) for _, text in self.shell.comments)
        return not own and any(line.lstrip().startswith(MAGIC) for line in self.lines[self.header.end:])

    @property
    def starts_here(self) -> bool:
        """True if the job's own shell starts the programs, hence on its first node: no step or other launcher does."""
        return not self.steps and not any(self.commands(*ELSEWHERE))

    def option(self, name: str) -> Option | None:
        """Return the last option of that name in the directives: sbatch uses the last."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def value(self, name: str) -> str | None:
        option = self.option(name)
        return option.value if option else None

    def number(self, name: str) -> int | None:
        """Return the value of a directive if it is a number; for a range, the minimum."""
        match = re.match(r"\d+", self.value(name) or "")
        return int(match[0]) if match else None

    @property
    def nodes(self) -> int:
        """The minimum number of nodes by the directives."""
        ntasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        if (nodes := self.number("nodes")) is not None:
            return nodes
        return -(-ntasks // per_node) if ntasks and per_node else 1

    @property
    def tasks(self) -> int:
        """The minimum number of tasks by the directives: sbatch multiplies or divides GPUs if ``--ntasks`` is not set."""
        total, per_gpu, per_task = gpus(self.options, GPUS), self.number("ntasks-per-gpu"), self.number("gpus-per-task")
        by_gpus = (total or self.nodes * gpus(self.options)) * per_gpu if per_gpu else total // (per_task or total + 1)
        return self.number("ntasks") or by_gpus or self.nodes * (self.number("ntasks-per-node") or 1)

    def of(self, step: Step) -> "Script":
        """Return this script with only the step's component of a heterogeneous job."""
        group = step.value("het-group") or ""
        components = self.header.components
        at = int(group) if group.isdecimal() and int(group) < len(components) else 0
        return replace(self, header=replace(self.header, components=(components[at],)))

    def several_tasks(self, step: Step) -> bool:
        """Return True if a step may have more than one task."""
        job = self.of(step)
        ntasks, nodes, per_node = (step.value(name) for name in ("ntasks", "nodes", "ntasks-per-node"))
        if ntasks is not None:
            return ntasks != "1"
        if per_node is not None or nodes is not None:
            return nodes not in (None, "1") or per_node not in (None, "1") or (nodes is None and job.nodes > 1)
        return job.tasks > 1

    def tasks_share_a_node(self, step: Step) -> bool:
        """Return True if a node may run more than one task of a step."""
        job = self.of(step)
        ntasks, nodes, per_node = (step.value(name) for name in ("ntasks", "nodes", "ntasks-per-node"))
        if per_node is not None:
            return per_node != "1"
        if ntasks is None:
            return job.tasks > job.nodes
        nodes = nodes or str(job.nodes)
        return not (ntasks.isdecimal() and nodes.isdecimal()) or int(ntasks) > int(nodes)

    @property
    def first_line(self) -> int:
        """The line for findings about a missing directive: that of the first directive."""
        return self.options[0].line if self.options else 1

    def commands(self, *names: str) -> Iterator[bash.Command]:
        return (command for command in self.shell.commands if command.name in names)

    def sets(self, name: str) -> bool:
        return any(assignment.name == name for assignment in self.shell.assignments)

    def shell_option(self, letter: str, name: str) -> bash.Command | None:
        """Return the ``set`` in the job's own shell that enables an option: ("u", "nounset"), ("", "pipefail")."""
        for command in self.commands("set"):
            by_letter = letter and any(re.fullmatch(rf"-[a-zA-Z]*{letter}[a-zA-Z]*", argument) for argument in command.arguments)
            by_name = any(re.fullmatch(r"-[a-zA-Z]*o", option) and value == name
                          for option, value in itertools.pairwise(command.arguments))
            if not command.task and (by_letter or by_name):
                return command
        return None


def asks_for_gpus(option: Option) -> bool:
    return option.name.startswith("gpus") or "gpu" in (option.value or "")


def gpus(options: Iterable[Option], patterns: Mapping[str, str] = GPUS_PER_NODE) -> int:
    """Return the GPUs in the last option with a number, per node by default; 0 without one."""
    numbers = [re.fullmatch(patterns[option.name], option.value or "") for option in options if option.name in patterns]
    return next((int(number[1]) for number in reversed(numbers) if number), 0)


def read_script(text: str, *, directory: Path, version: tuple[int, int] | None) -> Script:
    lines = tuple(text.replace("\r\n", "\n").split("\n"))
    header = read_header(lines)
    shell = bash.Shell()
    steps: list[Step] = []
    if not lines[0].startswith("#!") or bash.for_a_shell(lines[0]):
        shell = bash.read_shell("\n".join(lines))
        shell = replace(shell, assignments=(*_exports(header.components[0], task=False), *shell.assignments))
        shell, steps = _with_inner(shell)
    return Script(text, lines, header, shell, tuple(steps), directory, version)


def _with_inner(outer: bash.Shell) -> tuple[bash.Shell, list[Step]]:
    """Return the script and its steps, with the commands of steps and ``bash -c`` included and its own variables expanded."""
    commands: list[bash.Command] = []
    assignments = list(outer.assignments)
    exported = set(outer.exported)
    faults = list(outer.faults)
    steps: list[Step] = []
    variables: dict[str, tuple[Word, ...]] = {}

    def visit(command: bash.Command, depth: int) -> None:
        if not command.words:  # only an empty variable
            return
        commands.append(command)
        if not depth:
            return
        if command.name == "srun":
            step = read_step(command)
            steps.append(step)
            assignments.extend(_exports(step.options, task=True))
            if step.program:
                prefixes, env_words, words = bash.split_prefixes(step.program)
                inner = bash.Command(words or step.program, step.program[0].line, prefixes,
                                tuple(bash.named_assignment(word, task=True) for word in env_words), task=True)
                assignments.extend(inner.assignments)
                visit(inner, depth - 1)
        elif script := bash.inner_script(command.words):
            inside = bash.read_shell(_with_results(script), script.line, task=command.task or command.name in ELSEWHERE)
            assignments.extend(inside.assignments)
            exported.update(inside.exported)
            faults.extend(inside.faults if not script.expands else ())  # an expanded variable may stand for a list
            for nested in inside.commands:
                visit(replace(nested, words=expanded(nested.words, variables)), depth - 1)

    ahead = deque(sorted((assignment for assignment in outer.assignments if not assignment.captured),
                         key=lambda assignment: assignment.line))
    for command in outer.commands:
        while ahead and ahead[0].line < command.line:
            assign(variables, ahead.popleft())
        visit(replace(command, words=expanded(command.words, variables)), DEPTH)
    return bash.Shell(tuple(commands), tuple(assignments), outer.comments, frozenset(exported), tuple(faults)), steps


def _with_results(script: Word) -> str:
    """Return the text of a ``bash -c "…"`` that this shell gets, with a placeholder for output of the job's own shell."""
    text = script.text
    for part in script.evaluated:
        text = text.replace(part, "$_" + "\n" * part.count("\n"))
    return text


def _exports(options: Iterable[Option], *, task: bool) -> list[bash.ShellAssignment]:
    return [bash.named_assignment(Word(part, option.line), task=task) for option in options if option.name == "export"
            for part in (option.value or "").split(",") if "=" in part]


MOST_LETTERS = 20_000  # in one value: a script may double a variable on every line
_WHOLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})")

Variables = Mapping[str, tuple[Word, ...]]


def assign(variables: MutableMapping[str, tuple[Word, ...]], assignment: bash.ShellAssignment) -> None:
    """Record the value of a variable from this assignment on, as far as the script's text shows it."""
    words = expanded(assignment.words if assignment.array else [part for word in assignment.words for part in _split(word)],
                     variables)
    variables[assignment.name] = _bounded(variables.get(assignment.name, ()) + words if assignment.appended else words)


def expanded(words: Iterable[Word], variables: Variables) -> tuple[Word, ...]:
    """Expand known variables in words. A word that is only a variable is replaced by the variable's words."""
    output: list[Word] = []
    for word in words:
        use = _WHOLE.fullmatch(word.text) if word.expands else None
        if use and (value := variables.get(use[1] or use[2])) is not None:
            is_script = output and output[-1].text == "-c" and any(before.base in bash.SHELLS for before in output)
            output += [_joined(word, value)] if is_script else value
        elif word.expands:
            evaluated = [substituted(part, variables) for part in word.evaluated]
            inserted = [part.replace("\n", " ") for name, _ in word.expands for value in variables.get(name, ())
                        for part in value.evaluated]
            text = substituted(word.text, variables)[:MOST_LETTERS]
            output.append(replace(word, text=text, evaluated=(*evaluated, *dict.fromkeys(inserted))))
        else:
            output.append(word)
    return _bounded(output)


def _joined(use: Word, value: Sequence[Word]) -> Word:
    """Return the script that ``bash -c "$NAME"`` gets."""
    evaluated = tuple(part for word in value for part in word.evaluated)
    return replace(use, text=" ".join(word.text for word in value), evaluated=evaluated)


def _bounded(words: Sequence[Word]) -> tuple[Word, ...]:
    lengths = itertools.accumulate(len(word.text) for word in words)
    return tuple(word for word, length in zip(words, lengths, strict=True) if length <= MOST_LETTERS)


def substituted(text: str, variables: Variables) -> str:
    """Expand known variables in a text, each value on one line, so that line numbers do not change."""
    def value(use: re.Match[str]) -> str:
        words = variables.get(use[1] or use[2])
        return use[0] if words is None else " ".join(word.text.replace("\n", " ") for word in words)

    return _USE.sub(value, text)


_PART = re.compile(r"(?:\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|\\[^\n]|[^\s\\])+")


def _split(word: Word) -> list[Word]:
    """Return the words that an unquoted use of a variable with this value yields."""
    return [replace(word, text=part[0], line=word.line + word.text.count("\n", 0, part.start()),
                    expands=tuple((name, line) for name, line in word.expands if name in part[0]))
            for part in _PART.finditer(word.text)]
