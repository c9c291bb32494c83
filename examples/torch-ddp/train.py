"""A small model on all ranks with torch DDP, which saves as it goes and goes on from what it has saved."""

import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 40, 10
SAVED = Path(os.environ.get("HPC_MP_RUN", ".")) / "model.pt"

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
if os.environ.get("HPC_MP_RESUME") and SAVED.exists():
    saved = torch.load(SAVED, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

for step in range(done + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * world + rank)  # by the step: a later attempt sees what this one would have
    x = torch.randn(32, 16, generator=draw).to(device)
    loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
        if step % EVERY == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{SAVED}.new")
            os.replace(f"{SAVED}.new", SAVED)
    with suppress(ImportError):
        import hpc_mp

        hpc_mp.log(step=step, loss=loss.item(), tokens=32 * world)
dist.barrier()
dist.destroy_process_group()
