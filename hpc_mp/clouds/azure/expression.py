"""Evaluation of an attribute's value: text, a parameter, a list, or an expression, as far as its names are known.

Expressions are in ``${…}``, after ``:=`` and after ``= =``. They consist of literals, names, calls, lists ``{a, b}``, records
``[Name=a; Other=b]`` and their entries ``a[b]  a.b``, and the operators of ``_LEVELS``, in ascending precedence above ``? :``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpc_mp.clouds.azure.template import TRIPLE, Attribute

DEEPEST = 50  # nesting
_LONGEST = 100_000


class Unreadable(Exception):
    """Raised for text that is not an expression; the message states the reason in a few words."""


class Unknown:
    """The type of ``UNKNOWN``, the value that is not known yet."""


UNKNOWN: Final = Unknown()
Known = Any  # str, int, float, bool, None (undefined), tuple, dict or UNKNOWN


@dataclass(frozen=True, slots=True)
class Reading:
    """A value (UNKNOWN if it depends on unknown values), the names that it refers to, and the parameter if it is only one."""

    value: Known
    names: tuple[str, ...] = ()
    parameter: str = ""


_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("==", "!=", "===", "!==", "=?=", "=!=", "is", "isnt", "in"), ("<", "<=", ">", ">="),
    ("+", "-"), ("*", "/", "%"))
_COMPUTED: dict[str, Callable[[Any, Any], Known]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_OF_TEXT: dict[str, Callable[[str], Known]] = {"tolower": str.lower, "toupper": str.upper, "trim": str.strip, "size": len}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "undefined": None, "null": None}
_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"""({_STRING}|'[^']*'|\d+\.\d+|\d+|\$?[^\W\d]\w*(?:\.[^\W\d]\w*)*
    |===|!==|=\?=|=!=|==|!=|<=|>=|&&|\|\||[-+*/%<>!?:(){{}}\[\],;=.])|(\S)""", re.VERBOSE | re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}
_NAME = re.compile(r"\$([^\W\d][\w.]*)")
_INNER = re.compile(r"\$\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_NUMBER = re.compile(r"-?\d{1,18}|-?\d+\.\d+")
_ITEM = re.compile(rf"\s*({_STRING}|[^,]*)\s*(?:,|$)")


def read(attribute: Attribute, parameters: Mapping[str, Known]) -> Reading:
    """Evaluate a value; ``parameters`` by name in lower case.

    Raises:
        Unreadable: an expression in the value cannot be parsed.
    """
    raw = attribute.raw
    if raw[:3] in TRIPLE:
        return Reading(raw[3:-3])
    if attribute.assign == ":=":
        return _expression(raw, parameters) if raw else Reading(None)
    if raw.startswith("="):
        return _expression(raw[1:], parameters)
    if raw.startswith("${") and raw.endswith("}") and len(_INNER.findall(raw)) <= 1:
        return _expression(raw[2:-1], parameters)
    if raw.startswith("$") and not re.match(r"\$[\w{]", raw):
        raise Unreadable("behind \"$\" stands a parameter's name or {…}")
    if "${" in raw:
        pieces = _INNER.split(raw)
        inner = [_expression(piece, parameters) for piece in pieces[1::2]]
        if any("${" in piece for piece in pieces[::2]):
            raise Unreadable("\"}\" is missing")
        return Reading(_together([inner[at // 2].value if at % 2 else piece for at, piece in enumerate(pieces)]), _names(inner))
    if "," in raw and not re.fullmatch(_STRING, raw, re.DOTALL):
        items = [_word(item.strip(), parameters) for item in _ITEM.findall(raw) if item]
        return Reading(tuple(item.value for item in items), _names(items))
    return _word(raw, parameters)


def names_of(attribute: Attribute) -> tuple[str, ...]:
    """Return the names that a value refers to; none if it cannot be parsed."""
    try:
        return read(attribute, {}).names
    except Unreadable:
        return ()


def _names(readings: list[Reading]) -> tuple[str, ...]:
    return tuple(name for each in readings for name in each.names)


def _word(text: str, parameters: Mapping[str, Known]) -> Reading:
    """Evaluate a single value after ``=``, or an item of a list there."""
    if found := _NAME.fullmatch(text):
        return Reading(parameters.get(found[1].casefold(), UNKNOWN), (found[1],), found[1])
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return Reading(_unquoted(text))
    if text.casefold() in ("true", "false"):
        return Reading(text.casefold() == "true")
    return Reading(_number(text) if _NUMBER.fullmatch(text) else text)


def _expression(text: str, parameters: Mapping[str, Known]) -> Reading:
    reader = _Reader(text, parameters)
    value = reader.choice(0)
    reader.need("")
    whole = _NAME.fullmatch("$" + text.strip().removeprefix("$"))
    return Reading(value, tuple(reader.names), whole[1] if whole and reader.names else "")


def _unquoted(text: str) -> str:
    """Return the content of a quoted string; single quotes have no escapes."""
    return _ESCAPE.sub(lambda found: _LETTERS.get(found[1], found[1]), text[1:-1]) if text[0] == '"' else text[1:-1]


def _number(text: str) -> float:
    return float(text) if "." in text or len(text) > 18 else int(text)


class _Reader:
    """An evaluating parser of expressions: each method consumes the tokens of one form and returns its value."""

    def __init__(self, text: str, parameters: Mapping[str, Known]) -> None:
        found = [*_TOKEN.finditer(text)]
        if wrong := next((each[2] for each in found if each[2]), ""):
            raise Unreadable(f"\"{wrong}\" is no part of an expression")
        self._tokens = [*(each[1] for each in found), ""]
        self._parameters = parameters
        self._at = 0
        self.names: list[str] = []

    def take(self, *signs: str) -> str:
        """Consume the current token and return it if it is one of these signs; else return ""."""
        sign = self._tokens[self._at].casefold()
        self._at += bool(sign) and sign in signs
        return sign if sign in signs else ""

    def need(self, sign: str) -> None:
        if not self.take(sign) and (sign or self._tokens[self._at]):
            here = f" at \"{self._tokens[self._at][:20]}\"" if self._tokens[self._at] else ""
            raise Unreadable(f"\"{sign}\" is missing{here}" if sign else f"nothing can stand{here}")

    def _name(self) -> str:
        name = self._tokens[self._at]
        if not re.match(r"[^\W\d]", name):
            raise Unreadable("a name is missing behind \".\", or a field like Label=\"a\" in a record")
        self._at += 1
        return name

    def choice(self, depth: int) -> Known:
        if depth > DEEPEST:
            raise Unreadable(f"it is nested more than {DEEPEST} deep")
        condition = self._binary(0, depth)
        if not self.take("?"):
            return condition
        yes = self.choice(depth + 1)
        self.need(":")
        return _chosen(condition, yes, self.choice(depth + 1))

    def _binary(self, level: int, depth: int) -> Known:
        if level == len(_LEVELS):
            return self._unary(depth)
        left = self._binary(level + 1, depth)
        while sign := self.take(*_LEVELS[level]):
            left = _combined(sign, left, self._binary(level + 1, depth))
        return left

    def _unary(self, depth: int) -> Known:
        if depth > DEEPEST:
            raise Unreadable(f"it is nested more than {DEEPEST} deep")
        if not (sign := self.take("!", "-")):
            return self._indexed(self._primary(depth), depth)
        of = self._unary(depth + 1)
        return _combined("==", of, False) if sign == "!" else _combined("-", 0, of)

    def _primary(self, depth: int) -> Known:
        if self.take("("):
            return self._series(")", depth, most=1)[0]
        if self.take("{"):
            return tuple(self._series("}", depth))
        if self.take("["):
            return self._record(depth)
        text = self._tokens[self._at]
        if not re.match(r"[\"'$\w]", text):
            raise Unreadable(f"nothing can stand at \"{text[:20]}\"" if text else "it ends too early")
        self._at += 1
        if text[0] in "\"'" or text[0].isdecimal():
            return _unquoted(text) if text[0] in "\"'" else _number(text)
        if text.casefold() in _WORDS:
            return _WORDS[text.casefold()]
        if self.take("("):
            return _called(text.casefold(), self._series(")", depth))
        self.names.append(text.removeprefix("$"))
        return self._parameters.get(self.names[-1].casefold(), UNKNOWN)

    def _indexed(self, found: Known, depth: int) -> Known:
        """Return the entry of the record ``found`` that the following brackets and dots select, or ``found`` itself."""
        while sign := self.take("[", "."):
            at = self._series("]", depth, most=1)[0] if sign == "[" else self._name()
            named = {name.casefold(): value for name, value in found.items()} if isinstance(found, dict) else {}
            found = named.get(at.casefold(), UNKNOWN) if isinstance(at, str) else UNKNOWN
        return found

    def _series(self, end: str, depth: int, most: int = 0) -> list[Known]:
        """Parse values up to a closing bracket; ``most`` of 1: exactly one value."""
        if not most and self.take(end):
            return []
        found = [self.choice(depth + 1)]
        while not most and self.take(","):
            found.append(self.choice(depth + 1))
        self.need(end)
        return found

    def _record(self, depth: int) -> dict[str, Known]:
        fields: dict[str, Known] = {}
        while not self.take("]"):
            name = self._name()
            self.need("=")
            fields[name] = self.choice(depth + 1)
            if not self.take(";") and self._tokens[self._at] != "]":
                raise Unreadable("\";\" or \"]\" is missing in a record")
        return fields


def _chosen(condition: Known, yes: Known, no: Known) -> Known:
    if isinstance(condition, bool):
        return yes if condition else no
    return yes if yes == no else UNKNOWN


def _same(left: Known, right: Known) -> bool:
    """Return True if both values are equal. Text is compared case-insensitively; true is not equal to 1."""
    if isinstance(left, str) and isinstance(right, str):
        return left.casefold() == right.casefold()
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _combined(sign: str, left: Known, right: Known) -> Known:
    if sign in ("&&", "||"):
        decides = sign == "||"
        if left is decides or right is decides:
            return decides
        return not decides if isinstance(left, bool) and isinstance(right, bool) else UNKNOWN
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    if sign == "in":
        among = isinstance(right, tuple) and any(_same(left, item) for item in right)
        return among or (UNKNOWN if not isinstance(right, tuple) or UNKNOWN in right else False)
    if sign not in _COMPUTED:
        return _same(left, right) == (sign in ("==", "===", "=?=", "is"))
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in (left, right)):
        return UNKNOWN
    try:
        found = _COMPUTED[sign](left, right)
    except (ZeroDivisionError, OverflowError):
        return UNKNOWN
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _together(parts: list[Known]) -> Known:
    if UNKNOWN in parts:
        return UNKNOWN
    text = "".join("" if part is None else str(part).lower() if isinstance(part, bool) else str(part) for part in parts)
    return text if len(text) <= _LONGEST else UNKNOWN


def _called(function: str, given: list[Known]) -> Known:
    """Evaluate a call of a function that templates use; others (a pattern may take forever to match) are UNKNOWN."""
    match function, given:
        case "ifthenelse", [condition, yes, no]:
            return _chosen(condition, yes, no)
        case "ifthenelse", _:
            raise Unreadable("ifThenElse takes three arguments: condition, value if true, value if false")
        case "strcat", _:
            return _together(given)
        case "strjoin", [str(), *_]:
            return _together([part for item in given[1:] for part in (given[0], item)][1:])
        case _, [str(text)] if function in _OF_TEXT:
            return _OF_TEXT[function](text)
    return UNKNOWN
