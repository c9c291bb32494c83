"""Adapters: which projections of a model have one, and how strong they are. No torch.

LoRA (Hu et al., arXiv:2106.09685): a projection computes y = W x + scale × B (A x). W keeps its values; A (rank, in) and
B (out, rank) are trained. B begins with zeros, so that training begins with the model as it is.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model."""

    rank: int  # of every adapter
    alpha: float  # strength; the scale is alpha / rank
    # name patterns of the projections, or experts' parameters, that have an adapter: of whole names or their ends
    modules: tuple[str, ...]
    dropout: float = 0.0  # probability with which elements of an adapter's input are dropped
    rslora: bool = False  # True if the scale is alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Return True if the projection, or the parameter of experts, of this name has an adapter."""
        return any(chooses(pattern, name) for pattern in self.modules)


def chooses(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a name, or its end behind a dot: ``q_proj``, ``mlp.*``."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
