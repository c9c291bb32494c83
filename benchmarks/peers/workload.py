"""The workload of all ways: a Llama of 10 M parameters, its samples, optimizer and loss. Needs torch and transformers alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

SAMPLES, TOKENS, VOCABULARY = 8, 128, 8192
CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "bos_token_id": 0,
          "eos_token_id": 0, "tie_word_embeddings": False}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FIRST_BLOCKS = 5  # of a pipeline of two; the head costs as much as three blocks. Ours comes to the same cut by itself
V_BLOCKS = (2, 3, 3, 0)  # of the stages of a pipeline that comes back, the head in the last one
Step = Callable[[int], Tensor | None]  # trains the step of this number; the loss, if this rank has it


@dataclass(frozen=True, slots=True)
class Layout:
    """A division of the workload. Data ranks are what is left of ``ranks``."""

    ranks: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0
    microbatches: int = 1
    precision: str = "fp32"
    threads: int = 1

    @property
    def data(self) -> int:
        return self.ranks // (self.pipeline * self.tensor)


def llama_model() -> nn.Module:
    """Build the model in fp32, with the same values in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def batch_of(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """A part of a step's global batch: token ids and labels, each (samples, tokens).

    Small ids are more frequent than large ones, so that there is something to learn: a loss that falls shows wrong updates.
    """
    drawn = torch.rand(SAMPLES, TOKENS + 1, generator=torch.Generator().manual_seed(step))
    ids = (drawn ** 3 * VOCABULARY).long().chunk(parts)[part]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)


class Masters:
    """AdamW over fp32 copies of a module's bf16 parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.narrow = list(module.parameters())
        self.wide = [nn.Parameter(parameter.detach().clone()) for parameter in self.narrow]
        for wide in self.wide:
            wide.grad = torch.empty_like(wide)
        module.to(torch.bfloat16)
        self.optimizer = adamw(self.wide)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_([wide.grad for wide in self.wide], [narrow.grad for narrow in self.narrow])
        self.optimizer.step()
        torch._foreach_copy_(self.narrow, self.wide)

    def zero_grad(self) -> None:
        for narrow in self.narrow:
            narrow.grad = None


def optimizer_of(module: nn.Module, layout: Layout) -> torch.optim.AdamW | Masters:
    """The optimizer of a module's parameters; with bf16 the module is cast, and fp32 masters are kept beside it."""
    return Masters(module) if layout.precision == "bf16" else adamw(module.parameters())


def plain(layout: Layout) -> Step:
    """One process of plain transformers and torch."""
    model = llama_model()
    optimizer = optimizer_of(model, layout)

    def step(number: int) -> Tensor:
        ids, labels = batch_of(number)
        loss = loss_of(model(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Block(nn.Module):
    """A decoder layer that passes hidden states on, with its own rotary table."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        return self.block(hidden, attention_mask=None, position_embeddings=self.rotary(hidden, positions))


def layers_of(model: Any) -> tuple[list[nn.Module], int]:
    """The layers of a model for a pipeline of two, and how many of them the first stage has."""
    inner = model.model
    blocks = [Block(block, llama.LlamaRotaryEmbedding(inner.config)) for block in inner.layers]
    return [inner.embed_tokens, *blocks, inner.norm, model.lm_head], 1 + FIRST_BLOCKS
