"""Texts for people that are templates: a ``.txt.j2`` file lies beside the code that shows it, and has a macro for each text."""

import shlex
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_mp.base import text

if TYPE_CHECKING:
    from jinja2 import Environment


def view(template: str, **names: Any) -> Any:
    """Return the macros of a template, ``"cli/status.txt.j2"``. They know the functions of ``base.text``, ``shell`` for a command
    line, and ``names``."""
    return _environment().get_template(template).make_module(names)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(Path(__file__).resolve().parents[1]), undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.globals |= {"shell": shlex.join, **dict(getmembers(text, isfunction))}
    environment.filters |= dict(getmembers(text, isfunction))
    return environment
