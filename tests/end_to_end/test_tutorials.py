"""The tutorials, typed as they stand: every command ends well, and prints what the page says, but for figures and times."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from rendering import executable
from slurm_lab.lab import Lab
from tables import table

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
WATCHING = ("hpc-mp status", "hpc-mp logs", "hpc-mp cluster nodes")  # what they print changes until it is what the page shows
PATIENCE_S = 150.0
ALIKE = 0.7  # of the letters of a line: rows such as "used" name what there is, and here there may be less of it
Shell = Callable[[str], subprocess.CompletedProcess[str]]

VARIABLE: tuple[tuple[str, str], ...] = table(__file__, "tutorials.toml", "variable")


@dataclass(frozen=True)
class Step:
    """A command of a page, and what it prints there; a file that the page shows is one that is written."""

    command: str
    printed: tuple[str, ...]


def steps_of(page: str) -> list[Step]:
    """The blocks that begin with ``$``, and TOML files, which are ``job.toml``."""
    found: list[Step] = []
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.MULTILINE):
        lines = [line.removeprefix("    ") for line in block.strip("\n").splitlines()]
        if lines[0] == "[job]":
            found.append(Step("cat job.toml", tuple(lines)))
        while lines and lines[0].startswith("$ "):
            command = [lines.pop(0).removeprefix("$ ").partition("  #")[0].rstrip()]
            if heredoc := re.search(r"<<'(\w+)'", command[0]):
                end = lines.index(heredoc[1]) + 1
                command, lines = [*command, *lines[:end]], lines[end:]
            more = next((at for at, line in enumerate(lines) if line.startswith("$ ")), len(lines))
            found.append(Step("\n".join(command), tuple(lines[:more])))
            lines = lines[more:]
    return found


def plain(lines: Sequence[str]) -> list[str]:
    """Lines without what differs from one time to the next; what was wrapped is one line."""
    joined: list[str] = []
    for line in lines:
        if line.startswith(" " * 10) and joined:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    for pattern, word in VARIABLE:
        joined = [re.sub(pattern, word, line) for line in joined]
    return [line.strip() for line in joined]


def missing(documented: Sequence[str], printed: str) -> list[str]:
    """The documented lines that nothing printed is like. Of a line, what "…" leaves out is not looked at."""
    there = plain(printed.splitlines())
    return [line for line in plain(documented) if line not in ("", "…") and not any(_alike(line, other) for other in there)]


def _alike(documented: str, printed: str) -> bool:
    first = documented.partition("…")[0]
    if first != documented:
        printed = printed[:len(first)]
    same_label = first.split()[:1] == printed.split()[:1] or first.split()[0].startswith(("runs/", "TIME", "#", "“"))
    more = printed.startswith(first)  # of a slower machine: a wait in the queue, the age of the last step
    return same_label and (more or SequenceMatcher(None, first, printed, autojunk=False).ratio() >= ALIKE)


def follow(steps: Sequence[Step], shell: Shell, directory: Path) -> None:
    """Type every command, and hold what it prints against the page."""
    for step in steps:
        if (shown := re.fullmatch(r"cat (\S+)", step.command)) and step.printed:
            (directory / shown[1]).write_text("\n".join(step.printed) + "\n")
            continue
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = shell(step.command)
            printed = done.stdout + done.stderr
            absent = missing(step.printed, printed) if "hpc-mp" in step.command else []
            if done.returncode == 0 and not absent:
                break
            assert step.command.startswith(WATCHING) and "--take-back" not in step.command and time.monotonic() < deadline, (
                f"$ {step.command}\nended with {done.returncode}, and has not printed {absent}, but\n{printed}")
            time.sleep(1)


def test_what_is_not_printed_is_seen() -> None:
    """Negative control: a row of another name, another word, and one that is not there."""
    printed = "state     completed\nstep      112/112, loss 5.4394, 1,277 tokens/s\nused      0.12 node hours\n"
    assert missing(["state     completed", "step      7/300, loss 6.1, 20 tokens/s", "…"], printed) == []
    assert missing(["phase     completed", "state     failed", "best      none"], printed) == [
        "phase completed", "state failed", "best none"]


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_are_read_whole(page: Path) -> None:
    commands = [step.command for step in steps_of(page.read_text())]
    assert len([command for command in commands if "hpc-mp" in command]) == sum(
        line.startswith("    $ ") and "hpc-mp" in line for line in page.read_text().splitlines())


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Nodes whose ranks have no more threads than there are cores, as those of ``hpc-mp lab up``."""
    here = Lab()
    here.cores = sorted(os.sched_getaffinity(0))
    with here:
        yield here


@pytest.fixture
def home(lab: Lab) -> Iterator[Path]:
    """A directory that all nodes see, with ``hpc-mp`` as it is found on PATH, and nobody else's findings."""
    directory = lab.share / f"tutorial-{os.urandom(2).hex()}"
    directory.mkdir()
    executable(directory / "bin" / "hpc-mp", f'#!/bin/sh\nexec "{sys.executable}" -m hpc_mp "$@"\n')
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PATH": path}


def wait_for_a_step_that_is_not_saved(run: Path) -> None:
    """Wait, up to ten minutes, until the death of a node costs a step: the page shows what was trained again."""
    deadline = time.monotonic() + 600
    while _steps(run) <= max(int(name.name.rpartition("-")[2]) for name in (run / "checkpoints").glob("step-*[0-9]")):
        assert time.monotonic() < deadline, f"{run}: no step after its last checkpoint"
        time.sleep(0.1)


def _steps(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())


@pytest.mark.prove
@pytest.mark.timeout(3000)
def test_the_first_job_and_the_failing_node_on_slurm(lab: Lab, home: Path) -> None:
    place = home / "first"
    place.mkdir()

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        if command.startswith("sudo hpc-mp lab kill "):
            wait_for_a_step_that_is_not_saved(max((place / "runs" / "first").iterdir()))
            lab.kill(command.split()[-1])
            return subprocess.CompletedProcess(command, 0, "", "")
        return lab.run(["bash", "-c", command], cwd=place, timeout=1200, environ=environment(home))

    for name in ("first-job", "failing-node"):
        follow(steps_of((TUTORIALS / f"{name}.md").read_text()), shell, place)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["fine-tuning", "sweep"])
def test_tutorials_of_this_machine(lab: Lab, home: Path, name: str) -> None:
    place = home / "first"
    place.mkdir()
    variables = {**os.environ, **environment(home)}
    variables.pop("SLURM_CONF", None)

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", command], cwd=place, env=variables, text=True, capture_output=True, timeout=600)

    begun = [Step("hpc-mp init", ())] if name == "fine-tuning" else []  # its checkpoint is that of the first job
    follow([*begun, *steps_of((TUTORIALS / f"{name}.md").read_text())], shell, place)
