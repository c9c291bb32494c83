"""The lines of ``slurm.setup``: a preface for the job's shell, the script's own lines, and the command that they build.

Words that the script's own shell expanded are expanded in the job's shell. The result is stored quoted in one variable, so that
the program's shell on every node gets exactly the same words, blanks included.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.adopt.command import WORDS, ProgramStart, slurm_numbers
from hpc_mp.adopt.expand import FixedValues, WordPiece, fields
from hpc_mp.adopt.known import MOVERS
from hpc_mp.adopt.request import ELEMENT, Request
from hpc_mp.lint.sbatch.statements import CallSite, Statement, read_statements

COMMAND, DIRECTORY, ONCE = "ADOPTED_COMMAND", "ADOPTED_DIRECTORY", "ADOPTED_ONCE"
JOB = "SLURM_ARRAY_JOB_ID"
LAUNCH = 'eval "exec ${' + COMMAND + ':?is set by slurm.setup, which runs on Slurm alone}"'
ENTER = f'cd "${DIRECTORY}" && '
# Files of a login shell may reset PATH, in which slurm.venv or slurm.conda has already put its environment first.
PROFILE = "ADOPTED_PATH=$PATH; . /etc/profile; PATH=$ADOPTED_PATH:$PATH"
_OF_NODES = ("{nodes}", "{node_rank}", "{ranks_per_node}", "{master_addr}", "{master_port}", "{run}")
_LOOPS = frozenset({"for_statement", "c_style_for_statement", "while_statement"})


@dataclass(frozen=True, slots=True)
class CommandForm:
    """``program.command``, and the lines of the job's shell that build its contents."""

    command: tuple[str, ...]
    lines: tuple[str, ...] = ()


def command_form(start: ProgramStart, moved: bool, *, made: bool = False) -> CommandForm:
    """Return the command in the simplest form that preserves its words.

    Args:
        moved: True if only the job's shell knows the directory.
        made: True if the job's shell builds the command in any case, as one of several.
    """
    words = start.words
    literal = all(piece.kind == "literal" or (piece.placeholder and start.start == "node") for piece in words)
    braces = start.start == "node" and any(mark in piece.text for piece in words if piece.kind == "literal" for mark in _OF_NODES)
    if literal and not (moved or braces or made):
        return CommandForm(tuple(piece.placeholder or piece.text for piece in words))
    enter = ENTER if moved else ""
    lines = [f'export {DIRECTORY}="$PWD"'] if moved else []
    if not made and not any(piece.kind == "batch" for piece in words):
        return CommandForm(("bash", "-c", f"{enter}exec {' '.join(map(_in_shell, words))}"), tuple(lines))
    return CommandForm(("bash", "-c", f"{enter}{LAUNCH}"), (*start.before, *_command_lines(words), *lines))


def _in_shell(piece: WordPiece) -> str:
    return shlex.quote(piece.text) if piece.kind == "literal" else piece.text


def _command_lines(words: Sequence[WordPiece]) -> list[str]:
    """Return the lines that build ``ADOPTED_COMMAND``: batch words expanded and quoted, rank words as written."""
    runs: list[tuple[bool, list[str]]] = []
    for piece in words:
        later = piece.kind == "rank"
        if not runs or runs[-1][0] != later:
            runs.append((later, []))
        runs[-1][1].append(_in_shell(piece))
    lines = []
    for number, (later, texts) in enumerate(runs):
        text = " ".join(texts)
        sets = f"{COMMAND}+=" if number else f"{COMMAND}="
        blank = " " if number else ""
        lines += [f"{sets}{shlex.quote(blank + text)}"] if later else [
            f"{WORDS}=({text})", f'{sets}"{blank}${{{WORDS}[*]@Q}}"']
    return [*lines, f"export {COMMAND}"]


def in_place(statement: Statement, launches: Sequence[tuple[CallSite, Sequence[str]]]) -> str:
    """Return a compound statement with each launch replaced by its lines, after which nothing of the statement runs."""
    text = statement.text
    in_function = statement.kind == "function_definition"
    for call, lines in sorted(launches, key=lambda each: each[0].start, reverse=True):
        begin, stop = call.start - statement.start, call.chain_end - statement.start
        after = re.match(r"\s*&(?!&)", text[stop:])
        stop += after.end() if after else 0
        body = "\n".join(("{", *lines, "return" if in_function else "break 99", "}" + (";" if after else "")))
        text = text[:begin] + body + text[stop:]
    return text if in_function else f"for {ONCE} in 1; do\n{text}\ndone"


# An empty operand is not a directory: ``cd ""`` stays in the current one, ``cd $NOTHING`` changes to the home directory.
ENTERS = "ADOPTED_ENTER"
_ENTER = (f"{ENTERS}() {{ case ${{!#}} in cd|pushd|''|--|-[LPen@]) echo \"slurm.setup: $1 to no directory\" >&2; return 1; esac; "
          "\"$@\"; }")


def stopping(lines: Sequence[str]) -> list[str]:
    """Make the lines end the job if a ``cd`` fails or gets an empty operand, unless the script itself handles the failure."""
    done = []
    for line in lines:
        calls = [call for each in read_statements(line).statements for call in each.calls if call.command.name in MOVERS]
        for call in sorted(calls, key=lambda each: each.start, reverse=True):
            text = line[call.start:call.end]
            if any(fields(each.source, FixedValues()) is None for each in call.arguments[1:]):
                text = f"{ENTERS} {text}"
            shrugs = _SHRUGS.match(line[call.end:call.chain_end])
            if (not call.checked or shrugs) and "command_substitution" not in call.inside:
                text = f"{text} || exit" if not (call.inside or shrugs) else f"{{ {text} || exit; }}"
            line = f"{line[:call.start]}{text}{line[call.end:]}"
        done.append(line)
    if any(ENTERS in line for line in done):
        exports = any(re.search(r"\b(export|declare|typeset)\s+-\w*f", line) for line in done)  # for functions that call it
        done = [_ENTER, *([f"export -f {ENTERS}"] if exports else []), *done]
    return done


_SHRUGS = re.compile(r"[^|]*\|\|\s*(?:true|:|echo|printf|mkdir)\b[^;&|]*$")  # failures that the script ignores


def is_loop(inside: Sequence[str]) -> bool:
    return bool(_LOOPS & set(inside))


def array_numbers(request: Request) -> dict[str, str]:
    """Return Slurm's variables for the script's own array. hpc-mp's array numbers its elements from 0."""
    numbers = sorted(map(int, request.elements))
    return {"SLURM_ARRAY_TASK_COUNT": f"{len(numbers)}", "SLURM_ARRAY_TASK_MIN": f"{numbers[0]}",
            "SLURM_ARRAY_TASK_MAX": f"{numbers[-1]}"} if numbers else {}


def seen_by_a_script(text: str, request: Request, directory: str) -> dict[str, str]:
    """Return the Slurm variables that occur in the script's text, with the values that Slurm would set in its shell.

    Args:
        directory: the directory in which sbatch would be called.
    """
    given = slurm_numbers(request) | {"SLURM_TASKS_PER_NODE": f"{request.tasks_per_node}", "SLURM_PROCID": "0",
                                      "SLURM_LOCALID": "0", "SLURM_NODEID": "0"} | array_numbers(request)
    if len(request.elements) == 1:  # a sweep of one run is not an array
        given[JOB] = "$SLURM_JOB_ID"
    given["SLURM_SUBMIT_DIR"] = directory
    return {name: value for name, value in given.items() if re.search(rf"\b{name}\b", text)}


def of_modules(text: str, shebang: str) -> tuple[str, ...]:
    """Return lines that define ``module`` for a script that is itself the program, if it calls ``module``."""
    if not re.search(r"^\s*(module|ml)\b", text, re.MULTILINE) or re.search(r"\s-\w*l|--login", shebang):
        return ()
    return (f"type module &>/dev/null || {{ {PROFILE}; }}", "export -f module ml _module_raw 2>/dev/null || true")


def preface(texts: Sequence[str], request: Request, directory: str, arguments: Sequence[str], login: bool,
            flags: str) -> list[str]:
    """Return the lines before the script's own: its arguments, array element, and Slurm variables that the job script unsets."""
    text = "\n".join(texts)
    lines = []
    if arguments:
        lines.append(f"set -- {shlex.join(arguments)}")
    if request.elements and ELEMENT in text:
        lines.append(f"ADOPTED_ELEMENT=${ELEMENT}; ADOPTED_ELEMENTS=({' '.join(request.elements)}); "
                     f"{ELEMENT}=${{ADOPTED_ELEMENTS[ADOPTED_ELEMENT]}}")
    shown = seen_by_a_script(text, request, directory)
    lines += [f"{name}={value if name == JOB else shlex.quote(value)}" for name, value in shown.items()
              if name not in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")]
    if re.search(r"^\s*(module|ml)\b", text, re.MULTILINE):
        lines.append(f"type module &>/dev/null || {{ {PROFILE}; }}")
    elif login:
        lines.append(PROFILE)
    if flags:
        lines.append(f"set -{flags}")
    return [*lines, f"cd {shlex.quote(directory)} || exit"]


def epilogue(texts: Sequence[str], request: Request) -> list[str]:
    """Return the lines after the script's own, which change back to the directory of the job script."""
    lines = []
    if request.elements and ELEMENT in "\n".join(texts):
        lines.append(f"{ELEMENT}=$ADOPTED_ELEMENT")
    return [*lines, 'cd "$HPC_MP_RUN" || exit']
