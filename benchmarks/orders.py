"""Step time of letter orders over slow links: ``order = "auto"`` against each of the six, on a real Slurm.

Four hosts of the test cluster (tests/slurm_lab: network namespaces on this machine, so it needs root and Debian's
Slurm) with links of 200 Mbit/s, two ranks on each: tensor 2 × pipeline 2 × data 2 with gloo. Two workloads, because no
order is good at both: ``tensor`` has long microbatches, ``data`` short ones and so more parameters per token.

The ranks are steps of one Slurm job that import torch once; every run is a fork of them, in rounds of all seven orders.
``auto`` is one of the six: the two equal runs of a round are the A/A pair.
"""

import argparse
import json
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from hpc_mp.job import JobSpec, dump_job, resolve
from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.layout.placement import ORDERS
from hpc_mp.planner.order import choose_rank_order
from hpc_mp.planner.traffic import traffic_of

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests/slurm_lab

NODES, RANKS_PER_NODE = 4, 2
WARM_UP = 2  # steps left out
# name: (hidden size, sequences per microbatch, microbatches)
WORKLOADS = {"tensor": (128, 4, 4), "data": (256, 1, 2)}


def job(share: Path, name: str, workload: str, order: str, steps: int) -> JobSpec:
    hidden, size, microbatches = WORKLOADS[workload]
    return resolve({
        "job": {"name": name, "nodes": NODES, "ranks_per_node": RANKS_PER_NODE, "device": "cpu", "directory": "."},
        "model": {"config": {
            "model_type": "llama", "num_hidden_layers": 4, "hidden_size": hidden, "intermediate_size": 2 * hidden,
            "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 128,
            "bos_token_id": 0, "eos_token_id": 0}},
        "data": {"files": [f"{sysconfig.get_paths()['stdlib']}/{letter}*.py" for letter in "ab"],
                 "sequence_length": 128},
        "parallel": {"tensor": 2, "pipeline": 2, "order": order, "microbatches": microbatches},
        "train": {"steps": steps, "global_batch": 2 * microbatches * size},
    }, share)


def settled(spec: JobSpec) -> tuple[JobSpec, str]:
    """The same job with its order in letters, and why it has these."""
    shape, p = read_shape(spec), spec.parallel
    layout = layout_of(spec, shape)
    order = choose_rank_order(layout, traffic_of(layout, shape))
    return spec.model_copy(update={"parallel": p.model_copy(update={"order": order.letters})}), order.why


def write(share: Path, workload: str, rounds: int, steps: int) -> str:
    """A job file per run, named in the order in which they run; returns why auto chose its order."""
    for number in range(rounds):
        orders = deque(["auto", *ORDERS])
        orders.rotate(number)  # none is always the first after a pause, or the last
        for turn, order in enumerate(orders):
            name = f"{number:02}-{turn}-{order}"
            spec, why = settled(job(share, name, workload, order, steps))
            (share / f"{name}.toml").write_text(dump_job(spec))
            if order == "auto":
                said = f"auto = {spec.parallel.order}: {why}"
    return said


def rank(share: Path) -> int:
    """What every task of the step runs: all runs one after another, each in a fork. Nothing but imports happens before."""
    from hpc_mp.train.rank.main import main as train

    for number, file in enumerate(sorted(share.glob("*.toml"))):
        if (child := os.fork()) == 0:
            os.environ |= {"MASTER_PORT": str(20000 + number)}
            os._exit(train(file))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            return 1
    return 0


def measured(share: Path) -> Iterator[tuple[int, str, float]]:
    """(round, order, median seconds per step) of every finished run."""
    for metrics in sorted(share.glob("*/0001/metrics.jsonl")):
        number, _, order = metrics.parent.parent.name.split("-")
        times = [json.loads(line)["step_time_s"] for line in metrics.read_text().splitlines()]
        yield int(number), order, median(times[WARM_UP:])


def report(share: Path, auto: str) -> bool:
    """Print the table; whether auto is within 5 % of the best median, or within what two equal runs differ."""
    rows: dict[str, list[float]] = {}
    for _, order, seconds in measured(share):
        rows.setdefault(order, []).append(seconds)
    for order in ("auto", *ORDERS):
        times = rows[order]
        print(f"  {order:5} {median(times):6.3f} s   ({' '.join(f'{t:.3f}' for t in times)})")
    best = min(ORDERS, key=lambda order: median(rows[order]))
    behind = median(rows["auto"]) / median(rows[best]) - 1
    spread = median(abs(a / b - 1) for a, b in zip(rows["auto"], rows[auto], strict=True))
    good = behind <= max(0.05, spread)
    print(f"  best {best}; auto ({auto}) is {behind:+.1%} from it, A/A spread {spread:.1%}: {'good' if good else 'BAD'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these (repeatable)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(arguments.rank)
    from tests.slurm_lab.lab import Lab
    from tests.slurm_lab.why_not import why_not

    if (reason := why_not()) is not None:
        sys.exit(f"no test cluster here: {reason}")
    good = True
    with Lab(NODES) as lab:
        lab.shape(arguments.rate)
        for workload in arguments.workload or WORKLOADS:
            share = lab.share / workload
            share.mkdir()
            said = write(share, workload, arguments.rounds, arguments.steps)
            print(f"{workload}: {said}", flush=True)
            done = lab.run(["srun", f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--kill-on-bad-exit=1",
                     f"--output={share}/log-%t", sys.executable, __file__, "--rank", str(share)],
                    timeout=3600, environ={
                        "PYTHONPATH": str(Path(__file__).parent.parent), "MASTER_ADDR": "n1",
                        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit("\n".join(log.read_text()[-2000:] for log in sorted(share.glob("log-*"))))
            good &= report(share, said.split()[2].rstrip(":"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
