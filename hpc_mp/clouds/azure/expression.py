"""The expressions of templates: what stands in ``${…}``, behind ``:=`` and behind ``= =``.

Literals, names, calls, lists ``{a, b}`` and records ``[Name=a; Other=b]``; then, what binds closest first: ``a[b]  a.b``,
``!  -``, ``*  /  %``, ``+  -``, ``<  <=  >  >=``, ``==  !=  ===  !==  =?=  =!=  is  isnt  in``, ``&&``, ``||``, ``? :``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

DEEPEST = 50  # nesting
MOST = 200  # operators


class Unreadable(Exception):
    """The text is no expression; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A string, a number, ``true``, ``false``; None for ``undefined``."""

    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class NameRef:
    """A parameter, with or without the dollar, or a dotted name."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """``of[at]``: an entry of a record or list; ``f().Name`` is ``f()["Name"]``."""

    of: Expression
    at: Expression


@dataclass(frozen=True, slots=True)
class Unary:
    sign: str
    of: Expression


@dataclass(frozen=True, slots=True)
class Binary:
    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Conditional:
    """``condition ? yes : no``."""

    condition: Expression
    yes: Expression
    no: Expression


@dataclass(frozen=True, slots=True)
class Items:
    """``{a, b}``."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class RecordLiteral:
    """``[Label="a"; Value=1]``."""

    fields: tuple[tuple[str, Expression], ...]


Expression = Literal | NameRef | Call | Index | Unary | Binary | Conditional | Items | RecordLiteral

_LEVELS: tuple[frozenset[str], ...] = (
    frozenset(("||",)), frozenset(("&&",)), frozenset(("==", "!=", "===", "!==", "=?=", "=!=", "is", "isnt", "in")),
    frozenset(("<", "<=", ">", ">=")), frozenset(("+", "-")), frozenset(("*", "/", "%")),
)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "undefined": None, "null": None}
_TOKEN = re.compile(r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*"|'[^']*')
  | (?P<number>\d+\.\d+|\d+)
  | (?P<name>\$?[^\W\d]\w*(?:\.[^\W\d]\w*)*)
  | (?P<sign>===|!==|=\?=|=!=|==|!=|<=|>=|&&|\|\||[-+*/%<>!?:(){}\[\],;=.])
)""", re.VERBOSE | re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def unquoted(text: str) -> str:
    """What a string in double quotes means."""
    return _ESCAPE.sub(lambda found: _LETTERS.get(found[1], found[1]), text[1:-1])


def quoted(text: str) -> str:
    """The text as a string in double quotes."""
    for sign, escape in (("\\", "\\\\"), ('"', '\\"'), *((letter, f"\\{name}") for name, letter in _LETTERS.items())):
        text = text.replace(sign, escape)
    return f'"{text}"'


def parse_expression(text: str) -> Expression:
    """
    Raises:
        Unreadable: the text is no expression, or nested too deeply.
    """
    tokens = _Tokens(text)
    found = _choice(tokens, 0)
    if tokens.sign is not None or tokens.kind != "end":
        raise Unreadable(f"nothing can stand at \"{tokens.text[:20]}\"")
    return found


def names(expression: Expression) -> Iterator[str]:
    """The names in it, in their order; functions are none."""
    if isinstance(expression, NameRef):
        yield expression.name
    for part in parts(expression):
        yield from names(part)


def calls(expression: Expression) -> Iterator[Call]:
    """The calls in it."""
    if isinstance(expression, Call):
        yield expression
    for part in parts(expression):
        yield from calls(part)


def parts(expression: Expression) -> tuple[Expression, ...]:
    """What it is made of, one level down."""
    match expression:
        case Call(_, inner) | Items(inner):
            return inner
        case Index(of, at):
            return (of, at)
        case Unary(_, of):
            return (of,)
        case Binary(_, left, right):
            return (left, right)
        case Conditional(condition, yes, no):
            return (condition, yes, no)
        case RecordLiteral(fields):
            return tuple(value for _, value in fields)
        case _:
            return ()


def expression_text(expression: Expression) -> str:
    """The expression with a pair of parentheses around everything that has parts; it parses to the same."""
    match expression:
        case Literal(None):
            return "undefined"
        case Literal(value):
            return quoted(value) if isinstance(value, str) else str(value).lower()
        case NameRef(name):
            return name
        case Call(function, inner):
            return f"{function}({', '.join(map(expression_text, inner))})"
        case Index(of, at):
            return f"({expression_text(of)})[{expression_text(at)}]"
        case Unary(sign, of):
            return f"({sign}{expression_text(of)})"
        case Binary(sign, left, right):
            return f"({expression_text(left)} {sign} {expression_text(right)})"
        case Conditional(condition, yes, no):
            return f"({expression_text(condition)} ? {expression_text(yes)} : {expression_text(no)})"
        case Items(inner):
            return f"{{{', '.join(map(expression_text, inner))}}}"
        case RecordLiteral(fields):
            return f"[{'; '.join(f'{name}={expression_text(value)}' for name, value in fields)}]"


class _Tokens:
    """The token at hand: ``kind`` is string, number, name, sign or end; ``sign`` is its text where it is an operator."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.operators = 0
        self.advance()

    def advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found:
            self._at = found.end()
            self.kind, self.text = str(found.lastgroup), found[str(found.lastgroup)]
        elif self._text[self._at:].strip():
            raise Unreadable(f"\"{self._text[self._at:].strip()[:20]}\" is no part of an expression")
        else:
            self.kind, self.text = "end", ""

    @property
    def sign(self) -> str | None:
        """The operator at hand, in lower case."""
        word = self.text.casefold()
        return word if self.kind == "sign" or (self.kind == "name" and word in ("is", "isnt", "in")) else None

    def take(self, sign: str) -> bool:
        """Whether this sign is at hand; if so, go past it."""
        there = self.sign == sign
        if there:
            self.advance()
        return there

    def count(self) -> None:
        """One more operator."""
        self.operators += 1
        if self.operators > MOST:
            raise Unreadable(f"it has more than {MOST} operators")

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise Unreadable(f"\"{sign}\" is missing" + (f" before \"{self.text[:20]}\"" if self.text else ""))


def _choice(tokens: _Tokens, depth: int) -> Expression:
    if depth > DEEPEST:
        raise Unreadable(f"it is nested more than {DEEPEST} deep")
    condition = _binary(tokens, 0, depth)
    if not tokens.take("?"):
        return condition
    yes = _choice(tokens, depth + 1)
    tokens.need(":")
    return Conditional(condition, yes, _choice(tokens, depth + 1))


def _binary(tokens: _Tokens, level: int, depth: int) -> Expression:
    if level == len(_LEVELS):
        return _unary(tokens, depth)
    left = _binary(tokens, level + 1, depth)
    while tokens.sign in _LEVELS[level]:
        sign = str(tokens.sign)
        tokens.advance()
        tokens.count()
        left = Binary(sign, left, _binary(tokens, level + 1, depth))
    return left


def _unary(tokens: _Tokens, depth: int) -> Expression:
    if depth > DEEPEST:
        raise Unreadable(f"it is nested more than {DEEPEST} deep")
    for sign in ("!", "-"):
        if tokens.take(sign):
            return Unary(sign, _unary(tokens, depth + 1))
    return _indexed(tokens, _primary(tokens, depth), depth)


def _primary(tokens: _Tokens, depth: int) -> Expression:
    kind, text = tokens.kind, tokens.text
    if kind == "string":
        tokens.advance()
        return Literal(unquoted(text) if text[0] == '"' else text[1:-1])
    if kind == "number":
        tokens.advance()
        return Literal(float(text) if "." in text or len(text) > 18 else int(text))
    if kind == "name" and tokens.sign is None:
        tokens.advance()
        if text.casefold() in _WORDS:
            return Literal(_WORDS[text.casefold()])
        if tokens.take("("):
            return Call(text, _series(tokens, ",", ")", depth))
        return NameRef(text.removeprefix("$"))
    if tokens.take("("):
        inner = _choice(tokens, depth + 1)
        tokens.need(")")
        return inner
    if tokens.take("{"):
        return Items(_series(tokens, ",", "}", depth))
    if tokens.take("["):
        return _record(tokens, depth)
    raise Unreadable("it ends too early" if kind == "end" else f"nothing can stand at \"{text[:20]}\"")


def _indexed(tokens: _Tokens, found: Expression, depth: int) -> Expression:
    """``found`` with what stands behind it in brackets and behind dots."""
    while tokens.sign in ("[", "."):
        tokens.count()
        if tokens.take("["):
            found = Index(found, _choice(tokens, depth + 1))
            tokens.need("]")
        elif tokens.take(".") and tokens.kind == "name":
            found = Index(found, Literal(tokens.text))
            tokens.advance()
        else:
            raise Unreadable("a name is missing behind \".\"")
    return found


def _series(tokens: _Tokens, between: str, end: str, depth: int) -> tuple[Expression, ...]:
    if tokens.take(end):
        return ()
    found = [_choice(tokens, depth + 1)]
    while tokens.take(between):
        found.append(_choice(tokens, depth + 1))
    tokens.need(end)
    return tuple(found)


def _record(tokens: _Tokens, depth: int) -> RecordLiteral:
    fields: list[tuple[str, Expression]] = []
    while not tokens.take("]"):
        if tokens.kind != "name":
            raise Unreadable("a record has fields like Label=\"a\"")
        name = tokens.text
        tokens.advance()
        tokens.need("=")
        fields.append((name, _choice(tokens, depth + 1)))
        if not tokens.take(";") and tokens.sign != "]":
            raise Unreadable("\";\" or \"]\" is missing in a record")
    return RecordLiteral(tuple(fields))
