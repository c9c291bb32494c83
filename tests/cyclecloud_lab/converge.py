"""What jetpack does with cluster-init specs on a node: in the template's order, scripts by name, each once, as root.

The rest of jetpack (download, Chef, retries) is not here.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROGRAMS = Path(__file__).resolve().parent / "programs"
HOME = "/opt/cycle/jetpack"
INIT = "/mnt/cluster-init"
PROJECT = "hpc-mp"


class Runner(Protocol):
    """A machine: its files as seen from here, and a way to run a program on it."""

    @property
    def root(self) -> Path: ...

    def run(self, argv: Sequence[str], *, environ: Mapping[str, str], timeout: float) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Ran:
    """A script that was run: `spec/scripts/name`, its exit code and what it said."""

    script: str
    code: int
    said: str


class Failed(Exception):
    """A script ended with another code than 0: the node fails, and nothing after it is run."""

    def __init__(self, ran: Ran) -> None:
        super().__init__(f"{ran.script} ended with {ran.code}:\n{ran.said}")
        self.ran = ran


def prepare(machine: Runner, specs: Path, names: Sequence[str], settings: Mapping[str, str]) -> None:
    """Jetpack's stand-in, the node's settings and the specs of the template's order, downloaded."""
    home = machine.root / HOME[1:]
    for folder in ("bin", "config", "logs"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAMS / "jetpack", home / "bin" / "jetpack")
    (home / "config" / "node.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in names:
        target = machine.root / INIT[1:] / PROJECT / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(specs / name / "cluster-init", target)


def converge(machine: Runner, names: Sequence[str], environ: Mapping[str, str] | None = None, timeout: float = 600) -> list[Ran]:
    """Run what was not run yet. Raises Failed at the first script that fails."""
    ran = []
    for name in names:
        for script in sorted((machine.root / INIT[1:] / PROJECT / name / "scripts").iterdir()):
            marker = machine.root / INIT[1:] / ".run" / PROJECT / name / script.name
            if marker.exists():
                continue
            done = _run(machine, name, f"scripts/{script.name}", environ or {}, timeout)
            ran.append(done)
            if done.code:
                raise Failed(done)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return ran


def forget(machine: Runner) -> None:
    """Every script is run again by the next `converge`."""
    shutil.rmtree(machine.root / INIT[1:] / ".run", ignore_errors=True)


def tests(machine: Runner, names: Sequence[str]) -> list[Ran]:
    """The specs' tests, as a cluster in testing mode runs them."""
    return [_run(machine, name, f"tests/{test.name}", {}, 120)
            for name in names for test in sorted((machine.root / INIT[1:] / PROJECT / name / "tests").iterdir())]


def calls(machine: Runner) -> list[list[str]]:
    """Every call of jetpack on the machine so far, oldest first."""
    file = machine.root / HOME[1:] / "logs" / "calls.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _run(machine: Runner, name: str, script: str, environ: Mapping[str, str], timeout: float) -> Ran:
    known = {"CYCLECLOUD_PROJECT_PATH": f"{INIT}/{PROJECT}", "CYCLECLOUD_SPEC_PATH": f"{INIT}/{PROJECT}/{name}",
             "CYCLECLOUD_HOME": HOME, "JETPACK_HOME": HOME, "HOME": "/root",
             "PATH": f"{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    code, said = machine.run([f"{INIT}/{PROJECT}/{name}/{script}"], environ=known | dict(environ), timeout=timeout)
    log = machine.root / HOME[1:] / "logs" / "cluster-init" / PROJECT / name / f"{script}.out"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said, encoding="utf-8")
    return Ran(f"{name}/{script}", code, said)


def words(ran: list[Ran]) -> str:
    return "\n".join(each.said for each in ran)
