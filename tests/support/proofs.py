"""``make prove``: runs the proofs that have not passed on the current files, as time allows, and lists the rest.

    python tests/support/proofs.py [--minutes 90] [WORDS OF PYTEST …]

A proof that passes is noted at once in the user's cache, with a digest of the files that it depends on (``dependencies``). A
killed run loses nothing, and every checkout with the same files shares the notes. A proof that this machine cannot run is noted
with the reason and tried again each time. The end of a run over all proofs writes ``tests/proved.jsonl``, which is committed: the
keys of all proofs that stand, a line for each file. So a new machine begins with what others have proved. This file is also a
pytest plugin.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dependencies import helpers_of, state_of
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).resolve().parents[2]
WHICH = ["-m", "(prove or hypothesis) and not gpu", "--hypothesis-profile=nightly"]
WORKERS = ["-n", "5", "--dist", "loadfile", "--no-loadscope-reorder"]
WAITING = ("gw0", "gw1", "gw2")  # the workers that begin with proofs on a Slurm of the lab
LAB = ROOT / "tests/slurm_lab/lab.py"
NICE, YIELDS = os.nice(0), 10  # niceness of this process, and what proofs that compute add to it: they take what the others leave
END = "HPC_MP_PROVE_UNTIL"  # unix seconds, for the plugin
SHORT = 10  # characters of a key in the record


def memory() -> Path:
    """Return the file with a line for each proof that passed or could not run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HPC_MP_PROVED", cache / "hpc-mp" / "proved.jsonl"))


def record() -> Path:
    """Return the committed file with the keys of the proofs that have passed, or could not run, where it was written."""
    return Path(os.environ.get("HPC_MP_PROVED_RECORD", ROOT / "tests/proved.jsonl"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last one may have been cut off


def reasons(proofs: Iterable[str]) -> dict[str, str]:
    """Return, for each proof that has passed on the files as they are, an empty text; for one that could not run the reason."""
    notes = lines_of(memory())
    unrun = {note["key"]: note["skipped"] for note in notes if "skipped" in note}
    by_key = unrun | {note["key"]: "" for note in notes if "skipped" not in note}
    recorded: dict[str, str] = {}
    for row in lines_of(record()):
        recorded |= row["unrun"] | dict.fromkeys(row["passed"].split(), "")
    keys = {proof: key_of(proof) for proof in proofs}
    known = {proof: by_key.get(key, recorded.get(key[:SHORT])) for proof, key in keys.items()}
    return {proof: reason for proof, reason in known.items() if reason is not None}


def key_of(nodeid: str) -> str:
    state = state_of(ROOT / file_of(nodeid))
    return hashlib.sha256(f"{nodeid}\n{sys.version_info[:2]}\n{state}".encode()).hexdigest()


def remember(nodeid: str, **facts: object) -> None:
    file = memory()
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key_of(nodeid), "proof": nodeid, **facts, "at": int(time.time())})
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def due(proofs: Sequence[str]) -> list[str]:
    known = reasons(proofs)
    return [proof for proof in proofs if known.get(proof) != ""]


def write_record(proofs: Sequence[str]) -> None:
    """Write the record anew from the given proofs, which are all that there are."""
    known = reasons(proofs)
    rows: dict[str, dict[str, Any]] = {}
    for proof in sorted(known):
        file, key = file_of(proof), key_of(proof)[:SHORT]
        row = rows.setdefault(file, {"file": file, "passed": [], "unrun": {}})
        if known[proof]:
            row["unrun"][key] = known[proof]
        else:
            row["passed"].append(key)
    lines = (json.dumps(row | {"passed": " ".join(row["passed"])}) for row in rows.values())
    record().write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


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
    """Deselect proofs that have passed; the files that took longest go first."""
    if END not in os.environ:
        return
    wanted = set(due([item.nodeid for item in items]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    took = seconds()
    items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: -took[file_of(item.nodeid)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Start no proof after the deadline: workers silently skip the rest of their queues."""
    if time.time() > float(os.environ.get(END, "inf")):
        return True
    if END in os.environ and os.geteuid() == 0:  # others may not take it back, and have no lab
        os.setpriority(os.PRIO_PROCESS, 0, NICE + YIELDS * (not waits(file_of(item.nodeid))))
    return None


def seconds() -> Counter[str]:
    """Return how long the proofs of each file took when they last passed."""
    last = {note["proof"]: note["seconds"] for note in lines_of(memory()) if "seconds" in note}
    took = Counter[str]()
    for proof, spent in last.items():
        took[file_of(proof)] += spent
    return took


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@cache
def waits(file: str) -> bool:
    """Return True for a file of tests with a Slurm of the lab, which wait more than they compute."""
    return LAB in helpers_of(ROOT / file)


class ByPlace(LoadFileScheduling):
    """Gives files that wait to some workers, which have a lab each, and the others to the rest, until one kind is done."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the first unit of the worker's kind."""
        kind = node.gateway.id in WAITING
        own = (file for file in self.workqueue if waits(file) == kind)
        self.workqueue.move_to_end(next(own, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPlace | None:
    return ByPlace(config, log) if END in os.environ else None


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
    known = reasons(proofs)
    wanting = Counter(file_of(proof) for proof in proofs if proof not in known)
    unrun = Counter((file_of(proof), reason) for proof, reason in known.items() if reason)
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
        if not words:
            write_record(proofs)
    show(left)
    return code if code in (1, 3, 4) else 0


if __name__ == "__main__":
    sys.exit(main())
