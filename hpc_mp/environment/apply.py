"""Application of a profile to one machine: the values that apply there, and the reasons for omitting others."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.environment.detect import Shown
from hpc_mp.environment.precedence import Said
from hpc_mp.environment.profiles import APPLIED, Profile, Variable
from hpc_mp.environment.versions import Release, holds, shown

_NAMES = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A variable of a profile that does not apply here. ``unknown``: True if it cannot be determined whether it applies."""

    variable: Variable
    why: str
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """The applied profile. ``settings``: its settings; ``unset``: names that must not be set; ``unmet``: unmet requirements."""

    profile: Profile
    settings: tuple[Said, ...]
    unset: tuple[Variable, ...]
    left_out: tuple[LeftOut, ...]
    unmet: tuple[str, ...]


def apply(profile: Profile, machine: Shown, releases: Mapping[str, Release], environ: Mapping[str, str]) -> Applied:
    """Apply a profile. ``releases``: the releases known here; ``environ``: the source of values such as ``$SLURM_JOB_ID``."""
    settings: list[Said] = []
    left_out: list[LeftOut] = []
    for variable in profile.variable:
        if variable.use not in APPLIED:
            continue
        guarded = guard(variable, releases)
        if guarded is not None:
            left_out.append(guarded)
            continue
        value = _value(variable, machine, environ)
        if isinstance(value, LeftOut):
            left_out.append(value)
        else:
            settings.append(Said(variable.name, value, "profile", profile.name, variable.joins))
    unset = tuple(variable for variable in profile.variable if variable.use == "leave" and guard(variable, releases) is None)
    return Applied(profile, tuple(settings), unset, tuple(left_out), tuple(_unmet(profile, releases)))


def guard(variable: Variable, releases: Mapping[str, Release]) -> LeftOut | None:
    """Return the reason to omit a variable; None if every library has the release that the variable needs."""
    for library, requirement in variable.needs.items():
        satisfied = holds(requirement, releases.get(library))
        if satisfied is None:
            return LeftOut(variable, f"needs {library} {requirement}, and the release here is unknown", True)
        if not satisfied:
            return LeftOut(variable, f"needs {library} {requirement}, but the release here is {shown(releases[library])}")
    return None


def _unmet(profile: Profile, releases: Mapping[str, Release]) -> Iterator[str]:
    for library, requirement in profile.requires.items():
        if holds(requirement, releases.get(library)) is False:
            yield f"{library} {requirement}, but the release here is {shown(releases[library])}"


def _value(variable: Variable, machine: Shown, environ: Mapping[str, str]) -> str | LeftOut:
    if variable.finds:
        return _FOUND[variable.finds](variable, machine)
    missing = [name for name in _NAMES.findall(variable.value) if name not in environ] if variable.expands else []
    if missing:
        return LeftOut(variable, f"refers to ${missing[0]}, which is not set here", True)
    return _NAMES.sub(lambda name: environ[name[1]], variable.value) if variable.expands else variable.value


def _route(variable: Variable, machine: Shown) -> str | LeftOut:
    if machine.route is None:
        return LeftOut(variable, "is the interface of the default route, and this machine has no default route", True)
    return f"={machine.route}" if variable.name.startswith("NCCL_") else machine.route


def _infiniband(variable: Variable, machine: Shown) -> str | LeftOut:
    if not machine.devices("Ethernet"):
        return LeftOut(variable, "is for machines that also have ports in Ethernet mode; here NCCL chooses the ports itself")
    return f"={','.join(machine.devices('InfiniBand'))}"


_FOUND: Mapping[str, Callable[[Variable, Shown], str | LeftOut]] = {"route": _route, "infiniband": _infiniband}
