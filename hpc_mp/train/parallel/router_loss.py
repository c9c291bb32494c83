"""Losses of routers, beside that of the next token: they are part of the training objective, not of the reported loss.

For a sample with T tokens, in a layer with N experts and K choices of a token, with router logits z and p = softmax(z):

- balance: N / (K T) × Σ_i (tokens that take expert i) × (1/T) Σ_t p_ti, the sequence-wise balance loss of DeepSeek-V3
  (arXiv:2412.19437, equations 17 to 20); 1 where experts get equal shares
- z: Σ_t (log Σ_i exp z_ti)² (Zoph et al., arXiv:2202.08906, equation 5)

Both are sums over layers and samples, divided by the number of samples, or tokens, of the global batch. All tokens count,
whatever their labels. So these losses are the same on every layout. A balance over a microbatch, as in transformers' own loss,
would depend on the grouping of samples.

A router's loss joins the graph behind the router. Its gradient is thus computed in the same backward as all other gradients, on
the stage of the router.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.train.parallel.collectives import sum_over
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.groups import Axis


class RouterLoss:
    """The losses of all routers of a rank.

    Args:
        balance, z: weights of a sample's balance loss and of a token's z loss.
        samples: number of samples in a microbatch.
        tokens: number of tokens in a whole sample.

    Attributes:
        scale: fp16's loss scale; set before each step.
        total: sum of the losses of a step, as far as its backwards have run.
    """

    def __init__(self, balance: float, z: float, samples: int, tokens: int, device: torch.device) -> None:
        self.balance, self.z, self.samples, self.tokens = balance, z, samples, tokens
        self.scale = torch.ones((), dtype=torch.float64, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def begin(self, scale: Tensor) -> None:
        """Set the loss scale and reset ``total`` at the beginning of a step."""
        self.scale, self.total = scale, torch.zeros_like(self.total)

    def attach(self, router: nn.Module, experts: int, sharers: Sequence[Axis], counts: bool) -> None:
        """Make the loss of a router join the graph at its output. ``router``: its output is (logits, weights of the choices, the
        chosen experts), each (tokens, …). ``sharers``: axes whose ranks have other tokens of the same samples. ``counts``: True
        if this rank reports the loss; other ranks may compute the same one."""
        def hook(_: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = output
            if not torch.is_grad_enabled():
                return output
            return logits, self._joined(weights, self.of(logits, chosen, experts, sharers), counts), chosen

        if self.balance or self.z:
            router.register_forward_hook(hook)

    def of(self, logits: Tensor, chosen: Tensor, experts: int, sharers: Sequence[Axis]) -> Tensor:
        """Return the loss. logits: (tokens, experts) of this rank's tokens, sample by sample; chosen: (tokens, choices)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        taken = chosen.reshape(self.samples, -1)
        load = logits.new_zeros(self.samples, experts).scatter_add_(1, taken, torch.ones_like(taken, dtype=logits.dtype))
        share = logits.softmax(-1).unflatten(0, (self.samples, -1)).sum(1) / self.tokens
        balance = (sum_over(load, sharers) * share).sum() * (experts / (chosen.shape[1] * self.tokens))
        return self.balance * balance + self.z * logits.logsumexp(-1).square().sum()

    def _joined(self, weights: Tensor, loss: Tensor, counts: bool) -> Tensor:
        """Return the weights unchanged. In their backward the loss gets its gradient, and is counted."""
        value = loss.detach()

        def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
            if counts:
                self.total = self.total + value
            return gradient, self.scale.to(value.dtype)

        return with_backward(lambda weights, loss: weights, backward, weights, loss)
