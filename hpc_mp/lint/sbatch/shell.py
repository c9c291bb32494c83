"""A shell script as a flat list of commands and assignments, each with its line. No part of it is ever run.

The grammar is tree-sitter's for bash: it continues after text that it cannot parse, and knows the position of every word.
(bashlex stops at the first construct it does not know, and its licence is the GPL.)

The parser is given ASCII only, with one letter for every other character. Its scanner calls C's isdigit() on whole code points
(tree-sitter-bash 0.25.1, src/scanner.c, after a ``{``), which reads outside a table of 256 entries and may crash the
interpreter. NUL is replaced too: the scanner needs n² steps for n of them. Lines are counted from offsets: the Points of
py-tree-sitter 0.26.0 are freed while they are in use (its issue 472).
"""

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

# Wrappers in front of a command, with their options that take a separate value.
PREFIXES = {"exec": ("-a",), "time": ("-f", "-o"), "nohup": (), "command": (), "builtin": (), "setsid": (),
            "stdbuf": (), "env": ("-u", "-C"), "nice": ("-n",), "timeout": ("-s", "-k"), "numactl": ("-N", "-m", "-C")}
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_LEFT_OF = {"&": "background", "&&": "tested", "||": "tested"}
_CONDITIONS = frozenset({"if_statement", "elif_clause", "while_statement"})


@dataclass(frozen=True, slots=True)
class Word:
    """A word as the program gets it, except that shell expansions are left as written."""

    text: str  # the text without quotes; ``$NAME`` and ``$(…)`` stay
    line: int  # the line, counted from 1
    expands: tuple[tuple[str, int], ...] = ()  # the variables that the shell expands in this word, each with its line
    evaluated: tuple[str, ...] = ()  # each ``$(…)`` in the text that the shell replaces by its output

    @property
    def base(self) -> str:
        """The last part of a path: ``torchrun`` for ``/usr/bin/torchrun``."""
        return self.text.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class ShellAssignment:
    """``NAME=value``. ``words`` are the elements of an array, or the one value; ``raw`` is the value as written."""

    name: str
    words: tuple[Word, ...]
    raw: str
    line: int
    exported: bool = False
    appended: bool = False
    array: bool = False
    task: bool = False
    captured: bool = False

    @property
    def value(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def expands(self) -> tuple[tuple[str, int], ...]:
        return tuple(variable for word in self.words for variable in word.expands)


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command."""

    words: tuple[Word, ...]  # its name and its arguments, without redirections
    line: int
    prefixes: tuple[str, ...] = ()  # wrappers in front of it (``exec``, ``time``, ``env`` …)
    assignments: tuple[ShellAssignment, ...] = ()  # ``NAME=value`` in front of it or passed to ``env``
    background: bool = False  # True if ``&`` follows
    piped: tuple[str, ...] = ()  # the names of the commands that its output is piped through
    tested: bool = False  # True if its exit code is checked (``if``, ``&&``, ``||``, ``!``)
    captured: bool = False  # True if it runs in ``$(…)`` or ``<(…)``
    task: bool = False  # True if it runs in the tasks of a step, not in the shell of the job script

    @property
    def name(self) -> str:
        return self.words[0].base if self.words else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words[1:])


@dataclass(frozen=True, slots=True)
class Shell:
    """A parsed script: ``comments`` are (line, text), ``exported`` are names, ``faults`` are lines that the parser rejects."""

    commands: tuple[Command, ...] = ()
    assignments: tuple[ShellAssignment, ...] = ()
    comments: tuple[tuple[int, str], ...] = ()
    exported: frozenset[str] = frozenset()
    faults: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Around:
    """The context of a tree node that applies to the commands in it."""

    background: bool = False
    tested: bool = False
    captured: bool = False
    piped: tuple[str, ...] = ()


@functools.cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def read_tree(source: str, first_line: int = 1, *, task: bool = False) -> "tuple[Node, NodeReader]":
    """Return the tree of a script and the reader of its nodes. The arguments are those of ``read_shell``."""
    line_ends = tuple(match.start() for match in re.finditer("\n", source))
    plain = _UNSAFE.sub("x", source)
    root = _parser().parse(_words_kept_together(plain).encode("ascii")).root_node
    if root.has_error:
        root = min(root, _parser().parse(plain.encode("ascii")).root_node, key=_faults)
    if root.has_error and "<<" in plain:
        alternative = _parser().parse(_without_here_documents(plain).encode("ascii")).root_node
        root = min(root, alternative, key=_faults)
    return root, NodeReader(source, line_ends, first_line, task)


def _words_kept_together(plain: str) -> str:
    """Replace letters that end a word in the grammar but not in bash. The length of the text does not change. The grammar finds a
    command ``NAME/x`` in ``A=$ROOT/$NAME/x``: the letter after a variable is replaced by a harmless one. It joins a line that
    begins with ``\\rm`` to the line before. In ``python - <<EOF`` it loses the last word, which begins with ``-``."""
    joined = _TOGETHER.sub(lambda match: match[1] or f"{match[2]}:", plain)
    return _LAST_WORD.sub("x", _NO_ALIAS.sub(r"\1x", joined))


def _without_here_documents(plain: str) -> str:
    """Blank out here-documents, which can confuse the grammar. The length of the text does not change. The grammar fails on some
    that contain quotes or other here-documents, and on those without a command (``<<NOTES``)."""
    done: list[str] = []
    ends: list[tuple[str, bool, str]] = []  # of documents that begin after this line: delimiter, ``-``, filler
    for line in plain.split("\n"):
        if ends:
            end, tabs, fill = ends[0]
            if (line.lstrip("\t") if tabs else line) == end:
                ends.pop(0)
                done.append(line if fill == "x" else fill * len(line))
            else:
                done.append(fill * len(line))
            continue
        bare = re.match(r"\s*<<", line) is not None
        for match in _HERE_DOCUMENT.finditer(line):
            ends.append((match[2] or match[3], match[1] == "-", "#" if bare else "x"))
        done.append("#" * len(line) if bare and ends else line)
    return "\n".join(done)


def _faults(root: Node) -> int:
    """Return the number of letters that the grammar could not parse, plus one for each inserted node."""
    return sum(node.end_byte - node.start_byte + 1 for node in _descendants(root) if node.type == "ERROR" or node.is_missing)


def read_shell(source: str, first_line: int = 1, *, task: bool = False) -> Shell:
    """Read a script, or the text of a ``bash -c``. ``first_line``: the number of its first line. ``task``: True if the script
    runs in the tasks of a step."""
    commands: list[Command] = []
    assignments: list[ShellAssignment] = []
    comments: list[tuple[int, str]] = []
    exported: set[str] = set()
    faults: list[int] = []
    root, reader = read_tree(source, first_line, task=task)
    for node, parent, around in reader.walk(root):
        match node.type:
            case "comment":
                comments.append((reader.line(node), reader.raw(node)))
            case "command" | "unset_command" if command := reader.command(node, around):
                commands.append(command)
                assignments += command.assignments
            case "declaration_command":
                declared, names = reader.declaration(node, captured=around.captured)
                assignments += declared
                exported |= names
            case "variable_assignment" if parent not in _WITH_ASSIGNMENTS:
                assignments.append(reader.assignment(node, captured=around.captured))
        if node.type == "ERROR" or node.is_missing:
            faults.append(reader.line(node))
    return Shell(tuple(commands), tuple(assignments), tuple(comments), frozenset(exported), tuple(faults))


def for_a_shell(first: str) -> bool:
    """Return True if the first line of a script names a shell after ``#!``."""
    return first.startswith("#!") and any(part.rpartition("/")[2] in SHELLS for part in first[2:].split())


def split_prefixes(words: tuple[Word, ...]) -> tuple[tuple[str, ...], tuple[Word, ...], tuple[Word, ...]]:
    """Return (wrappers of the command, the ``NAME=value`` words passed to env, the command itself). A program called with ``--
    srun …`` counts as a wrapper that starts the step: ``python -m watchdog -- srun …``."""
    prefixes: list[str] = []
    env_words: list[Word] = []
    while words and words[0].base in PREFIXES:
        name, words = words[0].base, words[1:]
        prefixes.append(name)
        while (words and words[0].text.startswith("-")) or (name == "env" and words and _NAMED.match(words[0].text)):
            env_words += words[:1] if not words[0].text.startswith("-") else ()
            words = words[2 if words[0].text in PREFIXES[name] else 1:]
        if name == "timeout":
            words = words[1:]
    for at, (before, word) in enumerate(itertools.pairwise(words), start=1):
        if before.text == "--" and word.base == "srun":
            return (*prefixes, words[0].base), tuple(env_words), words[at:]
    return tuple(prefixes), tuple(env_words), words


def inner_script(words: tuple[Word, ...]) -> Word | None:
    """Return the text that a ``bash -c TEXT`` in the words runs."""
    for at, word in enumerate(words):
        if word.base in SHELLS:
            for behind, option in enumerate(words[at + 1:], start=at + 2):
                if not option.text.startswith(("-", "+")):
                    return None
                if re.fullmatch(r"-[a-z]*c", option.text):
                    return words[behind] if behind < len(words) else None
    return None


def _unescaped(text: str) -> str:
    """Return the text without the backslashes that double quotes remove."""
    return re.sub(r'\\([\\"$`])', r"\1", text)


_UNSAFE = re.compile(r"[^\x01-\x7f]")
_HERE_DOCUMENT = re.compile(r"""(?<!<)<<(-?)\s*(?:["']([\w.!-]+)["']|\\?([A-Za-z_]\w*))""")
# Arithmetic and ``${…}``, in which the letter is an operator; or a variable in a word and the letter after it.
_TOGETHER = re.compile(r"(\$?\(\((?:[^()]|\([^()]*\))*\)\)|\$\{[^{}]*\}|\$\[[^\]]*\])|(\$\w+)[/,.+^-]")
_NO_ALIAS = re.compile(r"^([ \t]*)\\(?=[a-z])", re.MULTILINE)
_LAST_WORD = re.compile(r"(?<=[ \t])-(?=[\w=./-]*[ \t]*<<-?[ \t]*[\w\\'\"])")
_NAMED = re.compile(r"[A-Za-z_]\w*=")
_WITH_ASSIGNMENTS = ("command", "declaration_command")
_SKIPPED = ("file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment", "command_name", "comment")


def named_assignment(word: Word, *, task: bool) -> ShellAssignment:
    """Parse a ``NAME=value`` argument that a program puts into an environment."""
    name, _, value = word.text.partition("=")
    return ShellAssignment(name, (replace(word, text=value),), value, word.line, exported=True, task=task)


@dataclass(frozen=True, slots=True)
class NodeReader:
    """A reader of tree nodes as words, commands and assignments. Offsets in the tree are offsets in the text."""

    text: str
    line_ends: tuple[int, ...]
    first_line: int
    task: bool

    def line(self, node: Node) -> int:
        return bisect_left(self.line_ends, node.start_byte) + self.first_line

    def raw(self, node: Node) -> str:
        return self.text[node.start_byte:node.end_byte]

    def walk(self, root: Node) -> Iterator[tuple[Node, str, Around]]:
        """Yield every node in the order of the text, with the type of its parent and the context of its commands."""
        stack = [(root, "", Around())]
        while stack:
            node, parent, around = stack.pop()
            yield node, parent, around
            stack += [(child, node.type, held) for child, held in reversed(list(self.children(node, around)))]

    def children(self, node: Node, around: Around) -> Iterator[tuple[Node, Around]]:
        children = node.children
        if node.type in ("command_substitution", "process_substitution"):
            around = Around(captured=True)
        elif node.type == "negated_command":
            around = replace(around, tested=True)
        stages = [child for child in children if child.is_named] if node.type == "pipeline" else []
        for at, child in enumerate(children):
            held = around
            mark = _LEFT_OF.get(children[at + 1].type) if at + 1 < len(children) else None
            if mark == "background":
                held = replace(held, background=True)
            elif mark == "tested" or (node.type in _CONDITIONS and node.field_name_for_child(at) == "condition"):
                held = replace(held, tested=True)
            if child in stages:
                later = stages[stages.index(child) + 1:]
                held = replace(held, piped=tuple(map(self.first_name, later)) + around.piped)
            yield child, held

    def first_name(self, stage: Node) -> str:
        while stage.type == "redirected_statement" and stage.children:
            stage = stage.children[0]
        name = stage.child_by_field_name("name")
        return self.plain(name) if name else ""

    def word(self, node: Node) -> Word:
        expands = tuple(dict.fromkeys((self.raw(part), self.line(part))
                                      for part in _descendants(node) if part.type == "variable_name"))
        evaluated = tuple(_unescaped(self.raw(part)) if node.type == "string" else self.raw(part)
                          for part in _descendants(node) if part.type == "command_substitution")
        return Word(self.plain(node), self.line(node), expands, evaluated)

    def plain(self, node: Node) -> str:
        """Return the text without its quotes. Expansions, and a backslash before a line end, stay as written."""
        text = self.raw(node)
        match node.type:
            case "raw_string":
                return text[1:-1]
            case "ansi_c_string":
                return text[2:-1]
            case "string":
                return _unescaped(text[1:-1])
            case "word":
                return re.sub(r"\\([^\n])", r"\1", text)
            case "concatenation":
                return "".join(map(self.plain, node.children))
            case "command_name" if node.children:
                return self.plain(node.children[0])
        return text

    def command(self, node: Node, around: Around) -> Command | None:
        name = node.children[0] if node.type == "unset_command" else node.child_by_field_name("name")
        assignments = tuple(self.assignment(child, exported=True, captured=around.captured)
                            for child in node.children if child.type == "variable_assignment")
        words = tuple(self.word(child) for child in (*node.children, *behind_redirections(node))
                      if child.is_named and child.type not in _SKIPPED)
        if name is None or not (heading := self.word(name)).text:
            return None
        prefixes, named, rest = split_prefixes((heading, *words))
        assignments += tuple(named_assignment(word, task=self.task) for word in named)
        return Command(rest or (heading,), heading.line, prefixes, assignments, around.background, around.piped,
                       around.tested, around.captured, self.task)

    def declaration(self, node: Node, *, captured: bool) -> tuple[list[ShellAssignment], set[str]]:
        kind = self.raw(node.children[0])
        flags = "".join(self.raw(child) for child in node.children if child.type == "word")
        exports = kind == "export" or "x" in flags
        assignments = [self.assignment(child, exported=exports, captured=captured)
                       for child in node.children if child.type == "variable_assignment"]
        names = {self.raw(child) for child in node.children if child.type == "variable_name"} if exports else set()
        return assignments, names | {assignment.name for assignment in assignments if assignment.exported}

    def assignment(self, node: Node, *, exported: bool = False, captured: bool) -> ShellAssignment:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        array = value is not None and value.type == "array"
        parts = [child for child in value.children if child.is_named and child.type != "comment"] \
            if value and array else [value] if value else []
        return ShellAssignment(self.raw(name) if name else "", tuple(map(self.word, parts)), self.raw(value) if value else "",
                          self.line(node), exported, any(child.type == "+=" for child in node.children), array,
                          self.task, captured)


def behind_redirections(command: Node) -> Iterator[Node]:
    """Yield the words of a command after ``> FILE``: the grammar treats them as more files."""
    parent = command.parent
    if parent is None or parent.type != "redirected_statement" or parent.child_by_field_name("body") != command:
        return
    for redirection in parent.children_by_field_name("redirect"):
        if redirection.type == "file_redirect":
            yield from redirection.children_by_field_name("destination")[1:]
        elif redirection.type == "heredoc_redirect":
            yield from (word for child in redirection.children if child.type == "ERROR" for word in child.children)


def _descendants(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children)
