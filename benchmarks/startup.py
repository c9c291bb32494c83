"""Seconds from the command to the end of the first step, for the 8 ranks of the demo."""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

DEMO = Path(__file__).resolve().parents[1] / "demo" / "job.toml"


def measure(directory: Path, run: int) -> dict[str, float]:
    """Seconds after the command was given, by what had happened."""
    files = json.dumps([f"{sysconfig.get_paths()['stdlib']}/a*.py"])
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "hpc_mp", "launch", str(DEMO), "--on", "local", "--json", "--set", f"data.files={files}",
         "--set", "train.steps=1", "--set", "train.warmup_steps=0", "--set", "checkpoint.every=0",
         "--set", f"job.directory={directory}"],
        capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        sys.exit(done.stderr)
    path = Path(json.loads(done.stdout)["run"])
    ranks = [json.loads(line)["time"] for line in (path / "ranks.jsonl").read_text().splitlines()]
    return {"all ranks have met": max(ranks) - began, "first step done": (path / "metrics.jsonl").stat().st_mtime - began,
            "command has ended": ended - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = [measure(Path(directory), run) for run in range(arguments.rounds)]
    print("the first run also trains the tokenizer")
    for name in found[0]:
        values = [run[name] for run in found]
        print(f"{name:20} {median(values[1:] or values):6.2f} s  ({', '.join(f'{v:.2f}' for v in values)})")


if __name__ == "__main__":
    main()
