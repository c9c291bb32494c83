"""What the value of an attribute says: text, a parameter, an expression, a list."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hpc_mp.clouds.azure.expression import Expression, Items, Literal, NameRef, Unreadable, names, parse_expression, unquoted
from hpc_mp.clouds.azure.parse import TRIPLE
from hpc_mp.clouds.azure.tree import Attribute

_WORDS: dict[str, bool] = {"true": True, "false": False}
_WHOLE = re.compile(r"\$([^\W\d][\w.]*)")
_REFERENCE = re.compile(r"\$[\w{]")
_INNER = re.compile(r"\$\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_INTEGER = re.compile(r"-?\d{1,18}")
_FLOAT = re.compile(r"-?\d+\.\d+")
_ITEM = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^,]*)\s*(?:,|$)')


@dataclass(frozen=True, slots=True)
class Mixed:
    """Text with ``${…}`` in it: what stands before, between and behind."""

    parts: tuple[str | Expression, ...]


Value = Expression | Mixed


@lru_cache(maxsize=4096)  # every rule reads the same few hundred
def read_value(attribute: Attribute) -> Value:
    """
    Raises:
        Unreadable: an expression in it cannot be read.
    """
    raw = attribute.raw
    if raw[:3] in TRIPLE:
        return Literal(raw[3:-3])
    if attribute.assign == ":=":
        return parse_expression(raw) if raw else Literal(None)
    if raw.startswith("="):
        return parse_expression(raw[1:])
    return _plain(raw)


def names_of(attribute: Attribute) -> list[str]:
    """The names that a value refers to; none if it cannot be read."""
    try:
        value = read_value(attribute)
    except Unreadable:
        return []
    parts = [part for part in value.parts if not isinstance(part, str)] if isinstance(value, Mixed) else [value]
    return [name for part in parts for name in names(part)]


def _plain(raw: str) -> Value:
    """What stands behind ``=``."""
    if raw.startswith("$") and not _REFERENCE.match(raw):
        raise Unreadable("behind \"$\" stands a parameter's name or {…}")
    if raw.startswith("${"):
        if "}" not in raw:
            raise Unreadable("\"}\" is missing")
        if (end := raw.rfind("}")) == len(raw) - 1 and len(_INNER.findall(raw)) <= 1:
            return parse_expression(raw[2:end])
    if found := _WHOLE.fullmatch(raw):
        return NameRef(found[1])
    if "${" in raw:
        return _mixed(raw)
    if raw.startswith('"') and not re.search(r'"\s*,', raw):
        return Literal(unquoted(raw))
    if "," in raw:
        items = [item for item in _ITEM.findall(raw) if item]
        return Items(tuple(_word(item.strip()) for item in items))
    return _word(raw)


def _word(text: str) -> Expression:
    if found := _WHOLE.fullmatch(text):
        return NameRef(found[1])
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return Literal(unquoted(text) if text[0] == '"' else text[1:-1])
    if text.casefold() in _WORDS:
        return Literal(_WORDS[text.casefold()])
    if _INTEGER.fullmatch(text):
        return Literal(int(text))
    return Literal(float(text)) if _FLOAT.fullmatch(text) else Literal(text)


def _mixed(raw: str) -> Mixed:
    found: list[str | Expression] = []
    at = 0
    for inner in _INNER.finditer(raw):
        found += [raw[at:inner.start()], parse_expression(inner[1])]
        at = inner.end()
    if "${" in raw[at:]:
        raise Unreadable("\"}\" is missing")
    return Mixed((*found, raw[at:]))
