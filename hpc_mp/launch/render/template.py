"""A template is filled in, and each line of the script keeps the reason that stands behind it in the template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

from hpc_mp.base.errors import HpcMpError
from hpc_mp.launch.quoting import Verbatim, directive, literal, shell
from hpc_mp.launch.render.site import ScriptTemplate

_MARK = "\0"  # while filling in, stands between a line and its reason: no script can hold it
_CONTROL = re.compile(r"\s*\{[%#].*[%#]\}")  # a template line that leaves no line in the script
_REASON = re.compile(r"\s*\{# ((?:(?!#\}).)*) #\}$")


@dataclass(frozen=True, slots=True)
class JobScript:
    """A rendered script, why its lines are there, and where its template lies.

    ``explanations``: (line, why) in order, without empty lines.
    """

    text: str
    explanations: tuple[tuple[str, str], ...]
    template: str


def fill(template: ScriptTemplate, values: Mapping[str, object]) -> JobScript:
    """Raises HpcMpError when the template is not Jinja, or names a value that there is not."""
    try:
        filled = _jinja().from_string(_marked(template.text)).render(values)
    except jinja2.TemplateError as error:
        raise HpcMpError(f"template {template.path}", f"cannot be filled in ({error})", "mend it") from None
    lines = re.findall(rf"(.*?){_MARK}(.*?)\n", filled, re.DOTALL)
    return JobScript("".join(f"{line}\n" for line, _ in lines),
                  tuple((line.strip(), why) for line, why in lines if line.strip()), str(template.path))


def _jinja() -> jinja2.Environment:
    jinja = jinja2.Environment(finalize=shell, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                               keep_trailing_newline=True, autoescape=False)
    jinja.filters |= {"directive": directive, "literal": literal, "verbatim": Verbatim}
    return jinja


def _marked(template: str) -> str:
    """The template with a mark at the end of every line that reaches the script, and the line's reason behind it."""
    return "".join(
        f"{line}\n" if _CONTROL.fullmatch(line) else _REASON.sub("", line) + _MARK + _reason(line) + "\n"
        for line in template.splitlines()
    )


def _reason(line: str) -> str:
    found = _REASON.search(line)
    return found[1] if found else ""
