"""A script's statements in order, each with its text, its lines and its calls as written.

``shell`` reads a script as a flat list for rules. ``adopt`` also needs the context of a command: the loop or function around
it, the start and end of its text, and the quoting of each word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from hpc_mp.lint.sbatch.shell import Around, Command, NodeReader, ShellAssignment, behind_redirections, read_tree
from hpc_mp.lint.sbatch.word import Word

_WORDLESS = ("file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment", "comment")
_CHAIN = ("redirected_statement", "pipeline", "list")  # nodes that redirect, pipe or chain their first command


@dataclass(frozen=True, slots=True)
class Argument:
    """One word of a command: as the linter reads it, and as written."""

    word: Word
    source: str


@dataclass(frozen=True, slots=True)
class CallSite:
    """A command and its place in the script.

    Attributes:
        command: the command as the linter reads it, without wrappers.
        arguments: every word, its name and wrappers included.
        start, end: offsets of its text in the script.
        chain_end: offset of the end of the pipe, the redirections and the ``|| …`` after it.
        inside: the kinds of nodes around it, the outermost first.
        checked: True if a condition or ``|| …`` depends on its failure.
    """

    command: Command
    arguments: tuple[Argument, ...]
    start: int
    end: int
    chain_end: int
    inside: tuple[str, ...]
    checked: bool = False

    @property
    def line(self) -> int:
        return self.command.line


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the script itself, a whole ``if`` or loop included.

    Attributes:
        kind: the grammar's node type: ``command``, ``variable_assignment``, ``if_statement``, ``ERROR`` …
        first, last: its lines, counted from 1.
        assignments: assignments that the script's own shell makes, in order; none for compound statements.
        exported: names that it exports.
        background: True if ``&`` follows.
    """

    kind: str
    text: str
    start: int
    first: int
    last: int
    calls: tuple[CallSite, ...]
    assignments: tuple[tuple[ShellAssignment, str], ...] = ()
    exported: frozenset[str] = frozenset()
    background: bool = False

    @property
    def command(self) -> CallSite | None:
        """The command, if the statement is a single command."""
        return self.calls[0] if self.kind == "command" and self.calls else None


@dataclass(frozen=True, slots=True)
class Source:
    """A script as statements. ``comments`` are the lines that contain only a comment."""

    text: str
    statements: tuple[Statement, ...]
    comments: frozenset[int]


def read_statements(text: str) -> Source:
    """Return all statements of a script in order. Text that cannot be parsed is a statement of the kind ``ERROR``."""
    root, reader = read_tree(text)
    statements: list[Statement] = []
    comments: set[int] = set()
    children = root.children
    for at, node in enumerate(children):
        if node.type == "comment":
            if not text[text.rfind("\n", 0, node.start_byte) + 1:node.start_byte].strip():
                comments.add(reader.line(node))
        elif node.is_named and reader.raw(node).strip(" \t\n\\"):  # ignore a line continuation at the end of the text
            follows = children[at + 1].type if at + 1 < len(children) else ""
            statements.append(_statement(node, reader, background=follows == "&"))
    return Source(text, tuple(statements), frozenset(comments))


def _statement(node: Node, reader: NodeReader, *, background: bool) -> Statement:
    text = reader.raw(node).rstrip()
    first = reader.line(node)
    assignments: list[tuple[ShellAssignment, str]] = []
    exported: frozenset[str] = frozenset()
    children = node.children if node.type in ("declaration_command", "variable_assignments") else [node]
    if node.type == "declaration_command":
        exported = frozenset(reader.declaration(node, captured=False)[1])
    for child in children:
        if child.type == "variable_assignment":
            value = child.child_by_field_name("value")
            assignments.append((reader.assignment(child, exported=bool(exported), captured=False),
                                reader.raw(value) if value else ""))
    return Statement(node.type, text, node.start_byte, first, first + text.count("\n"),
                     tuple(_calls(node, reader)), tuple(assignments), exported, background)


def _calls(top: Node, reader: NodeReader) -> Iterator[CallSite]:
    stack: list[tuple[Node, tuple[str, ...], Around, int]] = [(top, (), Around(), top.end_byte)]
    while stack:
        node, inside, around, end = stack.pop()
        if node.type in ("command", "unset_command") and (command := reader.command(node, around)):
            words = [child for child in (*node.children, *behind_redirections(node))
                     if child.is_named and child.type not in _WORDLESS]
            words = [node.children[0], *words] if node.type == "unset_command" else words
            yield CallSite(command, tuple(Argument(reader.word(word), reader.raw(word)) for word in words),
                           node.start_byte, node.end_byte, max(end, node.end_byte), inside, around.checked)
        deeper = []
        for child, held in reader.children(node, around):
            chained = node.type in _CHAIN and child.start_byte == node.start_byte
            below = inside if child.type == "program" else (*inside, node.type)
            deeper.append((child, below, held, end if chained else child.end_byte))
        stack += reversed(deeper)
