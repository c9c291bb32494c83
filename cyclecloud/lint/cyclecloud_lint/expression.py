"""The value of an attribute: text, a number, a list, or an expression as far as its parameters are known.

An expression is in ``${…}``, after ``:=`` or after ``= =``. It is translated to one of Python, whose parser reads it. Only
``ifThenElse``, ``&& || !``, equality and order are evaluated; arithmetic, text, records and ``c ? a : b`` are UNKNOWN.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from cyclecloud_lint.template import TRIPLE, Attribute

_LONGEST = 1000  # tokens of an expression; templates have 40


class Unreadable(Exception):
    """Raised for text that is not an expression; the message is the text."""


Value = Any  # str, int, float, bool, None (undefined), tuple, dict or UNKNOWN
UNKNOWN: Final = object()


class Reading(NamedTuple):
    """A value (UNKNOWN if it depends on unknown values), the names that it refers to, and the parameter if it is only one."""

    value: Value
    names: tuple[str, ...] = ()
    parameter: str = ""


_WORDS: dict[str, bool | None] = {"true": True, "false": False, "undefined": None, "null": None}
_SIGNS = {"&&": "and", "||": "or", "!": "~", "in": "in",
          **dict.fromkeys(("is", "===", "=?="), "=="), **dict.fromkeys(("isnt", "!==", "=!="), "!=")}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"""(?P<text>{_STRING}|'[^']*')|(?P<word>\$?[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?P<call>\s*\()?
    |(?P<number>\d+(?:\.\d+)?)|(?P<sign>===|!==|=\?=|=!=|==|!=|<=|>=|&&|\|\||[-+*/%<>!(){{}},])|(?P<form>[\[\]?:;=.])
    |(?P<wrong>\S)""", re.VERBOSE | re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}
_INNER = re.compile(r"\$\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_ITEM = re.compile(rf"\s*({_STRING}|[^,]*)\s*(?:,|$)")


def worth(attribute: Attribute, parameters: Mapping[str, Value]) -> Reading:
    """Evaluate a value as ``read`` does; text that is not an expression is UNKNOWN and refers to no name."""
    try:
        return read(attribute, parameters)
    except Unreadable:
        return Reading(UNKNOWN)


def read(attribute: Attribute, parameters: Mapping[str, Value]) -> Reading:
    """Evaluate a value; ``parameters`` by name in lower case. Raises Unreadable if an expression in the value cannot be
    parsed."""
    raw = attribute.raw
    if raw[:3] in TRIPLE:
        return Reading(raw[3:-3])
    if attribute.assign == ":=" or raw.startswith("="):
        return _expression(raw.removeprefix("="), parameters) if raw else Reading(None)
    if "${" in raw:
        pieces = _INNER.split(raw)
        if any("${" in piece for piece in pieces[::2]):
            raise Unreadable(raw)
        readings = [_expression(piece, parameters) for piece in pieces[1::2]]
        return readings[0] if len(readings) == 1 and not any(pieces[::2]) else _joined(UNKNOWN, readings)
    if "," not in raw or re.fullmatch(_STRING, raw, re.DOTALL):
        return _item(raw, parameters)
    items = [_item(item.strip(), parameters) for item in _ITEM.findall(raw) if item]
    return _joined(tuple(item.value for item in items), items)


def _joined(value: Value, readings: list[Reading]) -> Reading:
    return Reading(value, tuple(name for reading in readings for name in reading.names))


def _item(text: str, parameters: Mapping[str, Value]) -> Reading:
    """Evaluate a single value after ``=``, or an item of a list there."""
    if match := re.fullmatch(r"\$([^\W\d][\w.]*)", text):
        return Reading(parameters.get(match[1].casefold(), UNKNOWN), (match[1],), match[1])
    if re.match(r"\$(?!\w)", text):
        raise Unreadable(text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return Reading(_unquoted(text))
    if text.casefold() in ("true", "false"):
        return Reading(text.casefold() == "true")
    return Reading(_number(text) if re.fullmatch(r"-?\d{1,18}|-?\d+\.\d+", text) else text)


def _unquoted(text: str) -> str:
    """Return the content of a quoted string; single quotes have no escapes."""
    return _ESCAPE.sub(lambda match: _LETTERS.get(match[1], match[1]), text[1:-1]) if text[0] == '"' else text[1:-1]


def _number(text: str) -> float:
    return float(text) if "." in text or len(text) > 18 else int(text)


def _expression(text: str, parameters: Mapping[str, Value]) -> Reading:
    """Evaluate an expression: every operand becomes a numbered name of the Python that is parsed."""
    operands: list[Value] = []
    python: list[str] = []
    names: list[str] = []
    tokens = [*_TOKEN.finditer(text)]
    if any(token["form"] for token in tokens):
        return Reading(UNKNOWN)
    if len(tokens) > _LONGEST or any(token["wrong"] for token in tokens):
        raise Unreadable(text)
    for token in tokens:
        word, call = (token["word"] or "").removeprefix("$"), "(" if token["call"] else ""
        if sign := token["sign"] or (word.casefold() if word.casefold() in _SIGNS else ""):
            python.append(_SIGNS.get(sign, sign) + call)
            continue
        python.append(f"_{len(operands)}{call}")
        if not word:
            operands.append(_unquoted(token["text"]) if token["text"] else _number(token["number"]))
        elif call or word.casefold() in _WORDS:
            operands.append(word.casefold() if call else _WORDS[word.casefold()])
        else:
            operands.append(parameters.get(word.casefold(), UNKNOWN))
            names.append(word)
    try:
        value = _worth(ast.parse(" ".join(python), mode="eval").body, operands)
    except (SyntaxError, RecursionError, MemoryError):
        raise Unreadable(text) from None
    return Reading(value, tuple(names), names[0] if len(tokens) == len(names) == 1 else "")


def _worth(tree: ast.expr, operands: list[Value]) -> Value:
    match tree:
        case ast.Name(name):
            return operands[int(name[1:])]
        case ast.Call(ast.Name(name), [condition, *values]) if len(values) == 2 and operands[int(name[1:])] == "ifthenelse":
            choice, (yes, no) = _worth(condition, operands), (_worth(value, operands) for value in values)
            return (yes if choice else no) if isinstance(choice, bool) else yes if yes == no else UNKNOWN
        case ast.BoolOp(sign, parts):
            decisive, terms = isinstance(sign, ast.Or), [_worth(part, operands) for part in parts]
            if any(term is decisive for term in terms):
                return decisive
            return not decisive if all(isinstance(term, bool) for term in terms) else UNKNOWN
        case ast.UnaryOp(ast.Invert(), part):
            negated = _worth(part, operands)
            return not negated if isinstance(negated, bool) else UNKNOWN
        case ast.Compare(left, [sign], [right]):
            return _compared(_worth(left, operands), sign, _worth(right, operands))
    return UNKNOWN


def _compared(left: Value, sign: ast.cmpop, right: Value) -> Value:
    if UNKNOWN in (left, right):
        return UNKNOWN
    if isinstance(sign, ast.Eq | ast.NotEq):
        left, right = (value.casefold() if isinstance(value, str) else value for value in (left, right))
        same = isinstance(left, bool) == isinstance(right, bool) and left == right  # true is not equal to 1
        return same == isinstance(sign, ast.Eq)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right))
    return _ORDER[type(sign)](left, right) if numbers and type(sign) in _ORDER else UNKNOWN
