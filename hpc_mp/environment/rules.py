"""HM6xx: rules on variables set by a script, a shell or NCCL's files. The facts are data, in ``env/``."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import nearest
from hpc_mp.environment.conf import is_plain, read_number
from hpc_mp.environment.facts import Harm, facts

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


def _listed(settings: Settings, advice: Mapping[str, str]) -> Iterable[Hit]:
    yield from (Hit(setting.line, setting.name, advice[setting.name]) for setting in settings if setting.name in advice)


def _unknown(settings: Settings) -> Iterable[Hit]:
    tables = facts()
    for setting in settings:
        if setting.name.startswith("NCCL_") and not tables.explains(setting.name):
            near = nearest(setting.name, sorted(tables.recognized), CLOSE)
            yield Hit(setting.line, setting.name, f"Did you mean {near[0]}?" if near else "Leave it out.")


def _unprescribed(settings: Settings) -> Settings:
    """Return the settings without those that the vendor of a plug-in in use requires."""
    vendor = any(not facts().vendors.isdisjoint(clouds_of(setting)) for setting in settings)
    return [setting for setting in settings if not (vendor and setting.name in facts().allows)]


def _hurting(settings: Settings, harms: Mapping[str, Harm]) -> Iterable[Hit]:
    for setting in settings:
        if harm := _harm(setting, harms):
            yield Hit(setting.line, f"{setting.name}={setting.value} {harm.does}", harm.cure)


def _harm(setting: Assignment, harms: Mapping[str, Harm]) -> Harm | None:
    harm = harms.get(setting.name)
    return harm if harm and re.fullmatch(harm.values, setting.value) else None


def _two_clouds(settings: Settings) -> Iterable[Hit]:
    first: dict[str, Assignment] = {}
    for setting in settings:
        for cloud in clouds_of(setting):
            first.setdefault(cloud, setting)
    if len(first) > 1:
        (first_cloud, earlier), (second_cloud, later) = sorted(first.items(), key=lambda row: row[1].line)[:2]
        yield Hit(later.line, f"{later.name} is for {second_cloud}, {earlier.name} for {first_cloud}")


def clouds_of(setting: Assignment) -> list[str]:
    """Return the clouds whose networks a setting is for; none for most settings."""
    text = f"{setting.name}={setting.value}"
    return [cloud for cloud, pattern in facts().clouds.items() if re.match(pattern, text)]


def _too_many_sockets(settings: Settings) -> Iterable[Hit]:
    sockets = {setting.name: setting for setting in settings if setting.name in SOCKETS and setting.value.isdecimal()}
    if len(sockets) == len(SOCKETS) and (product := math.prod(int(setting.value) for setting in sockets.values())) > MOST_SOCKETS:
        yield Hit(max(setting.line for setting in sockets.values()), str(product))


def _no_number(settings: Settings) -> Iterable[Hit]:
    for setting in settings:
        if setting.name in facts().numbers and setting.value and not is_plain(setting.value) \
                and not _EXPANDED.search(setting.value):
            read = read_number(setting.value)
            yield Hit(setting.line, f"{setting.name}={setting.value}", "its default" if read is None else str(read))


def _no_word(settings: Settings) -> Iterable[Hit]:
    for setting in settings:
        choice = facts().choices.get(setting.name)
        if choice and setting.value and not re.fullmatch(choice.values, setting.value) and not _EXPANDED.search(setting.value):
            yield Hit(setting.line, f"{setting.name}={setting.value}", choice.words)


def _signs_in_list(settings: Settings) -> Iterable[Hit]:
    for setting in settings:
        entries = setting.value.removeprefix("^").removeprefix("=")
        if setting.name in LISTS and _STRAY.search(entries) and not _EXPANDED.search(setting.value):
            sign = setting.value[:len(setting.value) - len(entries)]
            yield Hit(setting.line, f"{setting.name}={setting.value}", f"{setting.name}={sign}{_STRAY.sub('', entries)}")


(LOOPBACK,) = rules_of("env/variable-rules.toml", {  # wrong only if there are other nodes
    "HM611": lambda settings: (Hit(setting.line, f"{setting.name}={setting.value}") for setting in settings
                               if setting.name in INTERFACES and re.match(r"=?(lo|docker\d*|virbr\d*)\b", setting.value)),
})
RULES: tuple[Rule[Settings], ...] = rules_of("env/variable-rules.toml", {
    "HM601": lambda settings: _listed(settings, facts().removed),
    "HM602": lambda settings: _listed(_unprescribed(settings), facts().legacy),
    "HM603": lambda settings: _listed(settings, facts().foreign),
    "HM604": _unknown,
    "HM605": lambda settings: (Hit(setting.line, f"{setting.name}={setting.value}", facts().words) for setting in settings
                              if setting.name in facts().levels and setting.value.isdecimal()),
    "HM606": lambda settings: (Hit(setting.line, f"{setting.name}={setting.value}", harm.does)
                              for setting in _unprescribed(settings) if (harm := _harm(setting, facts().debug))),
    "HM607": lambda settings: _hurting(settings, facts().harmful),
    "HM608": lambda settings: _hurting(settings, facts().info),
    "HM614": _two_clouds,
    "HM615": _too_many_sockets,
    "HM616": _no_number,
    "HM617": _no_word,
    "HM618": _signs_in_list,
})
