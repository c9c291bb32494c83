"""Slurm's programs, faked by scripts on PATH. Their arguments are recorded; tests set their output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launching import environment, executable

FAKE_CLI = Path(__file__).parents[1] / "launch" / "fake_cli.py"


class Cluster:
    """A directory of fake Slurm programs. ``state``: the output of squeue; sbatch runs ``job`` (a shell line)."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder = folder / "bin", folder
        self.is_state("RUNNING")
        self.runs(":")
        executable(self.bin, "scontrol", 'case "$1" in ping) echo "Slurmctld(primary) at x is UP";; '
                   'show) echo host7;; --version) echo slurm 23.11.4;; esac')
        executable(self.bin, "sinfo", 'echo "gpu*|up|1-00:00:00|64|512000|(null)|n[1-4]"')
        executable(self.bin, "squeue", f"touch {folder}/looked; read state < {folder}/state\n"
                   'case "$*" in *%T*) echo "$state";; *) echo "4242|$state|N/A||0|0|None|";; esac')
        executable(self.bin, "sacct", "exit 1")
        executable(self.bin, "sbatch", 'case "$*" in *--test-only*) echo "sbatch: Job 1 to start at noon on nodes h[7-8]" >&2; '
                   f'exit;; esac; echo "$@" > {folder}/submitted; sh {folder}/job; echo 4242')
        executable(self.bin, "srun", f'case "$*" in *slurm/node-*|*TOPOLOGY*) exit 0;; esac; exec sh {folder}/job')

    def is_state(self, word: str) -> None:
        (self.folder / "state").write_text(f"{word}\n")

    def runs(self, line: str) -> None:
        (self.folder / "job").write_text(f"{line}\n")

    def start(self, mark: str, job: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        path = f"{self.bin}:/usr/bin:/bin"
        return subprocess.Popen([sys.executable, str(FAKE_CLI), "launch", str(job), *arguments], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=environment(mark, **{"PATH": path, **environ}))

    def launch(self, mark: str, job: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
        process = self.start(mark, job, *arguments, **environ)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
