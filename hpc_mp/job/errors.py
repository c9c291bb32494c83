"""Error messages about a job file for its author: the key with its value, the rule, the remedy."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean, shown
from hpc_mp.job.elsewhere import key_here, value_here

MOST_OTHERS = 5  # problems that a message lists briefly after the first
BARE_KEY = re.compile(r"[\w-]{1,64}")

# pydantic's type of a problem: (the rule, the remedy), which are formatted with its context and the key.
KINDS: dict[str, tuple[str, str]] = {
    "int_type": ("must be a whole number", "write for example {key} = 1, without quotes, point or exponent"),
    "float_type": ("must be a number", "write for example {key} = 0.1, without quotes"),
    "string_type": ("must be text", "write it in quotes"),
    "tuple_type": ("must be a list", "write it in brackets: {key} = […]"),
    "dict_type": ("must be a table", "write it in braces, {key} = {{ name = value }}, or below a line [{where}]"),
    "model_type": ("must be a table", "write its keys below a line [{where}]"),
    "literal_error": ("must be {expected}", "choose one of these"),
    "greater_than_equal": ("must be at least {ge}", "write {key} = {ge} or more"),
    "greater_than": ("must be more than {gt}", "write a larger number"),
    "less_than_equal": ("must be at most {le}", "write {key} = {le} or less"),
    "less_than": ("must be less than {lt}", "write a smaller number"),
}


def wrong(rule: str, remedy: str) -> PydanticCustomError:
    """Return the error that a validator raises to be explained with this rule and remedy."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "remedy": remedy})


def explain(error: ValidationError, model: type[BaseModel]) -> HpcMpError:
    """Convert pydantic's findings about ``model`` to hpc-mp's form: the first in full, some of the others briefly."""
    findings = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")  # they explain others
    problems = [_problem(dict(e), model) for e in findings]
    suggested = {key for _, rule, remedy in problems if rule.startswith("is not a key")
                 for key in re.findall(r"'(\w+)'\?", remedy)}
    # A required key that is suggested for an unknown one is present, but misspelt.
    relevant = [problem for problem in problems if problem[1] != "is required" or problem[0] not in suggested]
    (value, rule, remedy), *others = relevant
    several = tuple(HpcMpError(*problem) for problem in relevant) if others else ()
    if others:
        end = "" if remedy.endswith(("?", ".", "!")) else "."
        remedy += f"{end} Also wrong: " + "; ".join(f"{value}: {rule}" for value, rule, _ in others[:MOST_OTHERS])
    if len(others) > MOST_OTHERS:
        remedy += f"; and {len(others) - MOST_OTHERS} more"
    return HpcMpError(value, rule, remedy, several)


def dotted(path: Sequence[Any]) -> str:
    """Return a dotted path such as ``data.files[0]``. Keys that are not bare are quoted."""
    def part(key: Any) -> str:
        if isinstance(key, int):
            return f"[{key}]"
        return f".{key}" if BARE_KEY.fullmatch(key) else f".{shown(key)}"

    return "".join(map(part, path)).removeprefix(".")


def _problem(finding: dict[str, Any], model: type[BaseModel]) -> tuple[str, str, str]:
    of_key = finding["loc"][-1] == "[key]"  # pydantic's mark for a wrong key instead of a wrong value
    path = finding["loc"][:-1] if of_key else finding["loc"]
    name, kind, context = dotted(path), finding["type"], finding.get("ctx", {})
    value = name if of_key or isinstance(finding["input"], dict) else f"{name} = {shown(finding['input'])}"
    equivalent = value_here(name, finding["input"]) or _rewritten(kind, str(path[-1]), finding["input"])
    if kind == "rule":
        return value, context["rule"], f"write {equivalent}" if equivalent else context["remedy"]
    if kind == "missing":
        place = f"it to [{dotted(path[:-1])}]" if path[1:] else f"[{name}]; `hpc-mp init` writes a whole job file"
        return name, "is required", f"add {place}"
    if kind == "extra_forbidden":
        return value, *_nearest(path, model, finding["input"])
    rule, remedy = KINDS.get(kind, (f"is invalid ({finding['msg']})", "use another value"))
    if isinstance(path[-1], int):  # list items have no name to write in front
        remedy = remedy.replace("{key} = ", "")
    context = {key: f"{item:g}" if isinstance(item, float) else item for key, item in context.items()}
    return value, rule.format(**context), (f"write {equivalent}" if equivalent
                                           else remedy.format(where=name, key=path[-1], **context))


def _rewritten(kind: str, key: str, value: Any) -> str | None:
    """Return the correction of a number written as text, or of a list of one item written without brackets."""
    if kind == "tuple_type" and isinstance(value, str) and value:
        words = _words(value) if key == "command" else [value]
        return f"it in brackets: {key} = {json.dumps(words, ensure_ascii=False)}"
    reads = {"int_type": r"[+-]?\d{1,18}", "float_type": r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?"}.get(kind)
    return f"it without quotes: {key} = {value}" if reads and isinstance(value, str) and re.fullmatch(reads, value) else None


def _words(command: str) -> list[str]:
    """Split a command written as one string into words, as the shell would."""
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quote: the author knows what was meant
        return [command]


def _nearest(path: Sequence[str], model: type[BaseModel], value: Any) -> tuple[str, str]:
    """Return rule and remedy for an unknown key: of another section, of another trainer, misspelt, or none of these."""
    sections = {name: list(inner.model_fields) for name, inner in _tables(model)}
    *parents, key = path
    if parents == ["sweep"] and "." in key:
        return "is not a key of [sweep]", f"write it below [sweep.grid], or in braces: grid = {{ {json.dumps(key)} = […] }}"
    homes = [name for name, keys in sections.items() if key in keys]
    rule = f"is not a key of {f'[{dotted(parents)}]' if parents else 'a job file'}"
    if homes:
        return rule, (f"move it: {key} belongs to {' or '.join(f'[{name}]' for name in homes)}; "
                      f"on the command line --set {homes[0]}.{key}=…")
    choices = sections.get(dotted(parents), sections[parents[0]]) if parents else [name for name in sections if "." not in name]
    return key_here(key, dotted(parents), choices, value) or (
        rule, did_you_mean(key, choices, f"the keys are {', '.join(choices)}"))


def _tables(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield all tables of a job file by name, nested ones as ``train.loss_scale``."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield path + name, field.annotation
            yield from _tables(field.annotation, f"{path}{name}.")
