"""Broken GPUs: a recorded machine, what was done to it, and what must be said of it."""

from __future__ import annotations

import functools

from case import Case
from in_process import in_process
from machines.tree import broken, tree

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.doctor.checks.check import run
from hpc_mp.doctor.checks.registry import GPU as CHECKS

GPU_KINDS = ("ndv4", "ndv5", "ndh200v5", "p4d", "p5", "gb200")
CODES = tuple(check.code for check in CHECKS)


def holds(case: Case) -> None:
    """The check says it, of the right part; and no other check says anything new. Of what is well it says nothing else."""
    found = findings(broken(case.kind, case.edits))
    mine = of(found, case.code)
    right = [finding for finding in mine
             if case.evidence in f"{finding.subject}: {finding.message}" and case.subject in finding.subject]
    assert right and (case.outcome != "ok" or right == mine), f"{case.code} says {mine}"
    assert {finding.severity for finding in right} == {case.outcome}
    assert all(finding.fix for finding in right if finding.severity in ("warning", "error"))
    assert set(ills(found)) - set(healthy_ills(case.kind)) == {*case.also, *([case.code] if case.outcome != "ok" else [])}


@functools.cache
def healthy_ills(kind: str) -> dict[str, list[Finding]]:
    return ills(findings(tree(kind)))


def findings(source: NodeSource) -> list[Finding]:
    """What all checks say but the one that waits for counters to grow; it is tested by itself."""
    return run([check for check in CHECKS if check.code != "gpu-nvlink-errors"], source, answers=in_process)


def ills(found: list[Finding]) -> dict[str, list[Finding]]:
    """All that is not well, by code."""
    ill: dict[str, list[Finding]] = {}
    for finding in found:
        if finding.severity != "ok":
            ill.setdefault(finding.code, []).append(finding)
    return ill


def of(found: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]
