"""The idle share of a pipeline of two ranks, as executed, beside what its schedule says.

A step is traced: when each rank began and ended each computation. ``measured`` is the share of the step in which ranks compute
nothing, ``own times`` that of the simulated schedule with the median time of each kind of computation on each stage, ``equal
stages`` that of the formula, with one median for all. The model is large enough for computing to dominate messages: a Llama of 8
layers, hidden 512, microbatches of 256 tokens or more, one thread per rank. Two ranks need two idle cores: beside other work the
figures mean nothing, and the spread of the rounds shows it.
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

from hpc_mp.report.facts import read_facts
from hpc_mp.report.gantt import Bubble, chosen, compared, executed
from hpc_mp.rundir import RunDirectory

JOB = """
[job]
name = "bubble"
device = "cpu"
ranks_per_node = 2
[model.config]
model_type = "llama"
num_hidden_layers = 8
hidden_size = 512
intermediate_size = 1408
num_attention_heads = 8
num_key_value_heads = 8
vocab_size = 512
max_position_embeddings = 256
[data]
files = [{files}]
sequence_length = 256
[parallel]
pipeline = 2
zero = 0
[train]
steps = 4
global_batch = 8
"""

CASES: dict[str, list[str]] = {
    "gpipe M4": ['parallel.schedule="gpipe"', "parallel.microbatches=4"],
    "1f1b M4": ["parallel.microbatches=4"],
    "1f1b M8": ["parallel.microbatches=8"],
    "1f1b M8 full": ["parallel.microbatches=8", 'parallel.recompute="full"'],
    "1f1b M8 offload": ["parallel.microbatches=8", 'parallel.offload=["activations"]', "parallel.offload_horizon=1"],
    "interleaved_1f1b M8": ['parallel.schedule="interleaved_1f1b"', "parallel.microbatches=8", "parallel.virtual_stages=2"],
    "breadth_first M8": ['parallel.schedule="breadth_first"', "parallel.microbatches=8", "parallel.virtual_stages=2"],
    "zero_bubble M8": ['parallel.schedule="zero_bubble"', "parallel.microbatches=8"],
    "zero_bubble_v M8": ['parallel.schedule="zero_bubble_v"', "parallel.microbatches=8"],
}
POINTS = 5  # by which measured and simulated may differ where computing dominates


def measure(job: Path, overrides: list[str]) -> Bubble:
    """Of the last step of one run."""
    command = [sys.executable, "-m", "hpc_mp", "launch", str(job), "--on", "local", "--json",
               *(word for setting in overrides for word in ("--set", setting))]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    facts = read_facts(RunDirectory(Path(json.loads(done.stdout)["run"])))
    assert facts.placement is not None and facts.spec is not None
    places, _ = chosen(facts.placement, facts.traces)
    _, bubble = compared(executed(places, facts.traces, ("pp",)), facts.spec)
    assert bubble is not None
    return bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", action="append", choices=CASES, help="only these (repeatable)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = Path(directory) / "job.toml"
        job.write_text(JOB.format(files=json.dumps(f"{sysconfig.get_paths()['stdlib']}/a*.py")))
        print(f"{'':22} measured (rounds)              own times  equal stages  measured − own times")
        for name in arguments.case or CASES:
            found = [measure(job, CASES[name]) for _ in range(arguments.rounds)]
            measured, own, equal = (100 * median(getattr(each, what) for each in found)
                                    for what in ("measured", "own_times", "ideal"))
            rounds = ", ".join(f"{100 * each.measured:.1f}" for each in found)
            away = measured - own
            print(f"{name:22} {measured:5.1f} % ({rounds:20}) {own:8.1f} % {equal:11.1f} %  {away:+6.1f} points"
                  f"{'' if abs(away) <= POINTS else f', more than {POINTS}'}", flush=True)


if __name__ == "__main__":
    main()
