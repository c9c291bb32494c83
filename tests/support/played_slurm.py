"""Slurm's programs, faked by scripts on PATH. Their arguments are recorded; tests set their output."""

from pathlib import Path

import warm
from launching import environment, executable

import hpc_mp.launch.launch  # noqa: F401  (imported once, for all forks)

FAKE_CLI = Path(__file__).with_name("fake_cli.py")


class Cluster:
    """A directory of fake Slurm programs. ``state``: the output of squeue; sbatch runs ``job`` (a shell line)."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder = folder / "bin", folder
        self.is_state("RUNNING")
        self.runs(":")
        self.says("scontrol", 'case "$1" in ping) echo "Slurmctld(primary) at x is UP";; '
                  'show) echo host7;; --version) echo slurm 23.11.4;; esac')
        self.says("sinfo", 'echo "gpu*|up|1-00:00:00|64|512000|(null)|n[1-4]"')
        self.says("squeue", f"touch {folder}/looked; read state < {folder}/state\n"
                  'case "$*" in *%T*) echo "$state";; *) echo "4242|$state|N/A||0|0|None|";; esac')
        self.says("sacct", "exit 1")
        self.says("sbatch", 'case "$*" in *--test-only*) echo "sbatch: Job 1 to start at noon on nodes h[7-8]" >&2; '
                  f'exit;; esac; echo "$@" > {folder}/submitted; sh {folder}/job; echo 4242')
        self.says("srun", f'case "$*" in *slurm/node-*|*TOPOLOGY*) exit 0;; esac; exec sh {folder}/job')

    def says(self, program: str, line: str) -> None:
        executable(self.bin, program, line)

    def is_named(self) -> None:
        """Make scontrol name the cluster ``lab``."""
        self.says("scontrol", 'case "$1 $2" in ping*) echo "Slurmctld(primary) at x is UP";; '
                  '"show config") echo "ClusterName = lab";; --version*) echo slurm 23.11.4;; esac')

    def is_state(self, word: str) -> None:
        (self.folder / "state").write_text(f"{word}\n")

    def runs(self, line: str) -> None:
        (self.folder / "job").write_text(f"{line}\n")

    def start(self, mark: str, job: Path, *arguments: str, **environ: str) -> warm.Program:
        environ = {"PATH": f"{self.bin}:/usr/bin:/bin", **environ}
        return warm.Program([FAKE_CLI, "launch", job, *arguments], environment(mark, **environ))

    def launch(self, mark: str, job: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
        return self.start(mark, job, *arguments, **environ).outcome()
