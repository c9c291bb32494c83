"""Seconds from the command to the first line of a program on the last of 2 × 2 ranks: `hpc-mp run` against the plain command.

That is `torchrun --nproc-per-node 4` on this machine, and `srun --ntasks 4` inside an allocation of the test cluster
(tests/slurm_lab: it needs root and Debian's Slurm). The program imports nothing. Every round measures the plain command, hpc-mp's
and the plain one again: the two plain ones are the A/A pair.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
PROGRAM = """import os, sys, time
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
with open(os.path.join(sys.argv[1], rank), "w") as file:
    file.write(repr(time.time()))
"""
RUN = [sys.executable, "-m", "hpc_mp", "run", "--nodes", "2", "--ranks-per-node", "2", "--set", "environment.health=false"]

Start = Callable[[Sequence[str], Path], None]
"""Starts a command in a directory, and returns when it has ended."""


def seconds(start: Start, command: Sequence[str], directory: Path) -> float:
    """Until the last rank was in the first line of the program."""
    moments = Path(tempfile.mkdtemp(dir=directory))
    began = time.time()
    start([*command, str(moments)], directory)
    said = [float(path.read_text()) for path in moments.iterdir()]
    if len(said) != RANKS:
        sys.exit(f"{command} has started {len(said)} ranks instead of {RANKS}")
    return max(said) - began


def compare(title: str, plain: Sequence[str], ours: Sequence[str], start: Start, directory: Path, rounds: int) -> None:
    (directory / "program.py").write_text(PROGRAM)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        first = seconds(start, plain, directory)
        found.append((first, seconds(start, ours, directory), seconds(start, plain, directory)))
    between = [one - (first + second) / 2 for first, one, second in found]
    plainly, with_us = median(first for first, _, _ in found), median(one for _, one, _ in found)
    print(f"{title:12} plain {plainly:6.2f} s   hpc-mp {with_us:6.2f} s   "
          f"difference {median(between):+6.2f} s ({min(between):+.2f} … {max(between):+.2f})   "
          f"A/A {median(second / first for first, _, second in found):.2f}", flush=True)


def here(command: Sequence[str], directory: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout}{done.stderr}")


def on_this_machine(rounds: int) -> None:
    program = [sys.executable, "program.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "program.py"]
    with tempfile.TemporaryDirectory() as directory:
        compare("local", torchrun, [*RUN, "--on", "local", "--", *program], here, Path(directory), rounds)


def in_an_allocation(rounds: int) -> None:
    """Each command in an allocation that is there already, as in an interactive session."""
    sys.path.insert(0, str(ROOT))
    from tests.slurm_lab.lab import Lab

    program = [sys.executable, "program.py"]
    with Lab(2) as lab:
        directory = lab.share / "start"
        directory.mkdir()
        job = lab.sbatch("--nodes=2", "--ntasks-per-node=2", "--wrap=sleep 3600")
        fields = lab.wait_job(job, "RUNNING")
        environ = {"SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
                   "SLURM_JOB_NODELIST": fields["NodeList"], "SLURM_NODELIST": fields["NodeList"],
                   "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "PYTHONPATH": str(ROOT),
                   "XDG_STATE_HOME": str(directory / "state")}

        def start(command: Sequence[str], directory: Path) -> None:
            done = lab.run(command, cwd=directory, environ=environ, timeout=200)
            if done.returncode:
                sys.exit(f"{command}\n{done.stdout}{done.stderr}")

        srun = ["srun", "--nodes=2", f"--ntasks={RANKS}", "--ntasks-per-node=2", "--overlap"]
        compare("in salloc", [*srun, *program], [*RUN, "--", *program], start, directory, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local-only", action="store_true", help="without the Slurm of the tests")
    arguments = parser.parse_args()
    on_this_machine(arguments.rounds)
    if not arguments.local_only:
        in_an_allocation(arguments.rounds)


if __name__ == "__main__":
    main()
