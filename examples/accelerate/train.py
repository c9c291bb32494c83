"""A plain loop with Accelerate, whose ranks are started by hpc-mp in place of `accelerate launch`."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EVERY = 2, 10
SAVED = Path(os.environ.get("HPC_MP_RUN", ".")) / "checkpoints"

# It finds RANK, WORLD_SIZE and MASTER_ADDR. Without GPUs it has to be told so: else each rank would train alone.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0)
x = torch.randn(2560, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=32, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)


def save(step: int) -> None:
    """A directory gets its name once all ranks have written."""
    unfinished = SAVED / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(SAVED / f"step-{step}", ignore_errors=True)
        unfinished.rename(SAVED / f"step-{step}")


done = 0
if os.environ.get("HPC_MP_RESUME"):
    done = max((int(path.name.removeprefix("step-")) for path in SAVED.glob("step-*")), default=0)
    if done:
        accelerator.load_state(str(SAVED / f"step-{done}"))

step = done
for epoch in range(done // len(loader), EPOCHS):
    loader.set_epoch(epoch)  # the order of an epoch is drawn from its number
    seen = done % len(loader) if epoch == done // len(loader) else 0
    for inputs, targets in accelerator.skip_first_batches(loader, seen):
        step += 1
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step} epoch {epoch} loss {loss.item():.4f}")
        if step % EVERY == 0:
            save(step)
        with suppress(ImportError):
            import hpc_mp

            hpc_mp.log(step=step, loss=loss.item(), tokens=len(inputs) * accelerator.num_processes,
                       learning_rate=schedule.get_last_lr()[0])
accelerator.end_training()
