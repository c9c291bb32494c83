"""Options of the program that a shell script starts, ``… pretrain_gpt.py $ARGS``, without a run of it. Variables, arrays,
defaults and products are expanded; what a condition or a loop sets becomes an option that no table knows."""

import re
from collections.abc import Mapping
from math import prod

COMMENT, SUBSTITUTION = re.compile(r"(?m)(?:^|(?<=\s))#.*$"), re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
ASSIGNED = re.compile(r"""^[ \t]*(?:export +)?(\w+)(\+?)=(\([^)]*\)|"[^"]*"|'[^']*'|[^\s;]*)""", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
BLOCK = re.compile(r"^[ \t]*(?:(if|for|while|until|case)|fi|done|esac)\b", re.MULTILINE)
OPTION, BEHIND = re.compile(r"(?<!\S)(--[\w-]+)[=\s]*((?:(?!--)\S+\s*)*)"), re.compile(r"\s[\d&]?[>|;&]")


def options(text: str) -> list[tuple[str, str | bool]]:
    """Return the options of the longest command that starts a .py file, each with its value; True without one."""
    plain, variables = SUBSTITUTION.sub("$_", COMMENT.sub("", text)).replace("\\\n", " "), dict[str, str]()
    for match in ASSIGNED.finditer(plain):
        name, appends, value = match.groups()
        inside = sum(1 if block[1] else -1 for block in BLOCK.finditer(plain, 0, match.start())) > 0
        new = f"{'--' if '--' in value else ''}{name}-in-a-condition" if inside else expanded(value, variables)
        variables[name] = f"{variables.get(name, '')} {new}" if appends or inside else new
    commands = (expanded(line, variables).partition(".py ")[2] for line in ASSIGNED.sub("", plain).splitlines())
    longest = max(commands, key=len, default="")
    return [(name, value.strip() or True) for name, value in OPTION.findall(BEHIND.split(longest)[0])]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text without quotes, with the values of its variables; one that is not set stays, unless it has a default."""
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0] if match[3] is None else match[3])
    for _ in range(3):  # a default may hold a variable
        text = VARIABLE.sub(value, text)
    return re.sub("[\"'()]", "", PRODUCT.sub(lambda match: str(prod(map(int, match[1].split("*")))), text))
