"""``make prove``: runs the proofs that have not passed on the current files, as time allows, and lists the rest.

    python tests/support/proofs.py [--minutes 90] [WORDS OF PYTEST …]

A proof that passes is recorded at once in the user's cache, with a digest of the files that it depends on (``dependencies``). A
killed run loses nothing, and every checkout with the same files shares the record. A proof that this machine cannot run is
recorded with the reason and tried again each time. This file is also a pytest plugin.
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
    """Return the file with a line for each proof that passed or could not run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HPC_MP_PROVED", cache / "hpc-mp" / "proved.jsonl"))


def noted() -> dict[str, str]:
    """Return by key the reason why a proof could not run; empty for one that passed."""
    file = memory()
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    notes = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may have been cut off
    unrun = {note["key"]: note["skipped"] for note in notes if "skipped" in note}
    return unrun | {note["key"]: "" for note in notes if "skipped" not in note}


def key_of(nodeid: str) -> str:
    state = state_of(ROOT / nodeid.partition("::")[0])
    return hashlib.sha256(f"{nodeid}\n{sys.version_info[:2]}\n{state}".encode()).hexdigest()


def remember(nodeid: str, **facts: object) -> None:
    file = memory()
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key_of(nodeid), "proof": nodeid, **facts, "at": int(time.time())})
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def due(proofs: Iterable[str]) -> list[str]:
    notes = noted()
    return [proof for proof in proofs if notes.get(key_of(proof)) != ""]


def collected(words: Sequence[str]) -> list[str]:
    """Return all proofs, or those that pytest's arguments select."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *WHICH, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [line for line in done.stdout.splitlines() if "::" in line]


# --- the plugin ------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect proofs that have passed."""
    if END not in os.environ:
        return
    wanted = set(due([item.nodeid for item in items]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Start no proof after the deadline: workers silently skip the rest of their queues."""
    return True if time.time() > float(os.environ.get(END, "inf")) else None


class Noting:
    """A plugin for the reporting process that records the proofs that pass or cannot run."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            remember(report.nodeid, seconds=round(report.duration, 1))
        elif report.skipped:
            remember(report.nodeid, skipped=str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))


def pytest_sessionstart(session: pytest.Session) -> None:
    if END in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.pluginmanager.register(Noting())


# --- the command -----------------------------------------------------------------------------------------------------


def show(proofs: Sequence[str]) -> None:
    notes = noted()
    reasons = {proof: notes.get(key_of(proof), "") for proof in proofs}
    wanting = Counter(proof.partition("::")[0] for proof in proofs if not reasons[proof])
    unrun = Counter((proof.partition("::")[0], reason) for proof, reason in reasons.items() if reason)
    if wanting:
        print(f"{wanting.total()} proofs have not passed on this tree:")
    for file, count in sorted(wanting.items()):
        print(f"    {count:5}  {file}")
    if unrun:
        print(f"{unrun.total()} proofs cannot run on this machine:")
    for (file, reason), count in sorted(unrun.items()):
        print(f"    {count:5}  {file}: {reason.removeprefix('Skipped: ')}")
    if not wanting:
        print("all proved on this tree" + (", but for what cannot run here" if unrun else ""))


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
