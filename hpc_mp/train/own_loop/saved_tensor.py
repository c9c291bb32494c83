"""The tensors of a saved model, as parts of the engine's weights, and what tells models with the same tensors apart."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hpc_mp.layout.models import Weight

SAMPLED = 256  # values of a tensor that its fingerprint is made of


def fingerprint_of(state: Mapping[str, Tensor]) -> str:
    """Return a digest of names and first values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, values in state.items():
        digest.update(f"{name} {tuple(values.shape)} {values.flatten()[:SAMPLED].tolist()}".encode())
    return digest.hexdigest()


def computing(module: nn.Module) -> dict[str, str]:
    """Return what each module inside computes as far as its class and its attributes tell, by path. Dropout may change."""
    def settings(inner: nn.Module) -> str:
        values = {} if isinstance(inner, nn.Dropout) else vars(inner)
        return ", ".join(f"{name}={value!r}" for name, value in sorted(values.items())
                         if isinstance(value, int | float | str) and name != "training" and not name.startswith("_"))

    return {path: f"{type(inner).__name__}({settings(inner)})" for path, inner in module.named_modules()}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a saved model."""

    name: str
    weight: Weight
    shape: tuple[int, ...]  # as the model's module has it
    at: tuple[int, ...] = ()  # the first indices of its part of the weight; empty: the whole

    def taken(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Return its values, from those of whole weights by name."""
        values = whole[self.weight.name][self.at].contiguous().view(self.shape)
        return values if self.at or self.name == self.weight.name else values.clone()  # no two names of a file share memory
