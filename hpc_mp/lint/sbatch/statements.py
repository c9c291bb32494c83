"""A script's statements in order, each with its text, its lines and its commands. ``shell`` reads a script as one flat list."""

from dataclasses import dataclass

from hpc_mp.lint.sbatch.shell import Command, read_tree


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the script itself; a whole ``if`` or loop is one statement."""

    kind: str  # the grammar's node type: ``command``, ``variable_assignment``, ``if_statement``, ``ERROR`` …
    text: str
    # first, last: its lines, counted from 1
    first: int
    last: int
    commands: tuple[Command, ...]  # the commands in it, in order, as the linter reads them, without wrappers
    background: bool = False  # True if ``&`` follows


@dataclass(frozen=True, slots=True)
class Source:
    """A script as statements. ``comments`` are the lines that contain only a comment."""

    text: str
    statements: tuple[Statement, ...]
    comments: frozenset[int]


def read_statements(text: str) -> Source:
    """Return all statements of a script in order. Text that the parser rejects is a statement of the kind ``ERROR``."""
    root, reader = read_tree(text)
    statements: list[Statement] = []
    comments: set[int] = set()
    children = root.children
    for at, node in enumerate(children):
        if node.type == "comment":
            if not text[text.rfind("\n", 0, node.start_byte) + 1:node.start_byte].strip():
                comments.add(reader.line(node))
        elif node.is_named and reader.raw(node).strip(" \t\n\\"):  # ignore a line continuation at the end of the text
            source, first = reader.raw(node).rstrip(), reader.line(node)
            commands = [reader.command(part, around) for part, _, around in reader.walk(node)
                        if part.type in ("command", "unset_command")]
            statements.append(Statement(node.type, source, first, first + source.count("\n"), tuple(filter(None, commands)),
                                        at + 1 < len(children) and children[at + 1].type == "&"))
    return Source(text, tuple(statements), frozenset(comments))
