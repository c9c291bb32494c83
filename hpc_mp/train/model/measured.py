"""Measurements of a model's code in transformers: first values of parameters, and the factor between the last norm and logits."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpc_mp.layout.models.family import Init

UNSET = 0.4140625  # in parameters and buffers that nothing has set


class Unmeasured(Exception):
    """The code cannot be measured; its text says why, without a subject."""


def first_value(model: PreTrainedModel, module: nn.Module, leaf: str) -> Init:
    """Return how transformers sets the first values of a parameter or a buffer. Constants are measured, in what it does to a
    module without values, or in what the module's constructor does."""
    values = getattr(module, leaf)
    if (values.dim() > 1 and values.shape[0] > 1) or values.numel() > 1 << 20:
        return "normal"
    copy = type(module).__new__(type(module))
    copy.__dict__.update(vars(module))
    large = "weight" if isinstance(module, nn.Linear) and leaf == "bias" else None  # to draw it would take seconds
    copy._parameters = {name: None if old is None else nn.Parameter(_filled(old[:1] if name == large else old), old.requires_grad)
                        for name, old in module._parameters.items()}
    copy._buffers = {name: old if old is None or not old.is_floating_point() else _filled(old)
                     for name, old in module._buffers.items()}
    copy._modules = {}
    try:
        model._init_weights(copy)
        values = getattr(copy, leaf)
    except Exception:
        return "zeros"
    if bool((values == UNSET).all()):
        with suppress(TypeError):  # a constructor that takes arguments
            values = getattr(type(module)(), leaf)
    constant = float(values.detach().flatten()[0])
    if constant == UNSET or not bool((values == constant).all()):
        return "normal"
    return "zeros" if constant == 0.0 else "ones" if constant == 1.0 else constant


def head_scale(model: PreTrainedModel, head: nn.Linear, name: str) -> float:
    """Return the factor between hidden states and logits besides the head's product, measured with random numbers. Raises
    Unmeasured. ``name``: of the module that has the layers."""
    hidden, logits, inputs = torch.randn(1, 3, head.in_features), torch.randn(1, 3, head.out_features), []

    class LayerOutput(dict[int, Tensor]):
        last_hidden_state = hidden

        def __getattr__(self, name: str) -> None:
            return None

    class Base(nn.Module):
        def forward(self, *args: Any, **settings: Any) -> LayerOutput:
            return LayerOutput({0: hidden})

    class Head(nn.Module):
        weight = head.weight

        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x)
            return logits

    base = model.get_submodule(name)
    path = next(path for path, module in model.named_modules() if module is head)
    try:
        model.set_submodule(name, Base())
        model.set_submodule(path, Head())
        result = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception as error:
        raise Unmeasured(f"computes logits in a way that cannot be measured ({text_of(error)})") from None
    finally:
        model.set_submodule(name, base)
        model.set_submodule(path, head)
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = logits if cap is None else cap * torch.tanh(logits / cap)
    inner, outer = _ratio(inputs[0], hidden), _ratio(result, expected)
    if inner is None or outer is None or (outer != 1.0 and (cap is not None or head.bias is not None)):
        raise Unmeasured("computes more between the last norm and the logits than a product")
    return inner * outer


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _filled(values: Tensor) -> Tensor:
    return torch.full_like(values, UNSET, device="cpu")


def _ratio(result: Tensor, base: Tensor) -> float | None:
    """Return the factor between two tensors; None if it is not the same everywhere."""
    factor = float((result * base).sum() / (base * base).sum())
    return None if not torch.allclose(result, base * factor, rtol=1e-4, atol=1e-5) else 1.0 if abs(factor - 1) < 1e-5 else factor
