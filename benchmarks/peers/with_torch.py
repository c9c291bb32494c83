"""Torch's own engines: DDP, ZeroRedundancyOptimizer, FSDP2, tensor parallel DTensors and torch.distributed.pipelining."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from workload import ADAMW, V_BLOCKS, Block, Layout, Step, adamw, batch_of, layers_of, llama_model, loss_of, optimizer_of

Divide = Callable[[nn.Module, Layout, DeviceMesh], tuple[nn.Module, Any]]  # a module and its optimizer among data ranks


def whole(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return module, optimizer_of(module, layout)


def ddp(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    return wrapped, adamw(wrapped.parameters())


def ddp_zero(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    wrapped, _ = ddp(module, layout, mesh)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, process_group=mesh.get_group(),
                                            parameters_as_bucket_view=True, fused=True, **ADAMW)


def fsdp2(module: Any, layout: Layout, mesh: DeviceMesh, reshard: bool) -> tuple[nn.Module, Any]:
    """FSDP2, a unit for each block. ``reshard``: whole parameters are freed after each forward (ZeRO-3)."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if layout.precision == "bf16" else MixedPrecisionPolicy()
    for block in module.model.layers if hasattr(module, "model") else [part for part in module if isinstance(part, Block)]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=narrow)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=narrow)
    return module, adamw(module.parameters())


def data_parallel(divide: Divide, layout: Layout) -> Step:
    dist.init_process_group("gloo")
    module, optimizer = divide(llama_model(), layout, init_device_mesh("cpu", (layout.ranks,)))

    def step(number: int) -> Tensor:
        ids, labels = batch_of(number, dist.get_rank(), layout.ranks)
        loss = loss_of(module(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def pipelined(schedule_type: type, divide: Divide, layout: Layout) -> Step:
    """A pipeline of two stages, whose data ranks are neighbours."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, layout.data), mesh_dim_names=("pipeline", "data"))
    stage, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    layers, first = layers_of(llama_model())
    module = nn.Sequential(*(layers[first:] if stage else layers[:first]))
    module, optimizer = divide(module, layout, mesh["data"])
    schedule = schedule_type(
        PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh["pipeline"].get_group()), layout.microbatches,
        loss_fn=loss_of)

    def step(number: int) -> Tensor | None:
        ids, labels = batch_of(number, replica, layout.data)
        losses: list[Tensor] = []
        if stage == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def zero_bubble_v(layout: Layout) -> Step:
    """A pipeline of two ranks with two stages each: the first rank has the first and the last one."""
    dist.init_process_group("gloo")
    rank, (layers, _) = dist.get_rank(), layers_of(llama_model())
    ends = [0, *accumulate((1 + V_BLOCKS[0], *V_BLOCKS[1:-1])), len(layers)]
    places = [stage for stage, place in enumerate((0, 1, 1, 0)) if place == rank]
    modules = [nn.Sequential(*layers[ends[stage]:ends[stage + 1]]) for stage in places]
    optimizer = optimizer_of(nn.ModuleList(modules), layout)
    stages = [PipelineStage(module, stage, 4, torch.device("cpu")) for module, stage in zip(modules, places, strict=True)]
    schedule = ScheduleZBVZeroBubble(stages, layout.microbatches, loss_fn=loss_of)

    def step(number: int) -> Tensor | None:
        ids, labels = batch_of(number)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids, target=labels, losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def tensor_parallel(layout: Layout) -> Step:
    """Attention by heads, MLPs by columns and rows, embedding, head and loss by words."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (layout.ranks,))
    model: Any = llama_model()
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    plan |= {f"model.layers.*.{part}.{name}": ColwiseParallel() for part in ("self_attn", "mlp") for name in columns}
    plan |= {f"model.layers.*.{part}.{name}": RowwiseParallel() for part in ("self_attn", "mlp") for name in rows}
    names = {name for name, _ in model.named_modules()}
    plan = {name: style for name, style in plan.items() if name.replace("*", "0") in names}
    parallelize_module(model, mesh, plan)
    parameters = list(model.parameters())
    optimizers = [adamw(parameter for parameter in parameters if isinstance(parameter, DTensor) == cut) for cut in (True, False)]

    def step(number: int) -> Tensor:
        ids, labels = batch_of(number)
        with loss_parallel():
            loss = loss_of(model(input_ids=ids, use_cache=False).logits, labels)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach().full_tensor()

    return step


WAYS: dict[str, Callable[[Layout], Step]] = {
    "DDP": partial(data_parallel, ddp),
    "DDP + ZeroRedundancyOptimizer": partial(data_parallel, ddp_zero),
    "FSDP2, no reshard": partial(data_parallel, partial(fsdp2, reshard=False)),
    "FSDP2": partial(data_parallel, partial(fsdp2, reshard=True)),
    "torch 1F1B": partial(pipelined, Schedule1F1B, whole),
    "torch GPipe": partial(pipelined, ScheduleGPipe, whole),
    "torch 1F1B x DDP": partial(pipelined, Schedule1F1B, ddp),
    "torch 1F1B x DDP + ZeroRedundancyOptimizer": partial(pipelined, Schedule1F1B, ddp_zero),
    "torch 1F1B x FSDP2": partial(pipelined, Schedule1F1B, partial(fsdp2, reshard=False)),
    "torch ZBV": zero_bubble_v,
    "torch DTensor": tensor_parallel,
}
