"""A model whose parameters, gradients and optimizer states are cut over all ranks (FSDP2), and so is what they save."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, EVERY = 40, 10
SAVED = Path(os.environ.get("HPC_MP_RUN", ".")) / "checkpoints"
UNFINISHED = SAVED / "unfinished"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # one name for every tensor, whatever ranks there are

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Linear(16, 64), *layers, torch.nn.Linear(64, 1))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
for layer in (*layers, model):  # each is gathered when it computes, and let go after that
    fully_shard(layer, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def state() -> dict[str, Any]:
    """Of this rank: its parts of the parameters and of what the optimizer knows, all of them tensors."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    return {name: value for name, value in {**of_model, **of_optimizer}.items() if isinstance(value, torch.Tensor)}


def save(step: int) -> None:
    """As safetensors, each rank its own parts. A directory gets its name once all of them have written."""
    dcp.save(state(), storage_writer=HuggingFaceStorageWriter(str(UNFINISHED), save_distributed=True))
    if rank == 0:
        shutil.rmtree(SAVED / f"step-{step}", ignore_errors=True)
        UNFINISHED.rename(SAVED / f"step-{step}")


def load(directory: Path) -> None:
    """Also where other ranks, or another number of them, have written it."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    held = state()
    dcp.load(held, storage_reader=HuggingFaceStorageReader(str(directory)))
    set_state_dict(model, optimizer, model_state_dict={name: held[name] for name in of_model},
                   optim_state_dict={name: held.get(name, value) for name, value in of_optimizer.items()}, options=FLAT)


if rank == 0:
    shutil.rmtree(UNFINISHED, ignore_errors=True)  # what an attempt was writing when it was killed
dist.barrier()
done = 0
if os.environ.get("HPC_MP_RESUME"):
    done = max((int(path.name.removeprefix("step-")) for path in SAVED.glob("step-*")), default=0)
    if done:
        load(SAVED / f"step-{done}")

for step in range(done + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * world + rank)  # by the step: a later attempt sees what this one would have
    x = torch.randn(32, 16, generator=draw)
    y = x.sum(1, keepdim=True).tanh()
    if cuda:
        x, y = x.cuda(), y.cuda()
    loss = (model(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # of all ranks' parts
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}")
    if step % EVERY == 0:
        save(step)
    with suppress(ImportError):
        import hpc_mp

        hpc_mp.log(step=step, loss=loss.item(), tokens=32 * world, grad_norm=norm.item())
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads of several groups may abort when Python tears them down
