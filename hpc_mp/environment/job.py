"""Changes of a profile to the environment of a job's ranks, with reasons, made on the first node before the ranks start.

``apply`` decides, as for ``hpc-mp env``; this module turns the result into variables. The nodes of a job are assumed to be
alike: facts about the first node count for all. For ranks in a container, the view is still that of the host. Devices, default
route and driver are shared with the container, but NCCL's files and the libraries of the host are not. The files therefore hide
nothing, and variables that depend on the release of such a library are left out.
"""

import os
import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_mp.base.command import CommandFailed, ask
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.apply import Applied, apply
from hpc_mp.environment.conf import SYSTEM, ConfFile, nccl_files
from hpc_mp.environment.detect import read_machine
from hpc_mp.environment.findings import place
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.profiles import APPLIED, MakerScript, Profile, load_profile
from hpc_mp.environment.versions import Installed, distribution, versions
from hpc_mp.environment.view import effective

SCRIPT_S = 60.0  # timeout in seconds of a vendor's script
OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})  # variables that bash sets for itself
ASK = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Change:
    """One variable of a profile, and the action taken."""

    # ``kept``: a source with precedence over the profile sets it; ``left out``: its condition is false or unknown here
    action: Literal["set", "unset", "kept", "left out"]
    name: str
    value: str | None  # the value that ranks get; None if they get none, or if NCCL reads it from its own file
    why: str


@dataclass(frozen=True, slots=True)
class ProfiledJob:
    """A job with a profile. ``environ``: the environment of the ranks; ``notes``: remarks that belong to no variable."""

    profile: Profile
    environ: dict[str, str]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def exported(self) -> list[str]:
        """Return the names that the profile sets."""
        return [change.name for change in self.changes if change.action == "set"]

    def summary(self) -> str:
        """Return one sentence for the run's log."""
        actions = [change.action for change in self.changes]
        counts = [f"{actions.count(action)} {action}" for action in ("set", "unset", "kept", "left out") if action in actions]
        return f"profile {self.profile.name}: variables {', '.join(counts) or 'none'}"

    def lines(self) -> Iterator[str]:
        """Yield one human-readable line per variable, with its reason."""
        for change in self.changes:
            text = change.name if change.value is None else f"{change.name}={shlex.quote(change.value)}"
            yield f"{change.action:<9} {text}  # {change.why}"
        yield from (f"note      {note}" for note in self.notes)


def profile_job(name: str, source: NodeSource, environ: Mapping[str, str], decided: Collection[str] = (), *,
                container: bool = False, installed: Installed = distribution) -> ProfiledJob:
    """Return the environment of the ranks, and the changes that the profile made. Raises HpcMpError if the profile does not
    exist.

    Args:
        environ: the environment of the job script. Settings of modules and the site take precedence over the profile.
        decided: names that the user has set (``environment.set``), which the profile does not change.
        container: True if the ranks run in a container.
        installed: the releases of Python packages that the ranks see.
    """
    profile, result = load_profile(name), dict(environ)
    changes = list(_from_scripts(profile.script, result, decided))
    result |= {change.name: change.value or "" for change in changes if change.action == "set"}
    releases = versions(source, installed)
    if container:
        releases = {library: release for library, release in releases.items() if library == "driver"}
    applied = apply(profile, read_machine(source), releases, result)
    files = (ConfFile(SYSTEM, ()),) if container else nccl_files(source, result)
    for change in _from_variables(applied, effective(result, files, applied), result, decided):
        changes.append(change)
        if change.action == "set":
            result[change.name] = change.value or ""
        elif change.action == "unset":
            del result[change.name]
    notes = (*profile.notes, *(f"the profile needs {text}" for text in applied.unmet))
    return ProfiledJob(profile, result, tuple(changes), notes)


def of_interpreter(python: str) -> Installed:
    """Return a function that queries package releases in the environment of another interpreter; None if unknown."""

    def installed(name: str) -> str | None:
        try:
            return ask([python, "-I", "-c", ASK, name], SCRIPT_S).strip()
        except CommandFailed:
            return None

    return installed


def _from_variables(applied: Applied, variables: Sequence[Effective], environ: Mapping[str, str],
                    decided: Collection[str]) -> Iterator[Change]:
    by_name = {variable.name: variable for variable in variables}
    omitted = {id(omission.variable) for omission in applied.left_out}
    reasons = {variable.name: f"{variable.reason} ({variable.source})" for variable in applied.profile.variable
               if variable.use in APPLIED and id(variable) not in omitted}
    for setting in applied.settings:
        current = by_name[setting.name]
        if setting.name in decided:
            yield Change("kept", setting.name, environ.get(setting.name), "environment.set takes precedence")
        elif current.origin == "profile":
            yield Change("set", setting.name, current.value, reasons[setting.name])
        else:
            value = environ.get(setting.name)
            yield Change("kept", setting.name, value, f"{place(current)} takes precedence over the profile's {setting.value}")
    for variable in applied.unset:
        if variable.name in environ and variable.name not in decided:
            yield Change("unset", variable.name, None, f"{variable.reason} ({variable.source})")
    for omission in applied.left_out:
        yield Change("left out", omission.variable.name, omission.variable.value or None, omission.why)


def _from_scripts(scripts: Sequence[MakerScript], environ: Mapping[str, str], decided: Collection[str]) -> Iterator[Change]:
    """Yield exports of the vendor's scripts: variables that are not set yet, and lists that they extend."""
    for script in scripts:
        file = next((name for name in script.files if os.access(name, os.R_OK)), None)
        if file is None:
            yield Change("left out", script.files[0], None, f"this script does not exist here; {script.reason}")
            continue
        try:
            process = subprocess.run(["bash", "-c", '. "$0" >&2; env -0', file], env={**environ, **script.given},
                                     stdin=subprocess.DEVNULL, capture_output=True, timeout=SCRIPT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Change("left out", file, None, f"the script could not be read: {error}")
            continue
        after = dict(os.fsdecode(word).split("=", 1) for word in process.stdout.split(b"\0")[:-1])
        for name in sorted(after.keys() - OWN - script.given.keys() - set(decided)):
            before = environ.get(name)
            if before is None or after[name].endswith(f":{before}") or after[name].startswith(f"{before}:"):
                yield Change("set", name, after[name], f"exported by {file}: {script.reason} ({script.source})")
