"""The network that NCCL uses on this machine, from a new log of a probe or from kept logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.gpu_driver import has_gpus
from hpc_mp.cluster.node.source import NodeSource, OwnProgram, Unavailable
from hpc_mp.doctor.nccl_log.judge import judge, machine_of
from hpc_mp.doctor.nccl_log.parse import parse

PATIENCE_S = 60.0  # torch, CUDA and NCCL take 10 to 30 s to start from a cold file system
PROBE = "nccl-probe"
PROGRAMS = {PROBE: OwnProgram((sys.executable, "-P", "-m", "hpc_mp.doctor.nccl_log.probe"), PATIENCE_S)}


def taken(source: NodeSource, patience: float = PATIENCE_S) -> tuple[Finding, ...]:
    """Return findings on a new log of NCCL, which the machine's program ``nccl-probe`` writes.

    None without GPUs or a fast network, or if no log comes within ``patience`` seconds.
    """
    findings = in_time({PROBE: lambda: _taken(source)}, patience)[PROBE]
    return () if isinstance(findings, Unavailable) else findings


def logged(logs: Iterable[Path], source: NodeSource) -> tuple[Finding, ...]:
    """Return findings on the logs of one job's ranks on this kind of machine. A directory means all files below it.

    Raises HpcMpError if a log cannot be read.
    """
    return tuple(judge(parse(chain.from_iterable(map(_lines, logs))), machine_of(source)))


def _taken(source: NodeSource) -> tuple[Finding, ...]:
    machine = machine_of(source)
    if not (machine.fabric and has_gpus(source)):
        return ()
    return tuple(judge(parse(source.answer([PROBE]).splitlines()), machine))


def _lines(log: Path) -> Iterator[str]:
    try:
        for file in sorted(path for path in log.rglob("*") if path.is_file()) if log.is_dir() else [log]:
            with file.open(encoding="utf-8", errors="replace") as lines:
                yield from lines
    except OSError as error:
        raise HpcMpError(f"--nccl-log {log}", f"cannot be read ({error.strerror})",
                         "name a file that was written with NCCL_DEBUG=INFO, or a directory of such") from None
