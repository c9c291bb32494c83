"""The health check inside of a real Slurm: it is called on every node, drains the one with a fault, and leaves the rest alone."""

import shlex
import time
from pathlib import Path

import pytest
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not

from hpc_mp.doctor.install import install

REASON = why_not()
PATIENCE_S = 120


def shown(lab: Lab, node: str) -> dict[str, str]:
    words = lab.run(["scontrol", "-o", "show", "node", node], check=True).stdout.split()
    return dict(word.partition("=")[::2] for word in words)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_node_with_a_fault_is_drained_and_what_was_there_before_still_runs(tmp_path: Path) -> None:
    """The fault: a /dev/shm of 16 MiB on one node, as containers have it. Each node has a /dev/shm of its own."""
    place = Path("/var/tmp") / f"hpc-mp-health-{tmp_path.name}-{time.time_ns():x}"
    place.mkdir(mode=0o777)
    try:
        place.chmod(0o777)
        before = place / "healthagent"
        before.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(place))}/ran-$SLURMD_NODENAME\n")
        before.chmod(0o755)
        done = install(place / "bin", str(before), drain=True)
        # of this check alone: the machine that runs the test may have faults of its own
        done.script.write_text(done.script.read_text().replace(" --drain", " --check shm-size --drain"))
        settings = {"HealthCheckProgram": str(done.script), "HealthCheckInterval": "2", "HealthCheckNodeState": "ANY"}
        with Lab(overrides=settings) as lab:
            lab.at("n3", ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/dev/shm"])

            def looked() -> bool:
                """What was there before runs after our own look, and the nodes are not looked at in the same moment."""
                return "DRAIN" in shown(lab, "n3")["State"] and len(list(place.glob("ran-*"))) == len(lab.nodes)

            end = time.monotonic() + PATIENCE_S
            while not looked() and time.monotonic() < end:
                time.sleep(1)
            found = shown(lab, "n3")
            assert "DRAIN" in found["State"] and found["Reason"].startswith("hpc-mp:shm-size:/dev/shm"), (found, lab.logs())
            assert [node for node in ("n1", "n2", "n4") if "DRAIN" in shown(lab, node)["State"]] == [], lab.logs()
            assert {path.name for path in place.glob("ran-*")} == {f"ran-n{number}" for number in range(1, 5)}
    finally:
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        place.rmdir()
