"""HM6xx: rules on variables set by a script, a shell or NCCL's files. The facts are data, in ``env/``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.text import nearest
from hpc_mp.environment.facts import Harm, facts
from hpc_mp.environment.nccl_values import is_plain, read_number

CLOSE = 0.8  # similarity at which one name is taken for a misspelling of another
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
LISTS = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA")
SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
MOST_SOCKETS = 64  # maximum of their product, according to NCCL's documentation
_EXPANDED = re.compile(r"[$`]")  # the shell inserts a value that is unknown here
_STRAY = re.compile(r"[\s^=]")


class Assignment(Protocol):
    """A variable that is set. ``line``: the line of a script, or the index of the setting."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def line(self) -> int: ...


Settings = Sequence[Assignment]


def _removed(settings: Settings) -> Iterable[Hit]:
    return _listed(settings, facts().removed)


def _legacy(settings: Settings) -> Iterable[Hit]:
    return _listed(_unprescribed(settings), facts().legacy)


def _no_name(settings: Settings) -> Iterable[Hit]:
    return _listed(settings, facts().foreign)


def _listed(settings: Settings, advice: Mapping[str, str]) -> Iterable[Hit]:
    yield from (Hit(each.line, each.name, advice[each.name]) for each in settings if each.name in advice)


def _unknown(settings: Settings) -> Iterable[Hit]:
    known = facts()
    for each in settings:
        if each.name.startswith("NCCL_") and not known.explains(each.name):
            near = nearest(each.name, sorted(known.known), CLOSE)
            yield Hit(each.line, each.name, f"Did you mean {near[0]}?" if near else "Leave it out.")


def _numbered_level(settings: Settings) -> Iterable[Hit]:
    for each in settings:
        if each.name in facts().levels and each.value.isdecimal():
            yield Hit(each.line, f"{each.name}={each.value}", facts().words)


def _debug(settings: Settings) -> Iterable[Hit]:
    for each in _unprescribed(settings):
        if harm := _harm(each, facts().debug):
            yield Hit(each.line, f"{each.name}={each.value}", harm.does)


def _unprescribed(settings: Settings) -> Settings:
    """Return the settings without those that the vendor of a plug-in in use requires."""
    vendor = any(not facts().vendors.isdisjoint(clouds_of(each)) for each in settings)
    return [each for each in settings if not (vendor and each.name in facts().allows)]


def _harmful(settings: Settings) -> Iterable[Hit]:
    return _hurting(settings, facts().harmful)


def _outdated(settings: Settings) -> Iterable[Hit]:
    return _hurting(settings, facts().info)


def _hurting(settings: Settings, harms: Mapping[str, Harm]) -> Iterable[Hit]:
    for each in settings:
        if harm := _harm(each, harms):
            yield Hit(each.line, f"{each.name}={each.value} {harm.does}", harm.cure)


def _harm(setting: Assignment, harms: Mapping[str, Harm]) -> Harm | None:
    """Return the harm of a setting, if its value is harmful."""
    harm = harms.get(setting.name)
    return harm if harm and re.fullmatch(harm.values, setting.value) else None


def _loopback(settings: Settings) -> Iterable[Hit]:
    for each in settings:
        if each.name in INTERFACES and re.match(r"=?(lo|docker\d*|virbr\d*)\b", each.value):
            yield Hit(each.line, f"{each.name}={each.value}")


def _two_clouds(settings: Settings) -> Iterable[Hit]:
    first: dict[str, Assignment] = {}
    for each in settings:
        for cloud in clouds_of(each):
            first.setdefault(cloud, each)
    if len(first) > 1:
        (one, before), (other, each) = sorted(first.items(), key=lambda row: row[1].line)[:2]
        yield Hit(each.line, f"{each.name} is for {other}, {before.name} for {one}")


def clouds_of(setting: Assignment) -> list[str]:
    """Return the clouds whose networks a setting is for; none for most settings."""
    text = f"{setting.name}={setting.value}"
    return [cloud for cloud, pattern in facts().clouds.items() if re.match(pattern, text)]


def _too_many_sockets(settings: Settings) -> Iterable[Hit]:
    given = {each.name: each for each in settings if each.name in SOCKETS and each.value.isdecimal()}
    if len(given) == len(SOCKETS) and (product := math.prod(int(each.value) for each in given.values())) > MOST_SOCKETS:
        yield Hit(max(each.line for each in given.values()), str(product))


def _no_number(settings: Settings) -> Iterable[Hit]:
    for each in settings:
        if each.name in facts().numbers and each.value and not is_plain(each.value) and not _EXPANDED.search(each.value):
            read = read_number(each.value)
            yield Hit(each.line, f"{each.name}={each.value}", "its default" if read is None else str(read))


def _no_word(settings: Settings) -> Iterable[Hit]:
    for each in settings:
        choice = facts().choices.get(each.name)
        if choice and each.value and not re.fullmatch(choice.values, each.value) and not _EXPANDED.search(each.value):
            yield Hit(each.line, f"{each.name}={each.value}", choice.words)


def _signs_in_list(settings: Settings) -> Iterable[Hit]:
    for each in settings:
        entries = each.value.removeprefix("^").removeprefix("=")
        if each.name in LISTS and _STRAY.search(entries) and not _EXPANDED.search(each.value):
            sign = each.value[:len(each.value) - len(entries)]
            yield Hit(each.line, f"{each.name}={each.value}", f"{each.name}={sign}{_STRAY.sub('', entries)}")


LOOPBACK: Rule[Settings] = Rule(  # wrong only if there are other nodes
    "HM611", "error", _loopback,
    "{it}: other nodes cannot be reached through this interface.",
    "Name the interface between the nodes.")
RULES: tuple[Rule[Settings], ...] = (
    Rule("HM601", "warning", _removed,
         "{it} does nothing: NCCL has removed it.",
         "{advice}."),
    Rule("HM602", "info", _legacy,
         "{it} is an old name that NCCL still honours.",
         "{advice}."),
    Rule("HM603", "warning", _no_name,
         "{it} is no variable of NCCL: it does nothing.",
         "{advice}."),
    Rule("HM604", "warning", _unknown,
         "NCCL 2.30 reads no variable {it}.",
         "{advice}"),
    Rule("HM605", "info", _numbered_level,
         "{it}: a number that only old scripts use.",
         "Write the word that is meant: {advice}."),
    Rule("HM606", "warning", _debug,
         "{it} {advice}: a setting for the search of a fault.",
         "Leave it out of production runs."),
    Rule("HM607", "warning", _harmful,
         "{it}.",
         "{advice}."),
    Rule("HM608", "info", _outdated,
         "{it}.",
         "{advice}."),
    Rule("HM614", "warning", _two_clouds,
         "{it}: no machine has both.",
         "Keep the settings of the cluster that this is for."),
    Rule("HM615", "warning", _too_many_sockets,
         "NCCL_SOCKET_NTHREADS × NCCL_NSOCKS_PERTHREAD is {it}: more than 64 is not allowed.",
         "Lower one of them, or leave both out."),
    Rule("HM616", "warning", _no_number,
         "{it}: NCCL takes a whole number there, and reads {advice}.",
         "Write a number in figures, or leave it out."),
    Rule("HM617", "warning", _no_word,
         "{it} is no word that NCCL knows there: it does nothing.",
         "Write one of {advice}, or leave it out."),
    Rule("HM618", "warning", _signs_in_list,
         "{it}: ^ and = count in front of the whole list only, and a blank belongs to a name. Such names match nothing.",
         "One sign, no blanks: {advice}; or leave it out."),
)
