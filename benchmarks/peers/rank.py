"""A rank of a way. It trains as many steps as each line of its standard input says, and sleeps in the read between.

It answers with a line of JSON: the median seconds of a step after the first ``WARM_UP``, and the losses of all. The first line
comes after the start, and has neither.
"""

import argparse
import importlib
import json
import os
import sys
import time
from statistics import median

import torch
import workload
from workload import Layout, Step

WARM_UP = 2  # steps of a turn that find cold caches, and other ranks still asleep


def way_of(name: str) -> str:
    """The module of a way; modules of other peers may not be installed."""
    if name.startswith("DeepSpeed"):
        return "with_deepspeed"
    return "with_ours" if name.startswith("ours") else "with_torch"


def built(name: str, layout: Layout) -> Step:
    if name.startswith("plain"):
        return workload.plain(layout)
    step: Step = importlib.import_module(way_of(name)).WAYS[name](layout)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way")
    parser.add_argument("layout", help="as JSON")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    layout = Layout(**json.loads(arguments.layout))
    torch.set_num_threads(layout.threads)
    cores = sorted(os.sched_getaffinity(0))
    if 1 < layout.ranks <= len(cores):  # two ranks that the system has put on one core would take turns
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})
    step, done = built(arguments.way, layout), 0
    print("{}", file=answers, flush=True)
    while line := sys.stdin.readline():
        seconds, losses = [], []
        for number in range(done, done + int(line)):
            began = time.perf_counter()
            losses.append(step(number))
            seconds.append(time.perf_counter() - began)
        done += int(line)
        answer = {"seconds": median(seconds[WARM_UP:]), "losses": [None if loss is None else float(loss) for loss in losses]}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # gloo aborts where an interpreter ends with open groups


if __name__ == "__main__":
    main()
