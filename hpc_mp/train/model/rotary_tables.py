"""Rotary tables that are the same on every layout."""

from typing import Any

import torch
from torch import Tensor, nn


class RotaryTables(nn.Module):
    """Replacement of a model's module of rotary tables, which has no parameters.

    transformers chooses frequencies by the largest position in a call (longrope, dynamic), which differs among ranks,
    microbatches and documents. Therefore each call also has the last position of a whole sample. Tables for whole samples are
    cached.

    Args:
        rotary: transformers' module, with values.
        positions: positions of this rank's tokens in samples of one document, (1, tokens).
        length: number of tokens of a whole sample.

    Attributes:
        places: positions of this rank's tokens in the documents of the current microbatch, (samples or 1, tokens).
    """

    def __init__(self, rotary: nn.Module, positions: Tensor, length: int) -> None:
        super().__init__()
        self._rotary = [rotary]  # outside of the module tree: its buffers belong to no checkpoint
        self.positions, self.length, self.places = positions, length, positions
        self.kept: dict[tuple[Any, ...], Tensor | tuple[Tensor, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of transformers' module, which the model's forward may read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._rotary[0], name)

    def forward(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if self.places is not self.positions:
            return self._tables(hidden, self.places, *kind, **named)
        key = (*kind, *named.values())
        if key not in self.kept:
            self.kept[key] = self._tables(hidden, self.places, *kind, **named)
        return self.kept[key]

    @torch.no_grad()
    def _tables(self, hidden: Tensor, places: Tensor, *kind: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        tables = self._rotary[0].to(hidden.device)(hidden, behind_the_last(places, self.length), *kind, **named)
        if isinstance(tables, Tensor):
            return tables[:, 1:].contiguous()
        return tuple(table[:, 1:].contiguous() for table in tables)


def behind_the_last(places: Tensor, length: int) -> Tensor:
    """Return positions, (samples, 1 + tokens), with the last position of a whole sample before the given ones."""
    return torch.cat((places.new_full((len(places), 1), length - 1), places), 1)
