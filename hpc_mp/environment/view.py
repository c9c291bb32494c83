"""All facts about the variables of one machine, as one value and as lines for any POSIX shell under ``set -eu``."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.apply import Applied, apply
from hpc_mp.environment.conf import ConfFile, nccl_files
from hpc_mp.environment.detect import Platform, platform, read_machine
from hpc_mp.environment.facts import facts
from hpc_mp.environment.findings import Here, lint, place
from hpc_mp.environment.precedence import Effective, of_file, of_library, of_process, settle
from hpc_mp.environment.profiles import load_profile
from hpc_mp.environment.versions import Installed, Release, distribution, versions

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class View:
    """The variables of a machine, their sources, and findings."""

    platform: Platform  # the detected platform
    applied: Applied | None  # the profile in use, if any
    versions: Mapping[str, Release]
    files: tuple[ConfFile, ...]  # NCCL's files, the user's before the system's, including missing ones
    variables: tuple[Effective, ...]  # every variable that is set or that NCCL reads, by name
    findings: tuple[Finding, ...]


def view_of(source: NodeSource, environ: Mapping[str, str], profile: str = AUTO, installed: Installed = distribution) -> View:
    """Return the view of a machine with a profile: a name, ``auto`` for the detected one, ``none``. Raises HpcMpError for an
    unknown profile."""
    machine = read_machine(source)
    detected = platform(machine)
    releases = versions(source, installed)
    name = {AUTO: detected.name, NONE: None}.get(profile, profile)
    applied = None if name is None else apply(load_profile(name), machine, releases, environ)
    files = nccl_files(source, environ)
    variables = effective(environ, files, applied)
    host = Here({variable.name: variable for variable in variables}, machine, releases, detected.name, applied,
                lambda path: source.path(path).exists())
    return View(detected, applied, releases, files, variables, lint(host))


def effective(environ: Mapping[str, str], files: tuple[ConfFile, ...], applied: Applied | None) -> tuple[Effective, ...]:
    """Return the effective variables. The order is process, user's file, system's file, profile, NCCL's defaults. ``files``:
    NCCL's files, the system's last."""
    *user, system = files
    profile = applied.settings if applied is not None else ()
    names = {line.name for file in files for line in file.lines}
    names |= {variable.name for variable in applied.profile.variable} if applied is not None else set()
    return settle([of_process(environ, names), *(of_file(file, "user file") for file in user), of_file(system, "system file"),
                   profile, of_library()])


def shell_lines(view: View) -> Iterator[str]:
    """Yield shell lines with the variables that are set and the changes of the profile. Text is verbatim, bytes are as returned
    by ``os.fsdecode``.

    Sourced in a container, the lines include settings of the machine's own files, which are not visible there.
    """
    profile = view.applied.profile if view.applied else None
    yield f"# profile: {profile.name} ({profile.title})" if profile else "# profile: none"
    for script in profile.script if profile else ():
        assignments = "".join(f"{name}={shlex.quote(value)} " for name, value in script.given.items())
        yield f"# first, in bash: {assignments}. {shlex.quote(script.files[0])}  ({script.reason})"
    unset = {variable.name: variable for variable in (view.applied.unset if view.applied else ())}
    for variable in view.variables:
        if variable.origin != "default" and variable.name not in unset:
            yield from _export(variable, view)
    for name, entry in sorted(unset.items()):
        yield f"# {one_line(entry.reason)}"
        yield f"unset {name}"
    for omission in view.applied.left_out if view.applied else ():
        yield f"# left out: {omission.variable.name} {one_line(omission.why)}"


def one_line(text: str) -> str:
    """Return text for a comment or a table cell, with a question mark for every unprintable character."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _export(variable: Effective, view: View) -> Iterator[str]:
    of_profile = view.applied is not None and any(variable.name == entry.name for entry in view.applied.profile.variable)
    if _NAME.fullmatch(variable.name) and (of_profile or variable.name.startswith(facts().families)):
        yield f"# {one_line(place(variable))}"
        yield f"export {variable.name}={shlex.quote(variable.value or '')}"
    else:
        yield f"# left out: {one_line(variable.name)} ({one_line(place(variable))}), not a variable of these libraries"
