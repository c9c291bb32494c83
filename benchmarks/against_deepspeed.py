"""Tokens per second of ours over DeepSpeed's, on the workload of ``throughput.py``, in alternating runs.

Both have torch's fused AdamW, one thread per rank, the same samples and microbatches; with bf16 both keep fp32 masters.
DeepSpeed is no dependency: ``--deepspeed DIR`` names where ``pip install --target DIR deepspeed`` has put it.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from throughput import WARM_UP, measure, write_job


@dataclass(frozen=True)
class Case:
    """A layout that both run."""

    pipeline: int
    data: int
    zero: int
    microbatches: int
    precision: str

    @property
    def ours(self) -> list[str]:
        return [f"job.ranks_per_node={self.pipeline * self.data}", f"parallel.pipeline={self.pipeline}",
                f"parallel.zero={self.zero}", f"parallel.microbatches={self.microbatches}", f'train.precision="{self.precision}"']


LAYOUTS = {"dp2 zero1": (1, 2, 1, 1), "dp2 zero2": (1, 2, 2, 1), "pp2 M4": (2, 1, 0, 4), "pp2 dp2 zero1 M4": (2, 2, 1, 4)}
CASES = {f"{name} {precision}": Case(*layout, precision) for precision in ("fp32", "bf16") for name, layout in LAYOUTS.items()}


def deepspeed_seconds(job: Path, case: Case, place: Path) -> float:
    """Median seconds per step of DeepSpeed's ranks. What it compiles lies beside the job: the lock that an ended build leaves in
    the user's own cache would make all ranks wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = case.pipeline * case.data
    command = [sys.executable, str(Path(__file__).with_name("deepspeed_ranks.py")), str(job), "--zero", str(case.zero),
               "--pipeline", str(case.pipeline), "--microbatches", str(case.microbatches), "--precision", case.precision]
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(place), "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
            "TORCH_EXTENSIONS_DIR": str(job.with_name("extensions")), "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    written = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(error[-2000:] for _, error in written))
    return median(json.loads(written[0][0].splitlines()[-1])[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path, required=True, help="the folder that DeepSpeed was installed into")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--case", action="append", choices=CASES, help="only these (repeatable)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = write_job(Path(directory), arguments.steps)
        ratios: dict[str, list[float]] = {}
        same: list[float] = []
        for turn in range(arguments.rounds):
            for name in arguments.case or CASES:
                case = CASES[name]
                before = measure(job, case.ours)
                theirs = deepspeed_seconds(job, case, arguments.deepspeed)
                after = measure(job, case.ours)
                ratios.setdefault(name, []).append(2 * theirs / (before + after))
                same.append(after / before)
                print(f"round {turn + 1}  {name:24} {ratios[name][-1]:5.2f}  (ours again: {same[-1]:4.2f})", flush=True)
        print("\ntokens/s of ours over DeepSpeed's: median (all)")
        for name, found in ratios.items():
            print(f"{name:24} {median(found):5.2f}  ({', '.join(f'{ratio:.2f}' for ratio in found)})")
        print(f"ours over ours (A/A)     {median(same):5.2f}  ({min(same):.2f} to {max(same):.2f})")


if __name__ == "__main__":
    main()
