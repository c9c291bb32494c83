"""Output of ``scontrol show`` as tables of words: Slurm's settings, and its records of nodes, partitions and jobs; and draining
of a node. The health check is packed with this file, so it needs only the standard library."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from hpc_mp.base.command import CommandFailed, Runner, ask

Words = Mapping[str, str]
SHOW_CONFIG = ("scontrol", "show", "config")
SHOW_TOPOLOGY = ("scontrol", "show", "topology")
NOTHING = ("(null)", "N/A", "n/a", "(null type)")  # Slurm's marks for a field without a value; here an empty text
_SETTING = re.compile(r"([\w.]+(?:\[\d+\])?)\s*=(.*)")
_RECORD = re.compile(r"(\w[\w:/]*)=(.*?)(?=\s+\w[\w:/]*=|\s*$)")


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """The answer to ``scontrol show config``: Slurm's own settings, and its further sections by their titles."""

    config: Words
    sections: Mapping[str, Words] = field(default_factory=dict)


def show_config(ask: Runner = ask) -> SlurmSettings:
    """Return Slurm's settings. Raises CommandFailed if Slurm does not show them."""
    return read_config(ask(SHOW_CONFIG))


def show_topology(ask: Runner = ask) -> str:
    """Return the switches, as Slurm prints them. Raises CommandFailed."""
    return ask(SHOW_TOPOLOGY)


def show_records(what: Literal["node", "partition", "job"], name: str | None = None, ask: Runner = ask) -> tuple[Words, ...]:
    """Return the record of one node, partition or job, or of all. Raises CommandFailed if unknown, or without an answer."""
    return read_records(ask(("scontrol", "show", what, "--oneliner", *([name] if name is not None else []))))


def find_record(what: Literal["node", "partition", "job"], name: str, ask: Runner = ask) -> Words:
    """Return the record of one node, partition or job; an empty one if Slurm does not report it."""
    with suppress(CommandFailed):
        return next(iter(show_records(what, name, ask)), {})
    return {}


def find_settings(ask: Runner = ask) -> Words:
    """Return Slurm's own settings; none if it does not report them."""
    with suppress(CommandFailed):
        return show_config(ask).config
    return {}


def read_config(text: str) -> SlurmSettings:
    """Read ``KEY = VALUE`` lines; a line that ends in a colon begins a section, such as "Cgroup Support Configuration"."""
    tables: dict[str, dict[str, str]] = {"": {}}
    section = ""
    for line in text.splitlines():
        if line.endswith(":") and "=" not in line:
            section = line[:-1]
            tables[section] = {}
        elif match := _SETTING.fullmatch(line.strip()):
            tables[section][match[1]] = _value(match[2])
    return SlurmSettings(tables.pop(""), tables)


def read_records(text: str) -> tuple[Words, ...]:
    """Parse the output of ``--oneliner``: a line per record, of ``KEY=VALUE``, whose values may contain blanks."""
    return tuple({key: _value(value) for key, value in _RECORD.findall(line)} for line in text.splitlines() if "=" in line)


def _value(text: str) -> str:
    plain = text.strip()
    return "" if plain in NOTHING else plain


def drain(node: str, reason: str, ask: Runner) -> str:
    """Drain a node, unless it is already drained: the existing reason stays. Return what was done, in words."""
    try:
        record = next(iter(show_records("node", node, ask)), {})
        if "DRAIN" in record.get("State", ""):
            return f"{node} is already drained"
        ask(("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"))
    except CommandFailed as error:
        return f"{node} could not be drained: {error}"
    return f"{node} is drained: {reason}"


def drain_command(node: str, reason: str) -> str:
    """Return the same as a command for an administrator's shell. ``reason`` must contain no quote."""
    return f"scontrol update NodeName={node} State=DRAIN Reason='{reason}'"
