"""Findings on the variables of a machine: general rules, and HM65x: variables that do not fit the machine on which they are
set."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_mp.base.findings import Finding, Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.environment.apply import Applied
from hpc_mp.environment.conf import Setting, read_lines, taken
from hpc_mp.environment.detect import Shown
from hpc_mp.environment.facts import facts
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.profiles import load_profile
from hpc_mp.environment.rules import LOOPBACK, RULES, clouds_of
from hpc_mp.environment.versions import Release, shown

Variables = Mapping[str, Effective]
FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE")
NCCL_INTERFACES = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")


@dataclass(frozen=True, slots=True)
class Here:
    """One machine and the known facts about it."""

    variables: Variables  # the effective variables by name, including those that have only the library's default
    machine: Shown
    versions: Mapping[str, Release]
    platform: str | None  # the profile that matches the machine
    applied: Applied | None  # the profile in use, which may be another
    exists: Callable[[str], bool]  # returns True if a file of that path exists


def _hit(subject: str, item: str = "", advice: str = "") -> Hit:
    return Hit(item=item, advice=advice, subject=subject)


def _set(variables: Variables) -> Sequence[Effective]:
    return [variable for variable in variables.values() if variable.origin != "default"]


def _value(variables: Variables, name: str) -> str:
    return (variables[name].value or "") if name in variables else ""


def _other_cloud(host: Here) -> Iterable[Hit]:
    if host.platform is None:
        return
    owner = (load_profile(host.platform).cloud or "").partition(" ")[0]
    for variable in _set(host.variables):
        clouds = clouds_of(Setting(variable.name, variable.value or ""))
        if clouds and owner not in [cloud.partition(" ")[0] for cloud in clouds]:
            yield _hit(variable.name, f"{variable.name}={variable.value} is for {' or '.join(clouds)}", host.platform)


def _no_interface(host: Here) -> Iterable[Hit]:
    interfaces = host.machine.interfaces
    names = (*interfaces, *host.machine.layers, "all")
    for variable in _set(host.variables):
        value, missing = variable.value or "", False
        if variable.name in NCCL_INTERFACES:
            missing = len(value) > 1 and not taken(value, interfaces)  # NCCL ignores a single letter
        elif variable.name == "GLOO_SOCKET_IFNAME":
            missing = bool(value) and not set(value.split(",")) <= set(interfaces)
        elif variable.name == "UCX_NET_DEVICES":
            missing = bool(value) and not {part.partition(":")[0] for part in value.split(",")} <= set(names)
        if interfaces and missing:
            yield _hit(variable.name, f"{variable.name}={value}", ", ".join(interfaces))


def _no_device(host: Here) -> Iterable[Hit]:
    value = _value(host.variables, "NCCL_IB_HCA")
    if value and host.machine.layers and not taken(value, host.machine.layers):
        yield _hit("NCCL_IB_HCA", f"NCCL_IB_HCA={value}", ", ".join(host.machine.layers))


def _mixed_devices(host: Here) -> Iterable[Hit]:
    value = _value(host.variables, "NCCL_IB_HCA")
    chosen = taken(value, host.machine.layers)
    infiniband, ethernet = ([name for name in host.machine.devices(layer) if name in chosen]
                            for layer in ("InfiniBand", "Ethernet"))
    if infiniband and ethernet:
        yield _hit("NCCL_IB_HCA", f"NCCL_IB_HCA={value}" if value else "without NCCL_IB_HCA NCCL", ",".join(ethernet))


def _too_new(host: Here) -> Iterable[Hit]:
    release = host.versions.get("nccl", ())
    for variable in _set(host.variables):
        since = facts().since.get(variable.name, ())
        if release and since > release:
            yield _hit(variable.name, variable.name, f"{shown(since)}, but this is {shown(release)}")


def _left_alone(host: Here) -> Iterable[Hit]:
    for variable in host.applied.unset if host.applied is not None else ():
        current = host.variables.get(variable.name)
        if host.applied and current and current.origin != "default":
            yield _hit(current.name, f"{current.name}={current.value}: {host.applied.profile.name} leaves it unset",
                       variable.reason)


def _against_profile(host: Here) -> Iterable[Hit]:
    for variable in _set(host.variables):
        for setting in variable.hides:
            if setting.origin == "profile" and setting.value != variable.value:
                yield _hit(variable.name, f"{variable.name}={variable.value}",
                           f"{setting.where} has {setting.value or 'an empty value'}")


ON_MACHINE: tuple[Rule[Here], ...] = rules_of("env/variable-rules.toml", {
    "HM651": _other_cloud,
    "HM652": _no_interface,
    "HM653": _no_device,
    "HM654": _mixed_devices,
    "HM655": lambda host: (_hit(name, f"{name}={value}") for name in FILES
                           if (value := _value(host.variables, name)) and not host.exists(value)),
    "HM656": _too_new,
    "HM657": lambda host: (_hit("", host.applied.profile.name, text) for text in host.applied.unmet) if host.applied else (),
    "HM658": _left_alone,
    "HM659": _against_profile,
})


# On a machine the number of nodes of a job is unknown, so the loopback may be right.
ANYWHERE = (*RULES, replace(LOOPBACK, severity="warning"))

_SETS = re.compile(r"\s*(?:(?:export|declare -x|setenv)\s+)?([A-Za-z_]\w*)(?:=|\s+(?=\S))(.*)")


def lint(host: Here) -> tuple[Finding, ...]:
    """Return every finding, sorted by variable, which is its subject. HM601 to HM618 are the same as in ``hpc-mp lint``."""
    context = [variable for variable in host.variables.values() if variable.origin != "default"]
    general = _general([Setting(variable.name, variable.value or "", number) for number, variable in enumerate(context)])
    findings = [_at(context[line], finding) for line, finding in general if context[line].origin != "profile"]
    fitting = (finding for rule in ON_MACHINE for finding in rule.apply(host))
    findings += [_at(host.variables.get(finding.subject), finding) for finding in fitting]
    return tuple(sorted(dict.fromkeys(findings),
                        key=lambda finding: (finding.subject, finding.code, finding.file or "", finding.line or 0)))


def place(variable: Effective) -> str:
    """Return a description of the source of a variable's value."""
    return f"profile {variable.where}" if variable.origin == "profile" else variable.where or variable.origin


def _general(settings: Sequence[Setting], path: str | None = None) -> Iterator[tuple[int, Finding]]:
    """Yield the findings of the general rules, each with the line of its setting, whose variable is its subject."""
    names = {setting.line: setting.name for setting in settings}
    for rule in ANYWHERE:
        yield from ((hit.line, rule.finding(hit._replace(subject=names[hit.line]), path)) for hit in rule.find(settings))


def _at(variable: Effective | None, finding: Finding) -> Finding:
    """Return the finding with the file and line that set the variable, if a file did."""
    if variable is None or variable.origin not in ("user file", "system file"):
        return replace(finding, file=None, line=None)
    path, _, line = variable.where.rpartition(":")
    return replace(finding, file=path, line=int(line))


def lint_variables(text: str, path: str) -> tuple[Finding, ...]:
    """Apply the general rules to the output of ``env``, to NAME=VALUE lines or to the exports of a shell."""
    settings = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _SETS.match(line):
            settings.append(Setting(match[1], _unquoted(match[2]), number))
    return _by_line(finding for _, finding in _general(settings, path))


def lint_nccl_conf(data: bytes, path: str) -> tuple[Finding, ...]:
    """Apply the general rules to one of NCCL's files."""
    return _by_line(finding for _, finding in _general(read_lines(data), path))


def _by_line(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: (finding.line or 0, finding.code)))


def _unquoted(value: str) -> str:
    """Return a value as a shell reads it. Text that a shell cannot parse is unchanged."""
    try:
        return " ".join(shlex.split(value, comments=True))
    except ValueError:
        return value
