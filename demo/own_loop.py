"""A training loop of one's own, on two stages of a pipeline by two replicas.

    torchrun --nproc-per-node 4 demo/own_loop.py

The text is runs of numbers: what comes next is always one more.
"""

import torch

import hpc_mp

MODEL = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4,
         "vocab_size": 256, "max_position_embeddings": 64}
SAMPLES, TOKENS, STEPS = 16, 32, 30


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step, the same on every rank."""
    first = torch.arange(SAMPLES).unsqueeze(1) * 7 + step
    numbers = (first + torch.arange(TOKENS + 1)) % MODEL["vocab_size"]
    return {"input_ids": numbers[:, :-1], "labels": numbers[:, 1:]}


def main() -> list[float]:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(MODEL, pp_size=2, zero=1, microbatches=4, optimizer={
        "name": "adamw", "lr": 3e-3, "lr_schedule": "cosine", "warmup_steps": 5, "steps": STEPS})
    losses = [run.step(batch_of(step)) for step in range(STEPS)]
    if run.axes.pp.rank == run.axes.dp.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
