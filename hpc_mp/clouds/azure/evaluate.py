"""What an expression comes to, as far as it can be known before a cluster is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from hpc_mp.clouds.azure.expression import Binary, Call, Conditional, Index, Items, Literal, NameRef, RecordLiteral, Unary
from hpc_mp.clouds.azure.value import Mixed, Value


class Unknown:
    """The one value that nobody knows yet."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()

# A value: str, int, float, bool, None (undefined), tuple, dict or UNKNOWN.
Known = Any
_LONGEST = 100_000


def evaluate(value: Value, parameters: Mapping[str, Known]) -> Known:
    """The value, UNKNOWN where it depends on what is not known; ``parameters`` by name in lower case."""
    match value:
        case Literal(known):
            return known
        case NameRef(name):
            return parameters.get(name.casefold(), UNKNOWN)
        case Mixed(parts):
            return _together([part if isinstance(part, str) else evaluate(part, parameters) for part in parts])
        case Items(items):
            return tuple(evaluate(item, parameters) for item in items)
        case RecordLiteral(fields):
            return {name: evaluate(inner, parameters) for name, inner in fields}
        case Index(of, at):
            return _entry(evaluate(of, parameters), evaluate(at, parameters))
        case Unary(sign, of):
            return _unary(sign, evaluate(of, parameters))
        case Conditional(condition, yes, no):
            return _chosen(evaluate(condition, parameters), evaluate(yes, parameters), evaluate(no, parameters))
        case Call(function, arguments):
            given = [evaluate(argument, parameters) for argument in arguments]
            return FUNCTIONS[function.casefold()](given) if function.casefold() in FUNCTIONS else UNKNOWN
        case Binary(sign, left, right):
            return _binary(sign, evaluate(left, parameters), evaluate(right, parameters))


def _truth(value: Known) -> bool | None:
    return value if isinstance(value, bool) else None


def _chosen(condition: Known, yes: Known, no: Known) -> Known:
    if (known := _truth(condition)) is not None:
        return yes if known else no
    return yes if yes == no else UNKNOWN


def _entry(of: Known, at: Known) -> Known:
    """An entry of a record, which is found without regard to case."""
    named = {name.casefold(): value for name, value in of.items()} if isinstance(of, dict) else {}
    return named.get(at.casefold(), UNKNOWN) if isinstance(at, str) else UNKNOWN


def _unary(sign: str, of: Known) -> Known:
    if sign == "!":
        return UNKNOWN if _truth(of) is None else not of
    return -of if isinstance(of, int | float) and not isinstance(of, bool) else UNKNOWN


def _same(left: Known, right: Known) -> bool:
    """Text is compared without regard to case; true is not 1."""
    if isinstance(left, str) and isinstance(right, str):
        return left.casefold() == right.casefold()
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _among(value: Known, items: tuple[Known, ...]) -> Known:
    if any(_same(value, item) for item in items):
        return True
    return UNKNOWN if any(isinstance(item, Unknown) for item in items) else False


def _binary(sign: str, left: Known, right: Known) -> Known:
    if sign in ("&&", "||"):
        decides = sign == "||"
        if _truth(left) is decides or _truth(right) is decides:
            return decides
        return UNKNOWN if None in (_truth(left), _truth(right)) else not decides
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    if sign in ("==", "===", "=?=", "is"):
        return _same(left, right)
    if sign in ("!=", "!==", "=!=", "isnt"):
        return not _same(left, right)
    if sign == "in":
        return _among(left, right) if isinstance(right, tuple) else UNKNOWN
    return _arithmetic(sign, left, right)


_ARITHMETIC: dict[str, Callable[[Any, Any], Known]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b, "%": lambda a, b: a % b,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}


def _arithmetic(sign: str, left: Known, right: Known) -> Known:
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in (left, right)):
        return UNKNOWN
    try:
        found = _ARITHMETIC[sign](left, right)
    except (ZeroDivisionError, OverflowError):
        return UNKNOWN
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _together(parts: list[Known]) -> Known:
    if any(isinstance(part, Unknown) for part in parts):
        return UNKNOWN
    text = "".join("" if part is None else str(part).lower() if isinstance(part, bool) else str(part) for part in parts)
    return text if len(text) <= _LONGEST else UNKNOWN


def _of_text(change: Callable[[str], Known]) -> Callable[[list[Known]], Known]:
    return lambda given: change(given[0]) if len(given) == 1 and isinstance(given[0], str) else UNKNOWN


def _joined(given: list[Known]) -> Known:
    between = [part for item in given[1:] for part in (given[0], item)]
    return _together(between[1:]) if given and isinstance(given[0], str) else UNKNOWN


FUNCTIONS: dict[str, Callable[[list[Known]], Known]] = {
    "ifthenelse": lambda given: _chosen(*given) if len(given) == 3 else UNKNOWN,
    "strcat": _together,
    "strjoin": _joined,
    "tolower": _of_text(str.lower),
    "toupper": _of_text(str.upper),
    "trim": _of_text(str.strip),
    "size": lambda given: len(given[0]) if len(given) == 1 and isinstance(given[0], str | tuple) else UNKNOWN,
    "regexps": lambda given: UNKNOWN,  # a pattern from a file may take for ever
}
