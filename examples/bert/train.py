"""A BERT learns masked tokens on four ranks: tensor 2 × data 2, with ZeRO-1.

Which tokens of a sample are masked depends on its number alone, so that every layout, and any other trainer, sees the same.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import hpc_mp

FOLDER = Path(__file__).parent
LENGTH, BATCH, STEPS, MASKED, IGNORED = 64, 16, 60, 0.15, -100
OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 4e-3, "warmup_steps": 6, "lr_schedule": "cosine_with_min_lr", "steps": STEPS,
                             "lr_schedule_options": {"min_lr_rate": 0.1}, "weight_decay": 0.1}


@cache
def rows() -> tuple[Tensor, int, int]:
    """Return all sentences as rows of ``LENGTH`` tokens, the token of a mask, and the number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    lines = (FOLDER / "data" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [f"{json.loads(line)['text']}{tokenizer.eos_token}" for line in lines]
    ids = torch.tensor([token for sentence in tokenizer(texts)["input_ids"] for token in sentence])
    return ids[:len(ids) // LENGTH * LENGTH].view(-1, LENGTH), tokenizer.mask_token_id, len(tokenizer)


def sample(number: int) -> dict[str, Tensor]:
    """Return a sample with 15 % of its tokens as labels: eight of ten of them masked, one of ten another token, as in BERT."""
    whole, mask, words = rows()
    ids = whole[number % len(whole)]
    generator = torch.Generator().manual_seed(number)
    chosen, way, others = torch.rand(LENGTH, generator=generator), torch.rand(LENGTH, generator=generator), torch.randint(
        words, (LENGTH,), generator=generator)
    label = chosen < MASKED
    seen = torch.where(label & (way < 0.8), mask, torch.where(label & (way >= 0.9), others, ids))
    return {"input_ids": seen, "labels": ids.where(label, IGNORED)}


def batch_of(step: int) -> dict[str, Tensor]:
    """Return the global batch of a step, the same on every rank."""
    samples = [sample(number) for number in range(step * BATCH, (step + 1) * BATCH)]
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


def main() -> None:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(FOLDER / "model", tp_size=2, zero=1, microbatches=2, optimizer=OPTIMIZER)
    for step in range(STEPS):
        run.step(batch_of(step))
    run.save(FOLDER / "trained")


if __name__ == "__main__":
    main()
