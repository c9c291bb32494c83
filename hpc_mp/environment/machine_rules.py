"""HM65x: variables that do not fit the machine on which they are set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.environment.apply import Applied
from hpc_mp.environment.facts import facts
from hpc_mp.environment.machine import Shown
from hpc_mp.environment.nccl_values import taken
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.profiles import load_profile
from hpc_mp.environment.rules import clouds_of
from hpc_mp.environment.versions import Release, shown

Variables = Mapping[str, Effective]
FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE")
NCCL_INTERFACES = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")


@dataclass(frozen=True, slots=True)
class Here:
    """One machine and the known facts about it.

    Attributes:
        variables: the effective variables by name, including those that have only the library's default.
        platform: the profile that matches the machine.
        applied: the profile in use, which may be another.
        there: returns True if a file of that path exists.
    """

    variables: Variables
    machine: Shown
    versions: Mapping[str, Release]
    platform: str | None
    applied: Applied | None
    there: Callable[[str], bool]


def _hit(subject: str, it: str = "", advice: str = "") -> Hit:
    return Hit(it=it, advice=advice, subject=subject)


def _set(variables: Variables) -> Sequence[Effective]:
    return [each for each in variables.values() if each.origin != "default"]


def _value(variables: Variables, name: str) -> str:
    return (variables[name].value or "") if name in variables else ""


def _other_cloud(here: Here) -> Iterable[Hit]:
    if here.platform is None:
        return
    own = (load_profile(here.platform).cloud or "").partition(" ")[0]
    for each in _set(here.variables):
        clouds = clouds_of(_Plain(each.name, each.value or ""))
        if clouds and own not in [cloud.partition(" ")[0] for cloud in clouds]:
            yield _hit(each.name, f"{each.name}={each.value} is for {' or '.join(clouds)}", here.platform)


class _Plain(NamedTuple):
    name: str
    value: str
    line: int = 0


def _no_interface(here: Here) -> Iterable[Hit]:
    there = here.machine.interfaces
    names = (*there, *here.machine.layers, "all")
    for each in _set(here.variables):
        value, missing = each.value or "", False
        if each.name in NCCL_INTERFACES:
            missing = len(value) > 1 and not taken(value, there)  # NCCL ignores a single letter
        elif each.name == "GLOO_SOCKET_IFNAME":
            missing = bool(value) and not set(value.split(",")) <= set(there)
        elif each.name == "UCX_NET_DEVICES":
            missing = bool(value) and not {part.partition(":")[0] for part in value.split(",")} <= set(names)
        if there and missing:
            yield _hit(each.name, f"{each.name}={value}", ", ".join(there))


def _no_device(here: Here) -> Iterable[Hit]:
    value = _value(here.variables, "NCCL_IB_HCA")
    if value and here.machine.layers and not taken(value, here.machine.layers):
        yield _hit("NCCL_IB_HCA", f"NCCL_IB_HCA={value}", ", ".join(here.machine.layers))


def _mixed_devices(here: Here) -> Iterable[Hit]:
    value = _value(here.variables, "NCCL_IB_HCA")
    chosen = taken(value, here.machine.layers)
    band, other = ([name for name in here.machine.devices(layer) if name in chosen] for layer in ("InfiniBand", "Ethernet"))
    if band and other:
        yield _hit("NCCL_IB_HCA", f"NCCL_IB_HCA={value}" if value else "without NCCL_IB_HCA NCCL", ",".join(other))


def _no_file(here: Here) -> Iterable[Hit]:
    for name in FILES:
        value = _value(here.variables, name)
        if value and not here.there(value):
            yield _hit(name, f"{name}={value}")


def _too_new(here: Here) -> Iterable[Hit]:
    have = here.versions.get("nccl", ())
    for each in _set(here.variables):
        since = facts().since.get(each.name, ())
        if have and since > have:
            yield _hit(each.name, each.name, f"{shown(since)}; here is {shown(have)}")


def _unmet(here: Here) -> Iterable[Hit]:
    if here.applied is not None:
        yield from (_hit("", here.applied.profile.name, text) for text in here.applied.unmet)


def _left_alone(here: Here) -> Iterable[Hit]:
    for wanted in here.applied.unset if here.applied is not None else ():
        each = here.variables.get(wanted.name)
        if here.applied and each and each.origin != "default":
            yield _hit(each.name, f"{each.name}={each.value}: {here.applied.profile.name} leaves it alone", wanted.reason)


def _against_profile(here: Here) -> Iterable[Hit]:
    for each in _set(here.variables):
        for said in each.hides:
            if said.origin == "profile" and said.value != each.value:
                yield _hit(each.name, f"{each.name}={each.value}", f"{said.where} says {said.value or 'nothing'}")


def _plugin(here: Here) -> Iterable[Hit]:
    value = _value(here.variables, "NCCL_ENV_PLUGIN")
    if value and value.lower() != "none":
        yield _hit("NCCL_ENV_PLUGIN", f"NCCL_ENV_PLUGIN={value}")


RULES: tuple[Rule[Here], ...] = (
    Rule("HM651", "warning", _other_cloud, "{it}; this machine shows itself as {advice}.", "Leave it out here."),
    Rule("HM652", "warning", _no_interface, "{it} fits no interface of this machine, which has {advice}.",
         "Name the one that reaches the other nodes, or leave it out."),
    Rule("HM653", "warning", _no_device, "{it} fits no RDMA device of this machine, which has {advice}: NCCL goes over TCP.",
         "Name these, or leave it out."),
    Rule("HM654", "warning", _mixed_devices,
         "{it} takes {advice}, in Ethernet mode, beside the devices of InfiniBand: another network.",
         "Write NCCL_IB_HCA=^={advice}, or name those of InfiniBand."),
    Rule("HM655", "warning", _no_file, "{it}: there is no such file here, and NCCL goes on without a word.",
         "Correct the path; a container must have the file mounted."),
    Rule("HM656", "warning", _too_new, "{it} came with NCCL {advice}: it does nothing.", "Leave it out, or take a newer NCCL."),
    Rule("HM657", "warning", _unmet, "{it} asks for {advice}.", "Take a newer release."),
    Rule("HM658", "warning", _left_alone, "{it}: {advice}.", "Leave it out."),
    Rule("HM659", "info", _against_profile, "{it}, while {advice}.", "See to it that this is meant."),
    Rule("HM660", "info", _plugin, "{it}: a plug-in may say other values than those shown here.",
         "Ask the plug-in; NCCL_ENV_PLUGIN=none does without it."),
)
