"""Tensor, pipeline and data parallel ranks in the order of Megatron, from an argument line like Megatron's."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, layer_norm

parser = argparse.ArgumentParser(description=__doc__)
for name, value in {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "num-layers": 4, "hidden-size": 32,
                    "micro-batch-size": 8, "global-batch-size": 64, "train-iters": 40, "save-interval": 10, "seed": 1234}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--save", type=Path, default=Path(os.environ.get("HPC_MP_RUN", ".")) / "checkpoints")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
dp = world // (tp * pp)
share = args.global_batch_size // dp  # rows of a data parallel rank
for fits, rule in ((tp * pp * dp == world, f"{world} ranks are no multiple of tensor {tp} x pipeline {pp}"),
                   (args.num_layers % pp == 0, "--num-layers is no multiple of the stages"),
                   (4 * args.hidden_size % tp == 0, "4 x --hidden-size is no multiple of the tensor ranks"),
                   (args.global_batch_size % (dp * args.micro_batch_size) == 0,
                    f"--global-batch-size is no multiple of {dp} data ranks x --micro-batch-size")):
    if not fits:
        raise SystemExit(rule)

# Megatron's order: neighbours are tensor ranks, then come data ranks, and the stages of a pipeline are farthest apart.
grid = torch.arange(world).view(pp, dp, tp)
stage, data_rank, tensor_rank = (int(place) for place in (grid == rank).nonzero()[0])
lines = {"tensor": grid.reshape(-1, tp), "data": grid.transpose(1, 2).reshape(-1, dp),
         "pipeline": grid.permute(1, 2, 0).reshape(-1, pp)}
group: dict[str, Any] = {}
for axis, members in lines.items():
    for ranks in members.tolist():
        made = dist.new_group(ranks)  # every rank takes part in the making of every group
        if rank in ranks:
            group[axis] = made
stages = grid[:, data_rank, tensor_rank].tolist()


class ToTensorRanks(torch.autograd.Function):
    """Before a layer that is cut by columns: each rank has the input already, and a part of its gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group["tensor"])
        return gradient


class FromTensorRanks(torch.autograd.Function):
    """After a layer that is cut by rows: each rank has a part of the output, and all of its gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group["tensor"])
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def weight(number: int, rows: int, columns: int, cut: int | None = None) -> torch.nn.Parameter:
    """The same numbers in every layout: drawn whole, and this rank's part of them is kept."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(args.seed + number)) / columns ** 0.5
    part = whole if cut is None else whole.chunk(tp, cut)[tensor_rank].clone()
    return torch.nn.Parameter(part.to(device))


class Block(torch.nn.Module):
    """An MLP with its residual: the first matrix cut by columns of its product, the second by rows."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        size = args.hidden_size
        self.up, self.down = weight(2 * layer, 4 * size, size, 0), weight(2 * layer + 1, size, 4 * size, 1)
        self.bias = torch.nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = gelu(ToTensorRanks.apply(layer_norm(x, x.shape[-1:])) @ self.up.T)
        return x + FromTensorRanks.apply(inner @ self.down.T) + self.bias


each = args.num_layers // pp
blocks = torch.nn.Sequential(*(Block(layer) for layer in range(stage * each, (stage + 1) * each)))
if stage == pp - 1:
    blocks.register_parameter("head", weight(-1, 1, args.hidden_size))
optimizer = torch.optim.AdamW(blocks.parameters(), lr=args.lr)


def forward(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A microbatch through this stage: what it took, and what it hands on; of the last stage that is its loss."""
    x = rows
    if stage:
        x = torch.empty_like(rows)
        dist.recv(x, stages[stage - 1], group=group["pipeline"])
        x.requires_grad_()
    out = blocks(x)
    if stage < pp - 1:
        dist.send(out.detach(), stages[stage + 1], group=group["pipeline"])
        return x, out
    return x, (out @ blocks.head.T - rows.sum(1, keepdim=True).tanh()).square().mean() / (share // args.micro_batch_size)


def backward(x: torch.Tensor, out: torch.Tensor) -> None:
    gradient = None
    if stage < pp - 1:
        gradient = torch.empty_like(out)
        dist.recv(gradient, stages[stage + 1], group=group["pipeline"])
    out.backward(gradient)
    if stage:
        dist.send(x.grad, stages[stage - 1], group=group["pipeline"])


def saved(step: int) -> Path:
    """Of this rank: what ranks of other data parallel numbers hold is the same."""
    return args.save / f"iter_{step:07d}" / f"mp_rank_{tensor_rank:02d}_{stage:03d}" / "model_optim_rng.pt"


def save(step: int) -> None:
    """The step is named once all ranks have written."""
    if data_rank == 0:
        saved(step).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": blocks.state_dict(), "optimizer": optimizer.state_dict()}, saved(step))
    dist.barrier()
    if rank == 0:
        latest.with_suffix(".new").write_text(str(step))
        os.replace(latest.with_suffix(".new"), latest)


latest = args.save / "latest_checkpointed_iteration.txt"
done = 0
if os.environ.get("HPC_MP_RESUME") and latest.exists():
    done = int(latest.read_text())
    held = torch.load(saved(done), map_location=device)
    blocks.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])

for step in range(done + 1, args.train_iters + 1):
    draw = torch.Generator().manual_seed(args.seed + 1000 * step)  # the same rows in every layout and in every attempt
    batch = torch.randn(args.global_batch_size, args.hidden_size, generator=draw)[data_rank * share:][:share].to(device)
    passed = [forward(rows) for rows in batch.split(args.micro_batch_size)]
    for x, out in passed:
        backward(x, out)
    for parameter in blocks.parameters():
        dist.all_reduce(parameter.grad, group=group["data"])
        parameter.grad /= dp
    optimizer.step()
    optimizer.zero_grad()
    loss = sum(out.detach() for _, out in passed) / dp if stage == pp - 1 else torch.zeros((), device=device)
    dist.all_reduce(loss, group=group["data"])
    dist.all_reduce(loss, group=group["pipeline"])
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
    if step % args.save_interval == 0:
        save(step)
    with suppress(ImportError):
        import hpc_mp

        hpc_mp.log(step=step, loss=loss.item(), tokens=args.global_batch_size)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads of several groups may abort when Python tears them down
