"""``hpc_mp.parallel`` equals one process of plain transformers, or of plain torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import hpc_mp
from hpc_mp.train.engine.precision import StaysDouble

CONFIG = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 61, "max_position_embeddings": 32}
ADAMW = {"name": "adamw", "lr": 0.02, "eps": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
SAMPLES, TOKENS, STEPS = 8, 12, 3
EXACT = 1e-12


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(61, (SAMPLES, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model."""
    def made() -> None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).double().save_pretrained(path)

    path = tmp_path_factory.mktemp("model")
    run_ranks(1, made)
    return path


def plain(directory: Path) -> tuple[list[float], dict[str, Any]]:
    """One process of transformers."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        with StaysDouble():
            logits = model(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: values.numpy() for name, values in model.state_dict().items()}


def trained(directory: Path, keywords: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(directory, precision="fp64", optimizer=ADAMW, **keywords)
    losses = [float(run.step(batch_of(step))) for step in range(STEPS)]
    state = {name: values.numpy() for name, values in run.model_state().items()}
    run.close()
    return losses, state


LAYOUTS = {"1": {}, "tp2": {"tp_size": 2}, "pp2 dp2": {"pp_size": 2, "microbatches": 2, "zero": 1}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loop_equals_one_process(directory: Path, name: str) -> None:
    world = {"1": 1, "tp2": 2, "pp2 dp2": 4}[name]
    losses, state = run_ranks(1, plain, directory)[0]
    reports = run_ranks(world, trained, directory, LAYOUTS[name])
    assert all(abs(a - b) < EXACT for report in reports for a, b in zip(report[0], losses, strict=True))
    saved = reports[0][1]
    assert saved.keys() == state.keys() - {"lm_head.weight"} | ({"lm_head.weight"} & saved.keys())
    assert max(abs(saved[name] - state[name]).max() for name in saved) < EXACT
