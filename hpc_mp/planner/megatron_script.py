"""Options of the program that a shell script starts, ``… pretrain_gpt.py $ARGS``. The script is not run.

Variables, arrays, defaults and products are expanded. What a condition or a loop sets becomes an option that no one knows.
"""

import re
from collections.abc import Mapping
from math import prod

COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
SUBSTITUTION = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
ASSIGNED = re.compile(r"""^[ \t]*(?:export +)?(\w+)(\+?)=(\([^)]*\)|"[^"]*"|'[^']*'|[^\s;]*)""", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
BLOCK = re.compile(r"^[ \t]*(?:(if|for|while|until|case)|fi|done|esac)\b", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)(--[\w-]+)[=\s]*((?:(?!--)\S+\s*)*)")
BEHIND = re.compile(r"\s[\d&]?[>|;&]")  # what follows a command
NESTED = 3  # defaults that hold variables


def options(text: str) -> list[tuple[str, str | bool]]:
    """Return the options of the longest command that starts a .py file, each with its value; True without one."""
    plain = SUBSTITUTION.sub("$_", COMMENT.sub("", text)).replace("\\\n", " ")
    variables = _variables(plain)
    commands = (_expanded(line, variables).partition(".py ")[2] for line in ASSIGNED.sub("", plain).splitlines())
    arguments = BEHIND.split(max(commands, key=len, default=""))[0]
    return [(name, value.strip() or True) for name, value in OPTION.findall(arguments)]


def _variables(plain: str) -> dict[str, str]:
    """Return the values of variables at the end of a script."""
    variables: dict[str, str] = {}
    for match in ASSIGNED.finditer(plain):
        name, appends, value = match.groups()
        inside = sum(1 if block[1] else -1 for block in BLOCK.finditer(plain, 0, match.start())) > 0
        new = f"{'--' if '--' in value else ''}{name}-in-a-condition" if inside else _expanded(value, variables)
        variables[name] = f"{variables.get(name, '')} {new}" if appends or inside else new
    return variables


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of its variables, without quotes. Unset variables stay, unless they have a default."""
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0] if match[3] is None else match[3])

    for _ in range(NESTED):
        text = VARIABLE.sub(value, text)
    text = PRODUCT.sub(lambda match: str(prod(map(int, match[1].split("*")))), text)
    return re.sub("[\"'()]", "", text)
