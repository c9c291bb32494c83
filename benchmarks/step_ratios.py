"""Step times of layouts, predicted beside measured, on this machine: emulated nodes, one thread for each rank.

    hpc-mp bench kernels > machines.toml
    HPC_MP_MACHINES=machines.toml python benchmarks/step_ratios.py [--ranks 2] [--steps 8] [--json FILE]

The machine's rows are its one calibration; no step of a model has been measured before. All layouts are run in rounds, and the
median over all steps counts. The error of a layout is that of the ratio of its time to the geometric mean of all, so that a
common factor has no effect. ``chosen`` is the layout that ``hpc-mp plan`` picks of those that were run. The ranks need a core
each: beside other work the figures mean nothing.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median

import click

from hpc_mp.base.files import read_lines
from hpc_mp.job import load_job
from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.step import step_time

MACHINE, FIRST = "processors", 2  # steps left out
MODELS = {"narrow": (8, 256, 704, 4096), "wide": (4, 640, 1728, 8192)}  # layers, hidden, intermediate, vocabulary
JOB = """
[job]
name = "ratios"
device = "cpu"
ranks_per_node = {ranks}
directory = "{place}"
[model.config]
model_type = "llama"
num_hidden_layers = {layers}
hidden_size = {hidden}
intermediate_size = {inner}
vocab_size = {words}
num_attention_heads = 8
num_key_value_heads = 4
max_position_embeddings = 256
[data]
files = ["{text}"]
sequence_length = 256
[train]
steps = {steps}
global_batch = 16
"""


def layouts(ranks: int) -> dict[str, list[str]]:
    """Return the keys of layouts over all axes, by name."""
    cases = {}
    for zero, count in product(range(4), (2, 4)):
        cases[f"data {ranks}, zero {zero}, {count} microbatches"] = [f"zero={zero}", f"microbatches={count}"]
    for name, count in product(("1f1b", "gpipe", "zero_bubble"), (4, 8)):
        cases[f"pipeline 2, {name}, {count}"] = ["pipeline=2", f'schedule="{name}"', f"microbatches={count}"]
    cases["pipeline 2, interleaved"] = ["pipeline=2", 'schedule="interleaved_1f1b"', "virtual_stages=2", "microbatches=8"]
    for sequence, count in product(("true", "false"), (1, 4)):
        cases[f"tensor 2, sequence {sequence}, {count}"] = ["tensor=2", f"sequence={sequence}", f"microbatches={count}"]
    cases["context 2"] = ["context=2", "microbatches=2"]
    cases["full recompute"] = ["zero=1", 'recompute="full"', "microbatches=2"]
    return {name: [f"parallel.{key}" for key in keys] for name, keys in cases.items()}


@click.command(help=__doc__)
@click.option("--ranks", default=2)
@click.option("--steps", default=8)
@click.option("--rounds", default=2)
@click.option("--json", "target", type=click.Path(path_type=Path))
def main(ranks: int, steps: int, rounds: int, target: Path | None) -> None:
    results = {}
    text = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    for model, (layers, hidden, inner, words) in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="hpc-mp-ratios-") as place:
            job = Path(place) / "job.toml"
            job.write_text(JOB.format(ranks=ranks, place=place, layers=layers, hidden=hidden, inner=inner, words=words, text=text,
                                      steps=steps))
            times: dict[str, list[float]] = {name: [] for name in layouts(ranks)}
            predicted = {}
            for round_, (name, keys) in product(range(rounds), layouts(ranks).items()):
                spec = load_job(job, keys)
                predicted[name] = step_time(layout_of(spec, read_shape(spec)), read_shape(spec), machine_named(MACHINE)).seconds
                options = [option for key in (*keys, f'job.name="r{round_}"') for option in ("--set", key)]
                command = [sys.executable, "-m", "hpc_mp", "launch", str(job), "--on", "local", "--json", *options]
                run = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
                lines = [*read_lines(Path(run["run"]) / "metrics.jsonl")]
                times[name] += [line["step_time_s"] for line in lines[FIRST:]]
            results[model] = compare({name: median(seconds) for name, seconds in times.items()}, predicted)
    if target is not None:
        target.write_text(json.dumps(results, indent=1))


def compare(measured: dict[str, float], predicted: dict[str, float]) -> dict[str, object]:
    """Print the layouts, the fastest first, and return the errors of their ratios."""
    usual, expected = geometric_mean(measured.values()), geometric_mean(predicted.values())
    errors = {name: predicted[name] / expected / (measured[name] / usual) - 1 for name in measured}
    for name in sorted(measured, key=measured.__getitem__):
        print(f"{name:36} {measured[name]:8.3f} s  predicted {predicted[name]:8.3f} s  ratio {errors[name]:+6.1%}")
    chosen, best = min(predicted, key=predicted.__getitem__), min(measured.values())
    print(f"median error of ratios {median(map(abs, errors.values())):.1%}; all times {expected / usual:.2f} × the measured; "
          f"chosen: {chosen}, {measured[chosen] / best - 1:.1%} slower than the best", flush=True)
    return {"measured": measured, "predicted": predicted, "errors": errors, "chosen": chosen}


if __name__ == "__main__":
    main()
