"""Recordings of a job that ran both ways, in a form in which they can be equal, and their differences.

Not compared are the variables of ``DIFFER`` and those of hpc-mp itself, the numbers of jobs and steps, and the shims on PATH.
"""

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIFFER = frozenset({
    "BASH_ENV", "SLURM_TASK_PID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_STEP_RESV_PORTS", "_"})
OF_HPC_MP = "HPC_MP_"
# Of the ranks that hpc-mp starts itself, by an srun with options of its own: they have a directory for temporary files.
OF_OUR_SRUN = ("SLURM_", "SRUN_", "TMPDIR", "SHLVL")
SIZES = frozenset({
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_SUBMIT_DIR",
    "SLURM_JOB_NAME", "SLURM_JOB_GPUS", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"})
WITNESS = ("-PE", "-m", "hpc_mp.program.witness")
WITNESS_WORDS = 6  # after the module: its own arguments
OURS = ("job.toml", "runs", "slurm-")  # in the submit directory: the job file, the run, and sbatch's own log
OF_PRELOAD = "ERROR: ld.so: object "  # each process says it of a library that is not on this machine
LARGEST = 1 << 16


@dataclass(frozen=True)
class Way:
    """One way's recordings: programs, files that the script left in its directory, paths that it left elsewhere, exit code."""

    programs: tuple[dict[str, Any], ...]
    files: Mapping[str, str]
    elsewhere: frozenset[str]
    code: int | None
    refused: str = ""
    excess: bool = False


def refusal(text: str) -> Way:
    """Return the way of a job that was never queued, by the error message."""
    return Way((), {}, frozenset(), None, refused=text[-300:])


class Plain:
    """Texts without what differs from job to job: the job's number, and the place where Slurm or hpc-mp keeps the script."""

    # SCRIPT is the path of the script, PLACE its directory, ABOVE the directory above: what ``dirname "$0"`` tells.

    def __init__(self, jobs: Iterable[str], scripts: Iterable[str], shims: str) -> None:
        self.jobs = [job for job in jobs if len(job) > 4]
        self.scripts = [place for place in scripts if place]
        self.shims = shims

    def text(self, text: str) -> str:
        text = re.sub(r"\S*/spool/n\d+/job\d+/slurm_script", "SCRIPT", text)
        text = re.sub(r"\S*/spool/n\d+/job\d+", "PLACE", text)
        text = re.sub(r"/[^\s:'\"]*/spool/n\d+\b", "ABOVE", text)
        for place in self.scripts:
            directory = place.rpartition("/")[0]
            text = text.replace(place, "SCRIPT").replace(directory, "PLACE").replace(directory.rpartition("/")[0], "ABOVE")
        for job in self.jobs:
            text = text.replace(job, "JOB")
        return re.sub(r"\bJOB\.\d+", "JOB.N", text)

    def path(self, text: str) -> str:
        return ":".join(entry for entry in text.split(":") if not self.shims or entry != self.shims)

    def recording(self, recording: dict[str, Any]) -> dict[str, Any]:
        variables = {name: self.text(self.path(value) if name.endswith("PATH") else value)
                     for name, value in recording["variables"].items() if name not in DIFFER and not name.startswith(OF_HPC_MP)}
        words = [self.text(word) for word in without_witness(recording["words"])]
        text = self.text(recording["input"].decode(errors="backslashreplace"))
        return {**recording, "words": words, "variables": variables, "input": text,
                "directory": self.text(recording["directory"]), "step": "task" if recording["step"] else ""}


def without_witness(words: Sequence[str]) -> list[str]:
    """Return a launcher's arguments without hpc-mp's witnesses before its programs."""
    plain = list(words)
    while WITNESS[2] in plain:
        at = plain.index(WITNESS[2])
        del plain[at - len(WITNESS):at + 1 + WITNESS_WORDS]
    return plain


def recordings(directory: Path) -> list[dict[str, Any]]:
    """Read the recordings of a sandbox, in order of time."""
    return [literal_eval(text) for path in sorted(directory.iterdir()) if (text := path.read_text())]


def tree(top: Path, plain: Plain) -> dict[str, str]:
    """Return the files below a directory with their texts, whose lines are sorted: tasks write in any order."""
    files = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if name.startswith(OURS):
            continue
        if path.is_symlink():
            files[plain.text(name)] = "link"
        elif path.is_file():
            text = plain.text(path.read_bytes()[:LARGEST].decode(errors="backslashreplace"))
            files[plain.text(name)] = "\n".join(sorted(text.split("\n")))
        else:
            files[plain.text(name)] = "directory"
    return files


def differences(plain: Way, adopted: Way, *, started_by_us: bool = False) -> list[str]:
    """Return what differs, one line each: programs that are missing or extra, their parts, files, exit code.

    Args:
        started_by_us: the job file has the program itself, whose ranks get hpc-mp's variables beside Slurm's.
    """
    lines = list(_programs(plain.programs, adopted.programs, started_by_us))
    for name in sorted({*plain.files, *adopted.files}):
        if plain.files.get(name) != adopted.files.get(name):
            left, right = (Counter(line for line in way.files.get(name, "no such file").split("\n")
                                   if not line.startswith(OF_PRELOAD)) for way in (plain, adopted))
            if left != right:
                lines.append(f"file {name}: {list((left - right).elements())!r:.200} / {list((right - left).elements())!r:.200}")
    lines += [f"elsewhere: {path}" for path in sorted(adopted.elsewhere - plain.elsewhere)]
    lines += [f"not elsewhere: {path}" for path in sorted(plain.elsewhere - adopted.elsewhere)]
    if plain.code != adopted.code:
        lines.append(f"exit code: {plain.code} / {adopted.code}")
    if plain.refused or adopted.refused:
        lines = [] if plain.refused and adopted.refused else [f"refused: {plain.refused or '-'} / {adopted.refused or '-'}"]
    return lines


def _key(program: Mapping[str, Any]) -> tuple[str, ...]:
    return (program["name"], *program["words"], program["step"], program["rank"], program["host"])


def _programs(plain: Sequence[dict[str, Any]], adopted: Sequence[dict[str, Any]], started_by_us: bool) -> Iterator[str]:
    sides: list[dict[tuple[str, ...], list[dict[str, Any]]]] = [{}, {}]
    for side, programs in zip(sides, (plain, adopted), strict=True):
        for program in programs:
            side.setdefault(_key(program), []).append(program)
    for key in sorted({*sides[0], *sides[1]}):
        left, right = (side.get(key, []) for side in sides)
        if len(left) != len(right):
            yield f"program {key}: {len(left)} / {len(right)}"
            continue
        if Counter(map(_frozen, left)) == Counter(map(_frozen, right)):
            continue
        for one, other in zip(sorted(left, key=_frozen), sorted(right, key=_frozen), strict=True):
            for part in ("directory", "input", "status", "files"):
                if one[part] != other[part] and not (started_by_us and part == "status"):
                    yield f"{part} of {key[0]} {key[-3:]}: {one[part]!r:.300} / {other[part]!r:.300}"
            yield from _variables(key, one["variables"], other["variables"], started_by_us)


def _variables(key: tuple[str, ...], one: Mapping[str, str], other: Mapping[str, str], started_by_us: bool) -> Iterator[str]:
    for name in sorted({*one, *other}):
        ours = started_by_us and name not in SIZES and (name not in one or name.startswith(OF_OUR_SRUN))
        if one.get(name) == other.get(name) or ours:
            continue
        yield f"variable {name} of {key[0]} {key[-3:]}: {one.get(name)!r:.200} / {other.get(name)!r:.200}"


def _frozen(program: Mapping[str, Any]) -> str:
    return repr((*[program[part] for part in ("directory", "input", "status", "files")], sorted(program["variables"].items())))
