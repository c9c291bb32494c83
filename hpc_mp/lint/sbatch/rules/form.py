"""HM1xx: the form of the file and of its ``#SBATCH`` lines. Sources: src/sbatch/{sbatch,opt}.c."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable

from hpc_mp.base.command import CommandFailed, ask
from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import nearest
from hpc_mp.cluster.slurm.option_syntax import Option, option_table, releases, syntax
from hpc_mp.cluster.slurm.releases import parse_version
from hpc_mp.lint.sbatch.header import MAGIC
from hpc_mp.lint.sbatch.rules.finders import HitWords, of_directives
from hpc_mp.lint.sbatch.script import Script

CLOSE = 0.85  # similarity from which one name counts as a misspelling of another
_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_INDENTED = re.compile(rf"\s+{MAGIC} ")
_SLIP = re.compile(r"#+\s+SBATCH\s+-|#(?!SBATCH)(?i:sbatch)\b|#(SBTACH|SBACTH|SABTCH|SBATHC|BSATCH|SBATC|SBACH)\b")
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]\w*|\$\(|`|(?:^|=)~/")
_TEXTS = ("comment", "wrap", "mail-user")
MERGING_UNTIL = (25, 5)  # before this release, sbatch adds up the values of several --mail-type (CHANGELOG/slurm-25.05.md)
MAIL_TYPES = frozenset({"NONE", "BEGIN", "END", "FAIL", "REQUEUE", "INVALID_DEPEND", "STAGE_OUT", "ALL", "TIME_LIMIT",
                        "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS"})  # src/common/proc_args.c
_EXTGLOB = re.compile(r"^[^#\n]*\bshopt\s+-s\b[^#\n]*\bextglob\b", re.MULTILINE)
_SINGLE_DASH = re.compile(r"-([a-z][a-z\-]{2,})(=.*)?", re.DOTALL)


def _first(letters: str) -> Callable[[Script], Iterable[Hit]]:
    """Make a rule that yields the first line with these letters."""
    def find(script: Script) -> Iterable[Hit]:
        before, separator, _ = script.text.partition(letters)
        if separator:
            yield Hit(before.count("\n") + 1)
    return find


def _above_commands(form: re.Pattern[str]) -> Callable[[Script], Iterable[Hit]]:
    """Make a rule that yields the lines of this form above the first command."""
    def find(script: Script) -> Iterable[Hit]:
        for number, line in enumerate(script.lines[:script.header.end - 1], start=1):
            if match := form.match(line):
                yield Hit(number, match[0].rstrip(" -"))
    return find


def _unknown(script: Script) -> Iterable[tuple[Option, str]]:
    """Yield the options that sbatch does not know, with a suggestion; "" without one."""
    of_srun = set(option_table()["names"]["srun"])
    dashed = {word.line for word in script.header.words if _long_with_one_dash(word.text)}
    for option in script.directives:
        if not option.is_known and option.line not in dashed:
            near = _meant(option.name.replace("_", "-"))
            if option.name in of_srun:
                yield option, f"Pass --{option.name} to srun."
            else:
                yield option, f"Did you mean --{near}?" if near else ""


@functools.cache
def _meant(written: str) -> str | None:
    """Return the closest option: nearly the same letters, or the same letters in another order."""
    names = sorted(syntax("sbatch").names)
    near = nearest(written, names, CLOSE)
    near += [name for name in names if sorted(name) == sorted(written)]
    return near[0] if near else None


def _too_new(script: Script, option: Option) -> HitWords:
    since = releases().get(option.name, "")
    too_new = script.version and since and not since.startswith("-") and script.version < parse_version(since)
    return (f"--{option.name}", since) if too_new else None


def _value_too_new(script: Script, option: Option) -> HitWords:
    since = next((row["since"] for row in option_table()["younger"]
                  if (option.name, option.value) == (row["option"], row["value"])), "")
    too_new = since and script.version and script.version < parse_version(since)
    return (f"--{option.name}={option.value}", since) if too_new else None


def _gone(script: Script, option: Option) -> HitWords:
    last = releases().get(option.name, "")
    gone = script.version and last.startswith("-") and script.version >= parse_version(last[1:])
    return (f"--{option.name}", last[1:]) if gone else None


def _twice(script: Script) -> Iterable[Hit]:
    for options in script.header.components:
        first: dict[str, Option] = {}
        for option in options:
            merged = option.name == "mail-type" and (script.version or (0, 0)) < MERGING_UNTIL
            if option.name in first and option.is_known and not (merged and script.version):
                yield Hit(option.line, f"--{option.name}", str(first[option.name].line) +
                          ("; Slurm before 25.05 merges the values" if merged else ""))
            first.setdefault(option.name, option)


def _malformed(_: Script, option: Option) -> HitWords:
    form = malformed(option) if option.value is not None and not _EXPANSION.search(option.value) else None
    return (f"--{option.name} {option.value}", form) if form else None


def _other_schedulers(script: Script) -> Iterable[Hit]:
    """Yield the first ``#BSUB`` or ``#PBS`` that sbatch translates, also behind commands. Source: src/sbatch/xlate.c."""
    if script.header.words and not script.option("ignore-pbs"):
        lines = enumerate(script.lines[:script.header.end + 100], start=1)  # it gives up after 100 lines without #
        hits = (Hit(number, line.split()[0]) for number, line in lines if line.startswith(("#BSUB", "#PBS")))
        yield from itertools.islice(hits, 1)


def malformed(option: Option) -> str | None:
    """Return the expected form of an option's value if sbatch does not understand the value."""
    forms = option_table()["forms"]
    if not option.is_known or option.name not in forms or option.value is None:
        return None
    pattern, description = forms[option.name]
    return None if re.fullmatch(pattern, option.value) else description


def unexpanded(option: Option) -> str | None:
    """Return the part of a value that needs a shell's expansion. sbatch does not use a shell."""
    match = _EXPANSION.search(option.value or "") if option.name not in _TEXTS else None
    return match[0] if match else None


def _long_with_one_dash(text: str) -> str | None:
    match = _SINGLE_DASH.fullmatch(text)
    return match[1] if match and match[1] in syntax("sbatch").names else None


def _without_value(_: Script, option: Option) -> HitWords:
    """Judge an option without its value. sbatch joins the words of all directives before it parses them."""
    grammar = syntax("sbatch")
    if not option.is_known or option.name in grammar.without_value | grammar.optional_value:
        return None
    if option.value is None:
        return f"--{option.name}", "sbatch refuses the script"
    behind = option.value_line not in (None, option.line)
    return (f"--{option.name}", f"sbatch takes “{option.value}” in line {option.value_line} as the value") if behind else None


@functools.lru_cache(maxsize=1)
def bash_refusal(text: str) -> tuple[int, str] | None:
    """Return the (line, message) with which bash refuses to parse a script. ``-n`` keeps bash from running it, also its shopt."""
    patterns = ["-O", "extglob"] if _EXTGLOB.search(text) else []
    try:
        ask(["bash", "--norc", "-n", *patterns], environ={"PATH": os.defpath, "LC_ALL": "C"}, stdin=text)
    except CommandFailed as refused:
        match = re.search(r"line (\d+): (.*(?:syntax error|unexpected).*)", str(refused))
        return (int(match[1]), match[2].removeprefix("syntax error: ")) if match else None
    return None


def _refused_by_bash(script: Script) -> Iterable[Hit]:
    """Yield bash's refusal. bash is called only if the parser met unknown syntax, or an end without a beginning."""
    unclear = script.shell.faults or any(script.commands(*_RESERVED))
    if unclear and "bash" in script.lines[0] and (refusal := bash_refusal(script.text.replace("\r\n", "\n"))):
        yield Hit(min(refusal[0], len(script.lines)), refusal[1])


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    # A file without directives and steps is sourced by other scripts.
    "HM101": lambda script: () if script.text.startswith("#!") or not (script.header.words or script.steps) else (Hit(1),),
    "HM102": _first("\r\n"),
    "HM103": _first("\0"),
    "HM104": lambda script: (Hit(line, text.split("#", 2)[1].strip()) for line, text in script.shell.comments
                            if line > script.header.end and script.lines[line - 1].startswith(MAGIC)),
    "HM105": _above_commands(_INDENTED),
    "HM106": _above_commands(_SLIP),
    "HM107": lambda script: (Hit(option.line, option.name.lstrip("-"), advice) for option, advice in _unknown(script) if advice),
    "HM108": lambda script: (Hit(option.line, option.name.lstrip("-")) for option, advice in _unknown(script) if not advice),
    "HM109": of_directives(_too_new),
    "HM110": _twice,
    "HM111": lambda script: (Hit(word.line, match[0].lstrip("=")) for word in script.header.words
                            if (match := _EXPANSION.search(word.text)) and not any(
                                option.line == word.line and option.name in _TEXTS for option in script.directives)),
    "HM112": of_directives(_malformed),
    "HM113": lambda script: (Hit(word.line, name) for word in script.header.words if (name := _long_with_one_dash(word.text))),
    "HM114": lambda script: (Hit(word.line, word.text) for word in script.header.strays
                            if not any(option.line == word.line for option, _ in _unknown(script))),
    "HM115": lambda script: map(Hit, script.header.unmatched),
    "HM116": lambda script: () if any(_refused_by_bash(script)) else map(Hit, script.shell.faults[:1]),
    "HM117": of_directives(_gone),
    "HM118": of_directives(_value_too_new),
    "HM119": of_directives(_without_value),
    "HM120": _refused_by_bash,
    "HM121": of_directives(lambda _, option: ",".join(word for word in (option.value or "").split(",") if word and word.upper()
                           not in MAIL_TYPES) if option.name == "mail-type" and not unexpanded(option) else ""),
    "HM122": _other_schedulers,
})
