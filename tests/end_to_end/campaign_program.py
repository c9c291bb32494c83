"""A program of ranks that saves and resumes: ``campaign_program.py STEPS EVERY``. It logs the loss and norm of each step.

Sums go through gloo in one fixed order, so that an attempt that goes on computes the same bits. Asked to go by SIGTERM, the ranks
agree on it after a step, save and end with 75.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpc_mp

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])
SAVED = Path(os.environ["HPC_MP_RUN"]) / "state.pt"
asked = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: asked.fill_(1))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
weights, done = torch.linspace(-1, 1, 4096, dtype=torch.float64), 0
if SAVED.exists():
    saved = torch.load(SAVED)
    weights, done = saved["weights"], saved["step"]


def save(step: int) -> None:
    if rank == 0:
        torch.save({"weights": weights, "step": step}, f"{SAVED}.new")
        os.replace(f"{SAVED}.new", SAVED)
    dist.barrier()


for step in range(done + 1, STEPS + 1):
    time.sleep(0.15)
    draw = torch.Generator().manual_seed(step * world + rank)
    gradient = (weights - torch.randn(4096, generator=draw, dtype=torch.float64)).tanh()
    dist.all_reduce(gradient)
    weights = weights - 0.01 * gradient
    hpc_mp.log(step=step, loss=float(weights.square().mean()), grad_norm=float(gradient.norm()))
    stop = asked.clone()
    dist.all_reduce(stop)
    if step % EVERY == 0 or step == STEPS or stop:
        save(step)
    if stop and step < STEPS:
        sys.stdout.flush()
        os._exit(75)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
