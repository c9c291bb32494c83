"""Tokens per second of parallel layouts, relative to one process with one thread, in alternating runs.

The workload is a Llama of 8 layers, hidden 256, 8 heads over 4 key-value heads, vocabulary 8,192 (10 M parameters),
sequences of 128 tokens, 8 per step, AdamW, fp32, on Python's standard library source. One thread per rank.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import median

JOB = """
[job]
name = "throughput"
device = "cpu"
[model.config]
model_type = "llama"
num_hidden_layers = 8
hidden_size = 256
intermediate_size = 688
num_attention_heads = 8
num_key_value_heads = 4
vocab_size = 8192
max_position_embeddings = 128
bos_token_id = 0
eos_token_id = 0
[data]
files = [{files}]
sequence_length = 128
[train]
steps = {steps}
global_batch = 8
learning_rate = 1e-3
weight_decay = 0.01
betas = [0.9, 0.999]
clip = 0.0
"""

# name: settings, or the number of threads of one plain process
CASES: dict[str, list[str] | int] = {
    "plain, 1 thread (A/A)": 1,
    "plain, 2 threads": 2,
    "hpc-mp, 1 rank": [],
    "dp2 zero0": ["job.ranks_per_node=2", "parallel.zero=0"],
    "dp2 zero1": ["job.ranks_per_node=2", "parallel.zero=1"],
    "dp2 zero2": ["job.ranks_per_node=2", "parallel.zero=2"],
    "dp2 zero3": ["job.ranks_per_node=2", "parallel.zero=3"],
    "tp2": ["job.ranks_per_node=2", "parallel.tensor=2"],
    "pp2 1f1b M4": ["job.ranks_per_node=2", "parallel.pipeline=2", "parallel.microbatches=4"],
    "pp2 gpipe M4": ["job.ranks_per_node=2", "parallel.pipeline=2", "parallel.microbatches=4", 'parallel.schedule="gpipe"'],
}
WARM_UP = 3  # steps left out


def write_job(directory: Path, steps: int) -> Path:
    job = directory / "job.toml"
    files = ", ".join(json.dumps(f"{sysconfig.get_paths()['stdlib']}/{letter}*.py") for letter in "abcdefgh")
    job.write_text(JOB.format(files=files, steps=steps))
    return job


def measure(job: Path, case: list[str] | int) -> float:
    """Median seconds per step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if isinstance(case, int):
        command = [sys.executable, str(Path(__file__).with_name("plain.py")), str(job), "--threads", str(case)]
        environment["OMP_NUM_THREADS"] = str(case)
    else:
        command = [sys.executable, "-m", "hpc_mp", "launch", str(job), "--on", "local", "--json",
                   *(word for setting in case for word in ("--set", setting))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    if isinstance(answer, dict):
        lines = (Path(answer["run"]) / "metrics.jsonl").read_text().splitlines()
        answer = [json.loads(line)["step_time_s"] for line in lines]
    return median(answer[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--case", action="append", choices=CASES, help="only these (repeatable)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = write_job(Path(directory), arguments.steps)
        ratios: dict[str, list[float]] = {}
        before = measure(job, 1)
        for round_number in range(arguments.rounds):
            for name in arguments.case or CASES:
                seconds = measure(job, CASES[name])
                after = measure(job, 1)
                ratios.setdefault(name, []).append((before + after) / 2 / seconds)
                print(f"round {round_number + 1}  {name:24} {ratios[name][-1]:5.2f}  "
                      f"(neighbouring references {after / before:4.2f} apart)", flush=True)
                before = after
        print("\ntokens/s relative to one plain process with one thread: median (all)")
        for name, found in ratios.items():
            print(f"{name:24} {median(found):5.2f}  ({', '.join(f'{r:.2f}' for r in found)})")


if __name__ == "__main__":
    main()
