"""Slurm's HealthCheckProgram: the passive checks, run on a node every minute beside any job.

It is packed into one file with all its dependencies and run by the node's own Python. It reads nothing from shared storage,
imports only the standard library and never creates a CUDA context. It ends within its deadline even if a check hangs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_mp.base.findings import Finding, findings_document, weight
from hpc_mp.cluster.node.counters import keep_counters
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.source import here
from hpc_mp.cluster.slurm.records import drain
from hpc_mp.doctor.checks.check import run
from hpc_mp.doctor.checks.registry import FIT, PASSIVE

_MARK = "hpc-mp"
_REASON_LENGTH = 200  # characters that sinfo -R still shows in a wide terminal
_CHAIN_S = 50.0  # Slurm kills a HealthCheckProgram after 60
_KEEP_S = 0.4
_SLURM_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the chained program's exit code if it is not 0; else 1 if there is an error, 0 if not."""
    options = _options(arguments)
    begin = time.monotonic()
    chained = subprocess.Popen([options.chain], stdin=subprocess.DEVNULL) if options.chain else None
    source = here()
    codes = [*options.check, *(FIT if options.fit else ())]
    checks = [check for check in PASSIVE if not codes or check.code in codes]
    findings = run(checks, source, options.deadline)
    in_time({"counters": lambda: keep_counters(source)}, _KEEP_S)
    for line in lines(findings, options.json):
        print(line)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors and options.drain:
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        print(drain(node, reason(errors), here(timeout=_SLURM_S).ask), file=sys.stderr)
    sys.stdout.flush()
    return _wait(chained, begin) or int(bool(errors))


def lines(findings: Sequence[Finding], as_json: bool = False) -> list[str]:
    """Return the findings that are not ok, the gravest first: ``error hpc-mp:CODE:subject: evidence``."""
    if as_json:
        return [json.dumps(findings_document(findings))]
    bad = sorted((finding for finding in findings if finding.severity != "ok"), key=weight)
    return [f"{finding.severity} {_word(finding)}: {finding.message}" + (f" -> {finding.fix}" if finding.fix else "")
            for finding in bad]


def reason(errors: Sequence[Finding]) -> str:
    """Return the text for ``scontrol … Reason=``: ``hpc-mp:CODE:subject`` of every error, cut to fit on a line."""
    tags = [_word(finding) for finding in errors]
    while len("; ".join(tags)) > _REASON_LENGTH and len(tags) > 1:
        tags.pop()
    more = len(errors) - len(tags)
    return "; ".join(tags)[:_REASON_LENGTH] + (f" +{more}" if more else "")


def _word(finding: Finding) -> str:
    """Return ``hpc-mp:CODE:subject`` without characters that are special to Slurm's commands or to parsers of reasons."""
    subject = "".join(sign if sign not in "\"'`$;\\\n" else " " for sign in finding.subject)
    return f"{_MARK}:{finding.code}:{' '.join(subject.split())}".rstrip(":")


def _wait(chained: subprocess.Popen[bytes] | None, begin: float) -> int:
    """Return the exit code of the chained program, 0 if there is none. Kill it if it does not end in time."""
    if chained is None:
        return 0
    try:
        return chained.wait(max(_CHAIN_S - (time.monotonic() - begin), 0.0))
    except subprocess.TimeoutExpired:
        chained.kill()
        print(f"hpc-mp: {Path(str(chained.args)).name} did not end within {_CHAIN_S:g} s", file=sys.stderr)
        return 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpc-mp-health", description="Look at this node; exit 1 if something is wrong.")
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON document")
    parser.add_argument("--check", action="append", metavar="CODE", default=[], help="only this; may be given several times")
    parser.add_argument("--fit", action="store_true", help="only what a job cannot do without: hardware and the fast network")
    parser.add_argument("--deadline", type=float, default=3.5, metavar="S", help="seconds for all checks together (3.5)")
    parser.add_argument("--drain", action="store_true", help="have Slurm drain this node if there is an error")
    parser.add_argument("--chain", metavar="PROGRAM", help="also run this one, which was HealthCheckProgram before")
    return parser.parse_args(arguments)
