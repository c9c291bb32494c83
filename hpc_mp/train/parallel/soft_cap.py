"""The soft cap of scores and logits: a tanh that squeezes them into -cap … cap (Gemma 2, arXiv:2408.00118, section 2)."""

from torch import Tensor


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Return scores squeezed into -cap … cap; ``cap`` None: unchanged."""
    return scores if cap is None else (scores / cap).tanh() * cap


def through_cap(gradient: Tensor, squeezed: Tensor, cap: float | None) -> Tensor:
    """Return the gradient of scores, given the gradient of ``squeezed``, their capped values. Masked scores get 0."""
    return gradient if cap is None else gradient * (1 - (squeezed.clamp(min=-cap) / cap).square())
