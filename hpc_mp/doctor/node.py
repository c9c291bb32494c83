"""Diagnosis of this machine with all passive checks."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.node.counters import keep_counters
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.source import NodeSource, Unavailable, here, maybe, recorded
from hpc_mp.doctor.checks.check import Check, run
from hpc_mp.doctor.checks.registry import PASSIVE
from hpc_mp.doctor.drift import traits
from hpc_mp.doctor.nccl_log.judge import PROGRAMS

DEADLINE_S = 7.0
_KEEP_S, _TRAITS_S = 0.5, 1.0


def diagnose(source: NodeSource, codes: Sequence[str] = (), deadline: float = DEADLINE_S) -> tuple[Finding, ...]:
    """Return the findings of the named checks, or of all checks. Raises HpcMpError if no check has one of the codes."""
    findings = run([_check(code) for code in codes] or PASSIVE, source, deadline)
    in_time({"counters": lambda: keep_counters(source)}, _KEEP_S)
    return tuple(findings)


def place_document(source: NodeSource) -> dict[str, Any]:
    """Return the other fields of ``--json``: host, time (seconds since 1970), traits of this node. There are no traits if reading
    them hangs or fails."""
    node_traits = in_time({"": lambda: traits(source)}, _TRAITS_S)[""]
    return {
        "host": maybe(source.text, "/proc/sys/kernel/hostname") or "",
        "time": time.time(),
        "traits": {} if isinstance(node_traits, Unavailable) else node_traits,
    }


def injected(root: Path | None, commands: Path | None) -> NodeSource:
    """Return this machine as a source, or a recorded one. Raises HpcMpError if ``commands`` is not JSON."""
    if root is None and commands is None:
        return here(own=PROGRAMS)
    return recorded(root or Path("/"), _json(commands) if commands else {})


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", "name a JSON file") from None
    except ValueError as error:
        raise HpcMpError(str(file), f"is no JSON ({error})", "name a JSON file") from None
    if not isinstance(document, dict):
        raise HpcMpError(str(file), "holds no JSON object", "name a file that begins with {")
    return document


def _check(code: str) -> Check[Any]:
    for check in PASSIVE:
        if check.code == code:
            return check
    raise HpcMpError(f"check {code}", "does not exist",
                     did_you_mean(code, [check.code for check in PASSIVE], "`hpc-mp doctor --list` has all"))
