"""A model whose gradients and optimizer states are cut over all ranks by DeepSpeed (ZeRO-2), on GPUs or processors."""

import os
from contextlib import suppress
from pathlib import Path

import torch

cuda = torch.cuda.is_available()
if not cuda:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import deepspeed  # noqa: E402

if not cuda:  # else each node would first compile an extension in C++, for reductions within one node
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
STEPS, EVERY = 40, 10
SAVED = Path(os.environ.get("HPC_MP_RUN", ".")) / "checkpoints"
CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": cuda},
}

deepspeed.init_distributed("nccl" if cuda else "gloo")
rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # DeepSpeed's own would be compiled on the nodes
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
if os.environ.get("HPC_MP_RESUME") and (SAVED / "latest").exists():
    engine.load_checkpoint(str(SAVED))
done = engine.global_steps

for step in range(done + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * world + rank)  # by the step: a later attempt sees what this one would have
    x = torch.randn(32, 16, generator=draw)
    y = x.sum(1, keepdim=True).tanh()
    x, y = (part.to(engine.device, next(engine.parameters()).dtype) for part in (x, y))
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
    if step % EVERY == 0:  # `latest` names it once all ranks have written
        engine.save_checkpoint(str(SAVED), save_latest=False)
        if rank == 0:
            (SAVED / "latest.new").write_text(f"global_step{step}")
            os.replace(SAVED / "latest.new", SAVED / "latest")
    with suppress(ImportError):
        import hpc_mp

        hpc_mp.log(step=step, loss=loss.item(), tokens=32 * world)
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
