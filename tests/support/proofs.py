"""``make prove``: runs the proofs that have not passed on the files as they are, as many as the time allows, and lists the rest.

    python tests/support/proofs.py [--minutes 90] [WORDS OF PYTEST …]

A proof that passes is written down at once, with a digest of the files that it depends on (``dependencies``), in the user's
cache: what is killed loses nothing, and every checkout with the same files knows it. This file is a plugin of pytest too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from dependencies import state_of

ROOT = Path(__file__).resolve().parents[2]
WHICH = ["-m", "(prove or hypothesis) and not gpu", "--hypothesis-profile=nightly"]
WORKERS = ["-n", "2", "--dist", "loadfile"]
END = "HPC_MP_PROVE_UNTIL"  # unix seconds, for the plugin


def memory() -> Path:
    """The file with a line for each proof that passed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HPC_MP_PROVED", cache / "hpc-mp" / "proved.jsonl"))


def passed() -> set[str]:
    file = memory()
    if not file.exists():
        return set()
    lines = file.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["key"] for line in lines if line.endswith("}")}  # the last one may have been cut off


def key_of(nodeid: str) -> str:
    state = state_of(ROOT / nodeid.partition("::")[0])
    return hashlib.sha256(f"{nodeid}\n{sys.version_info[:2]}\n{state}".encode()).hexdigest()


def remember(nodeid: str, seconds: float) -> None:
    file = memory()
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key_of(nodeid), "proof": nodeid, "seconds": round(seconds, 1), "at": int(time.time())})
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def due(proofs: Iterable[str]) -> list[str]:
    known = passed()
    return [proof for proof in proofs if key_of(proof) not in known]


def collected(words: Sequence[str]) -> list[str]:
    """All proofs there are, or those that pytest's words choose."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *WHICH, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [line for line in done.stdout.splitlines() if "::" in line]


# --- the plugin ------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What has passed is not run again."""
    if END not in os.environ:
        return
    wanted = set(due([item.nodeid for item in items]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


class Noting:
    """In the process that reports: notes what passes, and ends the run between two proofs when the time is over."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            remember(report.nodeid, report.duration)
        if time.time() > float(os.environ[END]):
            workers = self.session.config.pluginmanager.get_plugin("dsession")  # pytest-xdist's loop looks at its own word
            (workers or self.session).shouldstop = "the time is over"


def pytest_sessionstart(session: pytest.Session) -> None:
    if END in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.pluginmanager.register(Noting(session))


# --- the command -----------------------------------------------------------------------------------------------------


def show(proofs: Sequence[str]) -> None:
    if not proofs:
        print("all proved on this tree")
        return
    print(f"{len(proofs)} proofs have not passed on this tree:")
    for file, count in sorted(Counter(proof.partition("::")[0] for proof in proofs).items()):
        print(f"    {count:5}  {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="begin no proof after so long; 0: run none")
    arguments, words = parser.parse_known_args()
    proofs = collected(words)
    left = due(proofs)
    print(f"{len(proofs) - len(left)} of {len(proofs)} proofs have passed on this tree", flush=True)
    code = 0
    if left and arguments.minutes > 0:
        environment = os.environ | {END: str(time.time() + 60 * arguments.minutes)}
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "proofs", "--timeout=3600", *WHICH, *WORKERS, *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        left = due(proofs)
    show(left)
    return code if code in (1, 3, 4) else 0


if __name__ == "__main__":
    sys.exit(main())
