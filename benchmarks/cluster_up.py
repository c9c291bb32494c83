"""Seconds from `hpc-mp lab up` to a finished training job on its 4 hosts, and to nothing left, by what had happened.

The job is the one that `hpc-mp init` writes: a small GPT-2 on the source of Python's standard library, for which it first trains
a tokenizer; here with a rank on each of four nodes. Needs root and the packages of docs/user/lab.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = ("job.nodes=4", "job.ranks_per_node=1")


def hpc_mp(*words: str, cwd: Path, **environ: str) -> str:
    """What the command prints; with its words on standard error, and no more, if it fails."""
    command = [sys.executable, "-m", "hpc_mp", *words]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def measure(cwd: Path, name: str, settings: list[str]) -> dict[str, float]:
    """Seconds after the first command was given."""
    began = time.time()
    up = json.loads(hpc_mp("lab", "up", "--nodes", "4", "--name", name, "--json", cwd=cwd))
    marks = {"all nodes idle": time.time() - began}
    try:
        slurm = {"SLURM_CONF": up["slurm_conf"]}
        hpc_mp("init", "--force", cwd=cwd, **slurm)
        words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        outcome = json.loads(hpc_mp("launch", "job.toml", "--on", "slurm", "--wait", "--json", *words, cwd=cwd, **slurm))
        finished = time.time() - began
        run = Path(outcome["run"])
        ranks = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
        assert len({rank["host"] for rank in ranks}) == 4, ranks
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        marks |= {
            "job submitted": (run / "job.id").stat().st_mtime - began,
            "nodes looked at": (run / "nodes" / "n1.json").stat().st_mtime - began,
            "ranks have met": max(rank["time"] for rank in ranks) - began,
            "text tokenized": (run / "tokenizer.path").stat().st_mtime - began,
            "last step done": (run / "metrics.jsonl").stat().st_mtime - began,
            "launch has ended": finished,
        }
        print(f"{len(steps)} steps, loss {outcome['first_loss']:.3f} → {outcome['loss']:.3f}, {steps[-1]['step_time_s']:.2f} s "
              f"for the last; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    finally:
        start = time.time()
        hpc_mp("lab", "down", "--name", name, cwd=cwd)
    return marks | {"down took": time.time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="bench", help="of the cluster")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of the job")
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory:
            found.append(measure(Path(directory), arguments.name, arguments.settings))
    for mark in found[0]:
        print(f"{mark:18} {', '.join(f'{each[mark]:6.2f}' for each in found)} s")


if __name__ == "__main__":
    main()
