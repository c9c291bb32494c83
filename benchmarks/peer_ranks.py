"""One rank of a way to train the workload of ``peers.py``: ours, plain transformers, or another library.

It builds its model, and then trains as many steps as each line of its input says. Rank 0 answers with the seconds of each step,
and the last loss, as JSON. All ways have the same weights, samples, microbatches and torch's fused AdamW, and one thread a rank.
DeepSpeed is imported by its own ways alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

SAMPLES, TOKENS, WORDS, LAYERS = 8, 128, 8192, 8
MICROBATCHES = 4  # of a pipeline
CONFIG = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": TOKENS}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

Step = Callable[[Tensor, Tensor], Any]  # (ids, labels) of the global batch -> the loss, or None where there is none


def whole_model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def own_part(ids: Tensor, ranks: int, rank: int) -> Tensor:
    return ids.chunk(ranks)[rank]


def stepped(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
    loss = loss_of(model(ids, use_cache=False).logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def data_parallel(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return lambda ids, labels: stepped(model, optimizer, own_part(ids, ranks, rank), own_part(labels, ranks, rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)


class WithMasters(nn.Module):
    """A model in bf16 with fp32 masters, as one process would train it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.masters = nn.ParameterList(parameter.detach().clone() for parameter in model.parameters())
        self.model = model.to(torch.bfloat16)

    def step(self, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(self.model(ids, use_cache=False).logits, labels)
        loss.backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        return loss


def plain(precision: str) -> Step:
    model = whole_model()
    if precision == "fp32":
        return partial(stepped, model, adamw(model))
    both = WithMasters(model)
    return partial(both.step, torch.optim.AdamW(both.masters.parameters(), **ADAMW, fused=True))


def ddp(precision: str, zero: int) -> Step:
    model = DistributedDataParallel(whole_model())
    optimizer = adamw(model) if zero == 0 else ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, **ADAMW, fused=True)
    return data_parallel(model, optimizer)


def fsdp(precision: str, zero: int) -> Step:
    model, mesh = whole_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    return data_parallel(model, adamw(model))


def tensor_of_torch(precision: str) -> Step:
    model, mesh = whole_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = (f"self_attn.{name}_proj" for name in "qkv"), ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
                            "lm_head": ColwiseParallel(output_layouts=Replicate())}
    plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in (*columns, "mlp.gate_proj", "mlp.up_proj")}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    parallelize_module(model, mesh, plan)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]  # tensors of another kind
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    return partial(stepped, model, torch.optim.AdamW([{"params": norms}, {"params": others}], **ADAMW, fused=True))


class Part(nn.Module):
    """A stage of Llama: some of its layers, with the embedding before the first and the head behind the last."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if layers.start == 0 else None
        self.layers, self.rotary = nn.ModuleList(model.model.layers[number] for number in layers), model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if layers.stop == LAYERS else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.embedding is None else self.embedding(hidden)
        places = self.rotary(hidden, torch.arange(hidden.shape[1]).unsqueeze(0))
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=places)
        return hidden if self.head is None else self.head(self.norm(hidden))


def pipeline_of_torch(precision: str, schedule: Any, replicas: int) -> Step:
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("data", "stage"))
    stage, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    part: Any = Part(whole_model(), range(stage * LAYERS // 2, (stage + 1) * LAYERS // 2))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = SAMPLES // replicas // MICROBATCHES
    received = torch.zeros(size, TOKENS, dtype=torch.int64) if stage == 0 else torch.zeros(size, TOKENS, 256, dtype=dtype, requires_grad=True)
    if precision == "bf16":
        both = WithMasters(part)
        part = both.model
    sent = part(received)
    if replicas > 1:
        part = DistributedDataParallel(part, process_group=mesh.get_group("data"))
        optimizer = ZeroRedundancyOptimizer(part.parameters(), torch.optim.AdamW, process_group=mesh.get_group("data"), **ADAMW,
                                            fused=True)
    else:
        optimizer = adamw(both.masters if precision == "bf16" else part)
    built = PipelineStage(part, stage, 2, torch.device("cpu"), input_args=received, output_args=sent, group=mesh.get_group("stage"))
    runs = schedule(built, MICROBATCHES, loss_fn=loss_of)

    def step(ids: Tensor, labels: Tensor) -> Any:
        losses: list[Tensor] = []
        if stage == 0:
            runs.step(own_part(ids, replicas, replica))
        else:
            runs.step(target=own_part(labels, replicas, replica), losses=losses)
        if precision == "bf16":
            for master, parameter in zip(both.masters, part.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if precision == "bf16":
            with torch.no_grad():
                for master, parameter in zip(both.masters, part.parameters(), strict=True):
                    parameter.copy_(master)
        return torch.stack(losses).mean() if losses else None

    return step


def deepspeed_settings(precision: str, zero: int, size: int) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": size, "gradient_clipping": 0.0, "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True, "bf16": {"enabled": precision == "bf16"}, "steps_per_print": 10**9}


def deepspeed_zero(precision: str, zero: int) -> Step:
    import deepspeed
    model, ranks, rank = whole_model(), dist.get_world_size(), dist.get_rank()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model),
                                      config=deepspeed_settings(precision, zero, SAMPLES // ranks))

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(engine(own_part(ids, ranks, rank), use_cache=False).logits, own_part(labels, ranks, rank))
        engine.backward(loss)
        engine.step()
        return loss

    return step


def deepspeed_tensor(precision: str) -> Step:
    import deepspeed
    model = whole_model()
    settings = deepspeed_settings(precision, 0, SAMPLES) | {"tensor_parallel": {"autotp_size": dist.get_world_size()}}
    model = deepspeed.tp_model_init(model, tp_size=dist.get_world_size(), dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(engine(ids, use_cache=False).logits, labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


class Embedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class Block(nn.Module):
    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        self.block, self.rotary = model.model.layers[layer], llama.LlamaRotaryEmbedding(model.config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        return self.block(hidden, attention_mask=None, position_embeddings=self.rotary(hidden, positions))


class Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def deepspeed_pipeline(precision: str, zero: int) -> Step:
    import deepspeed
    from deepspeed.pipe import PipelineModule
    model = whole_model()
    layers = [Embedding(model), *(Block(model, number) for number in range(LAYERS)), Head(model)]
    stages = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="parameters")
    replicas = dist.get_world_size() // 2
    size = SAMPLES // replicas // MICROBATCHES
    settings = deepspeed_settings(precision, zero, size) | {"gradient_accumulation_steps": MICROBATCHES}
    engine, *_ = deepspeed.initialize(model=stages, optimizer=adamw(stages), config=settings)
    replica = engine.grid.get_data_parallel_rank()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        parts = zip(own_part(ids, replicas, replica).split(size), own_part(labels, replicas, replica).split(size), strict=True)
        loss: Tensor = engine.train_batch(parts)
        return loss

    return step


def ours(precision: str, keys: dict[str, Any]) -> Step:
    import hpc_mp
    optimizer = {"name": "adamw", "lr": ADAMW["lr"], "betas": list(ADAMW["betas"]), "eps": ADAMW["eps"],  # type: ignore[call-overload]
                 "weight_decay": ADAMW["weight_decay"], "no_decay": []}
    run = hpc_mp.parallel(whole_model(), precision=precision, clip=0.0, optimizer=optimizer, **keys)
    return lambda ids, labels: run.step({"input_ids": ids, "labels": labels})


PIPE = {"pp_size": 2, "microbatches": MICROBATCHES}
WAYS: dict[str, Callable[[str], Step]] = {
    "plain": plain,
    "DDP": partial(ddp, zero=0), "DDP, ZeroRedundancyOptimizer": partial(ddp, zero=1),
    "FSDP2, kept": partial(fsdp, zero=2), "FSDP2": partial(fsdp, zero=3),
    "torch tensor": tensor_of_torch,
    "torch 1F1B": partial(pipeline_of_torch, schedule=Schedule1F1B, replicas=1),
    "torch GPipe": partial(pipeline_of_torch, schedule=ScheduleGPipe, replicas=1),
    "torch 1F1B, DDP": partial(pipeline_of_torch, schedule=Schedule1F1B, replicas=2),
    **{f"DeepSpeed {zero}": partial(deepspeed_zero, zero=zero) for zero in range(4)},
    "DeepSpeed tensor": deepspeed_tensor,
    "DeepSpeed pipeline": partial(deepspeed_pipeline, zero=0), "DeepSpeed pipeline, 1": partial(deepspeed_pipeline, zero=1),
    **{f"ours zero {zero}": partial(ours, keys={"zero": zero}) for zero in range(4)},
    "ours tp": partial(ours, keys={"tp_size": 2}), "ours pp": partial(ours, keys=PIPE),
    "ours pp zero 1": partial(ours, keys=PIPE | {"zero": 1}),
}


def main() -> None:
    way, precision = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "DeepSpeed" in way:
        import deepspeed
        deepspeed.init_distributed("gloo", verbose=False)
    elif way != "plain" and "ours" not in way:
        dist.init_process_group("gloo")
    step = WAYS[way](precision)
    words = torch.randint(WORDS, (4, SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    answers, number = os.fdopen(int(os.environ["ANSWERS"]), "w"), 0
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seconds, loss = [], None
        for _ in range(int(line)):
            batch = words[number % len(words)]
            began = time.perf_counter()
            loss = step(batch[:, :-1], batch[:, 1:])
            value = None if loss is None else float(loss)
            seconds.append(time.perf_counter() - began)
            number += 1
        print(json.dumps([seconds, value]), file=answers, flush=True)
    os._exit(0)  # gloo with groups aborts at an interpreter's end


if __name__ == "__main__":
    main()
