"""The lines that ``environment.profile`` adds to a job script."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.environment.profiles import APPLIED, Profile, Script, Variable, load_profile
from hpc_mp.job import JobSpec

_NAMES = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """``text``: for bash, as it is. ``exports``: for bash too, the names of what it may export; None where it exports nothing."""

    text: str
    why: str
    exports: str | None = None


def profile_lines(spec: JobSpec) -> tuple[ProfileLine, ...]:
    """What the profile says, without what ``environment.set`` says better; what is left out is a comment.

    Raises:
        HpcMpError: there is no such profile.
    """
    if spec.environment.profile is None:
        return ()
    profile = load_profile(spec.environment.profile)
    wanted = [each for each in profile.variable if each.use in (*APPLIED, "leave") and each.name not in spec.environment.set]
    return (*(_script(each, profile) for each in profile.script), *(_variable(each, profile) for each in wanted))


def left_out(spec: JobSpec) -> list[str]:
    """Names of what the script does not hold because only a node can tell whether, or with which value, it should."""
    profile = load_profile(spec.environment.profile) if spec.environment.profile is not None else None
    return [each.name for each in (profile.variable if profile else ())
            if each.use in APPLIED and _unknown(each) and each.name not in spec.environment.set]


def check_shown(lines: tuple[ProfileLine, ...], script: str, template: str) -> None:
    """Refuse a template that passes over the profile. Raises HpcMpError."""
    if not all(line.text in script for line in lines):
        raise HpcMpError("environment.profile", f"has no effect with the template {template}, which leaves its lines out",
                         "take over the lines with `profile` from slurm/job.sbatch.j2, or leave environment.profile out")


def _script(script: Script, profile: Profile) -> ProfileLine:
    given = "".join(f"{name}={shlex.quote(value)} " for name, value in script.given.items())
    files = " ".join(map(shlex.quote, script.files))
    text = f'for file in {files}; do [[ -r $file ]] && {{ {given}. "$file"; break; }}; done'
    if len(script.files) == 1:
        text = f'[[ ! -r {files} ]] || {given}. {files}'
    return ProfileLine(text, _why(script, profile), '"$(IFS=,; echo "${!NCCL_*}")"')  # it does not tell which


def _variable(each: Variable, profile: Profile) -> ProfileLine:
    if each.use == "leave":
        return ProfileLine(f"unset {each.name}", _why(each, profile))
    if why := _unknown(each):
        return ProfileLine(f"# left out: {each.name}{f'={each.value}' if each.value else ''}", f"{_why(each, profile)} {why}")
    value = _word(each)
    if each.joins is not None:
        joins = shlex.quote(each.joins)
        return ProfileLine(f'export {each.name}={value}"${{{each.name}:+{joins}${each.name}}}"', _why(each, profile), each.name)
    return ProfileLine(f"hpc_mp_said {each.name} || export {each.name}={value}", _why(each, profile), each.name)


def _unknown(each: Variable) -> str | None:
    """Why nobody can tell here what to do with a variable; None where it is clear."""
    if each.needs:
        guards = ", ".join(f"{library} {guard}" for library, guard in each.needs.items())
        return f"Only for {guards}, and which release the nodes have, is not known here: environment.set adds it."
    if each.finds is not None:
        return "Its value is found on a node: hpc-mp env shows it there, environment.set adds it."
    return None


def _word(each: Variable) -> str:
    """The value, for bash."""
    if not each.expands:
        return shlex.quote(each.value)
    parts = _NAMES.split(each.value)  # text and names in turn
    return "".join((f'"${part}"' if at % 2 else shlex.quote(part)) for at, part in enumerate(parts) if part)


def _why(part: Variable | Script, profile: Profile) -> str:
    return f"environment.profile = {profile.name}: {part.reason} ({part.source})."
