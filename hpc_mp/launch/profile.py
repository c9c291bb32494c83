"""Which environment profile a job gets, and what is said of it before the start."""

from __future__ import annotations

from hpc_mp.base.errors import HpcMpError
from hpc_mp.environment.profiles import load_profile
from hpc_mp.environment.view import AUTO, NONE
from hpc_mp.job import JobSpec
from hpc_mp.launch.render.profile import left_out


def settle_profile(spec: JobSpec, noted: str | None) -> tuple[JobSpec, str | None]:
    """The job with ``environment.profile`` decided, and one sentence about it; None where the job does not speak of one.

    Args:
        noted: the platform that the doctor has seen on the nodes of the cluster; None where it has seen none.

    Raises:
        HpcMpError: there is no such profile.
    """
    wanted = spec.environment.profile
    if wanted is None:
        return spec, None
    name = {AUTO: noted, NONE: None}.get(wanted, wanted)
    settled = spec.model_copy(update={"environment": spec.environment.model_copy(update={"profile": name})})
    if name is None:
        return settled, "none" if wanted == NONE else "none (auto: the doctor has noted no platform of this cluster's nodes)"
    return settled, _said(settled, name, ", as the doctor saw it on the nodes" if wanted == AUTO else "")


def _said(spec: JobSpec, name: str, how: str) -> str:
    try:
        profile = load_profile(name)
    except HpcMpError as error:
        raise HpcMpError(f"environment.profile = {name!r}", error.rule, error.remedy) from None
    unknown = left_out(spec)
    notes = profile.notes if spec.slurm.container is not None else []
    return " ".join([f"{name} ({profile.title}{how}).",
                     *([f"Left out, as only a node can tell: {', '.join(unknown)}; see --explain."] if unknown else []), *notes])
