"""The engine in a loop of one's own: no job file, no run directory, no supervisor.

    torchrun --nproc-per-node 4 demo/own_loop.py

Four ranks train a small Llama, two stages of a pipeline by two replicas with ZeRO-1, on numbers that are easy to learn.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import FAMILIES
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.train.engine import initial
from hpc_mp.train.engine.causal_model import CausalModel, hugging_face_config
from hpc_mp.train.engine.dropout import Moment
from hpc_mp.train.engine.engine import Engine, EngineSettings, Microbatches
from hpc_mp.train.engine.groups import build, everyone
from hpc_mp.train.engine.stage import Batch

CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4,
          "vocab_size": 256, "max_position_embeddings": 64}
MICROBATCHES, SAMPLES, SEQUENCE, STEPS = 4, 2, 32, 30
CPU = torch.device("cpu")
RANKS = 4


@dataclass(frozen=True)
class AdamW:
    """What the engine asks of an optimizer's settings."""

    steps: int = STEPS
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    lr_schedule: str = "cosine"
    warmup_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("*norm.weight",)
    momentum: float = 0.0
    clip: float = 1.0


def share(step: int, replica: int) -> Microbatches:
    """Runs of numbers from different beginnings: what comes next is always one more."""

    def batch(stage: int, microbatch: int) -> Batch:
        begin = torch.arange(SAMPLES).unsqueeze(1) * 7 + replica * 3 + microbatch * 11 + step
        tokens = (begin + torch.arange(SEQUENCE + 1)) % CONFIG["vocab_size"]
        return Batch(ids=tokens[:, :-1], labels=tokens[:, 1:])

    def moment(microbatch: int) -> Moment:
        first = ((step * 2 + replica) * MICROBATCHES + microbatch) * SAMPLES
        return Moment(step, tuple(range(first, first + SAMPLES)))

    return Microbatches(batch, moment, labels=MICROBATCHES * SAMPLES * SEQUENCE)


def train() -> list[float]:
    """The loss of every step, on every rank alike; the process group is there."""
    family = FAMILIES["llama"]
    shape = family.read(CONFIG)
    layout = Layout(degrees=Degrees(pipeline=2, data=2), layers=(2, 2), samples=SAMPLES, sequence=SEQUENCE,
                    microbatches=MICROBATCHES, shard_degree=2)
    schedule = schedule_of(layout)
    placement = place(layout.degrees, "DPT", ranks_per_node=4)
    groups = build(placement, layout.shard_degree, device=CPU, backend="gloo", schedule=schedule, timeout=None, host=everyone())
    settings = EngineSettings(layout, schedule, seed=0, optimizer=AdamW())
    engine = Engine(CausalModel(hugging_face_config(CONFIG, family, dropout=None), family, shape), settings, groups, CPU)
    engine.start(initial.drawn(0, shape.layers, shape.initializer_range, engine.padding))
    return [engine.step(step, share(step, groups.data_rank)).numbers().loss for step in range(STEPS)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"{dist.get_world_size()} ranks: two stages by two replicas are {RANKS}; start it with "
                         f"torchrun --nproc-per-node {RANKS} demo/own_loop.py")
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {STEPS} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo with sub-groups aborts at the interpreter's own exit


if __name__ == "__main__":
    main()
