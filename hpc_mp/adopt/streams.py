"""Standard input and output of a program: files, here-documents and pipes of its line in the script."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from hpc_mp.adopt.command import ProgramStart, starts_ranks
from hpc_mp.adopt.expand import FixedValues, WordPiece, fields, pieces
from hpc_mp.adopt.known import KnownShell
from hpc_mp.adopt.launches import MPI, TOOLS, LaunchCall
from hpc_mp.adopt.steps import names_in
from hpc_mp.lint.sbatch.statements import Statement

# A shell that opens a file or a text as standard input and then execs the program: each rank reads it from the beginning.
READS = ("bash", "-c", 'exec "$@" < "$0"')
READS_TEXT = ("bash", "-c", 'exec "$@" <<< "$0"')
_WORD = (r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|\$(?![({])|[^\s\"'\\|&;<>()$`])+")
_FILE = re.compile(rf"(?<![<\d])<(?![<(&>])[ \t]*({_WORD})")
_HERE_STRING = re.compile(rf"<<<[ \t]*({_WORD})")
_HERE_DOCUMENT = re.compile(r"<<(-?)[ \t]*(?:([\"'])([^\"'\n]+)\2|(\\?)([\w.!-]+))([^\n]*)\n(.*?)^\t*(?(3)\3|\5)[ \t]*$",
                            re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(rf"(?<![<\d&])1?(?:>>|>\||>)(?![&(>])[ \t]*({_WORD})")
_ERRORS_TOO = re.compile(r"2>&1|&>|>&(?!\d)|\|&")
# Names of log files: ``train.log``, ``slurm-$ID.out``, ``output.txt``, ``$LOG``.
_LOG = re.compile(r"log|nohup|std(out|err)|\.(out|err|o|e|rout|screen)\w*$|(^|[^a-z])(out|output|err|error|print|run|screen)"
                  r"([\W_\d]\w*)?(\.txt)?$|^/dev/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Streams:
    """The redirections behind a program's words.

    Attributes:
        given: its standard input; None if it has none, or an unknown one.
        text: True if ``given`` is a text and not the name of a file.
        shown: ``given`` for a reader.
        asks: True if the program reads standard input.
        rest: everything else behind the words.
    """

    given: WordPiece | None
    text: bool
    shown: str
    asks: bool
    rest: str

    @property
    def result(self) -> bool:
        """True if the output goes to a file whose name is not that of a log."""
        found = [each.strip("\"'") for each in _OUTPUT.findall(self.rest.partition("|")[0])]
        return any(not _LOG.search(each if each.startswith("/dev/") else each.rpartition("/")[2]) for each in found) \
            and not _ERRORS_TOO.search(self.rest)


def streams(launch: LaunchCall, statement: Statement, fixed: FixedValues) -> Streams:
    """Return the redirections behind the words of a launch."""
    begin = statement.start
    inside = statement.text[launch.call.start - begin:launch.call.end - begin]
    behind = statement.text[launch.call.end - begin:None if is_fed(launch, statement) else launch.call.chain_end - begin]
    if (string := _HERE_STRING.search(inside) or _HERE_STRING.search(behind)) is not None:
        word = string[1] if string[1][0] in "\"'" else f'"{string[1]}"'
        found = fields(word, fixed)
        given = WordPiece("literal", found[0]) if found else WordPiece("batch", word)
        return Streams(given, True, f"“<<< {_short(string[1])}”", True, behind.replace(string[0], " "))
    if (document := _HERE_DOCUMENT.search(behind)) is not None:
        rest = f"{behind[:document.start()]} {document[6]}{behind[document.end():]}"
        known = _document(document, fixed) if "<<" not in rest else None
        return Streams(known, True, f"the here-document up to {document[3] or document[5]}", True, rest)
    reads = re.search(r"(?<!<)<(?![<(&])|<<", behind) is not None
    files = _FILE.findall(behind.partition("|")[0])
    if len(files) != 1 or "<<" in behind or behind.count("<") != 1:
        return Streams(None, False, "", reads, behind)
    file = pieces(files[0], fixed)
    return Streams(file[0] if len(file) == 1 else None, False, f"“< {files[0]}”", True, _FILE.sub(" ", behind, count=1))


def _document(found: re.Match[str], fixed: FixedValues) -> WordPiece | None:
    """Return the text of a here-document as one bash word; None if its quotes are ambiguous."""
    body = found[7]
    if found[1]:
        body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
    body = body.removesuffix("\n")
    if found[2] or found[4]:
        return WordPiece("literal", body)
    if '"' in body and re.search(r"\$\((?!\()|`|\$\{[^{}]*\"", body):
        return None
    quoted = re.sub(r'(\\*)"', lambda each: f'{each[1]}{chr(92) * (len(each[1]) % 2)}\\"', body)
    text = fields(f'"{quoted}"', fixed)
    return WordPiece("literal", text[0]) if text else WordPiece("batch", f'"{quoted}"')


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def with_stdin(start: ProgramStart, launch: LaunchCall, statement: Statement, fixed: FixedValues) -> ProgramStart:
    """Return the start with the program's standard input, if it is a file or a text."""
    found = streams(launch, statement, fixed)
    if found.given is None:
        return start
    front = (*(WordPiece("literal", text) for text in (READS_TEXT if found.text else READS)), found.given)
    what = "text" if found.text else "file"
    return replace(start, words=(*front, *start.words), how=(*start.how, f"{found.shown}: every rank reads that {what} as its "
                                                             "standard input"), reads=True)


def with_results(start: ProgramStart, launch: LaunchCall, statement: Statement, known: KnownShell, at: int) -> ProgramStart:
    """Wrap a program that runs once in a separate shell, with the pipe or file that takes its output, which is its result."""
    found = streams(launch, statement, known.fixed[at])
    fed = is_fed(launch, statement)
    if not (fed or found.result or drawn(launch)) or not runs_once(launch):
        return start
    text = statement.text if fed else statement.text[
        launch.call.start - statement.start:launch.call.chain_end - statement.start]
    names = sorted(names_in(text) & known.names)
    words = [WordPiece("literal", "bash"), WordPiece("literal", "-c")]
    values = known.fixed[at].texts
    if all(name in values and name not in known.fixed[at].arrays for name in names):
        words.append(WordPiece("literal", "\n".join((*(f"{name}={shlex.quote(values[name][0])}" for name in names), text))))
    else:  # the values at run time
        words.append(WordPiece("batch", f"\"$(declare -p {' '.join(names)})\"$'\\n'{shlex.quote(text)}"))
    if re.search(r"\$\{?[1-9@*#]", text):
        words += [WordPiece("literal", "bash"), WordPiece("batch", '"$@"')]
    return replace(start, words=tuple(words), before=(), reads=True, results=True, how=(
        *start.how, "its line stands as it is in a shell of its own, with what it reads and where its output goes"))


def runs_once(launch: LaunchCall) -> bool:
    """Return True if a program runs once and starts no ranks."""
    return not launch.srun and launch.texts[0].rpartition("/")[2] not in MPI and not starts_ranks(launch.texts)


def is_fed(launch: LaunchCall, statement: Statement) -> bool:
    """Return True if something is piped into a program on its own line."""
    piped = re.search(r"(?<!\|)\|&?\s*$", statement.text[:launch.call.start - statement.start]) is not None
    return piped and not set(launch.call.inside) - {"redirected_statement", "pipeline"}


def drawn(launch: LaunchCall) -> bool:
    """Return True if the output is piped through another program that does more than show it."""
    return any(name not in TOOLS for name in launch.call.command.piped)
