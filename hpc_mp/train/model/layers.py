"""The layers of a stage as the forward of a Hugging Face model calls them.

The model's own forward runs on every stage, with a callable for each layer: ``LayerCall`` for a layer of this stage, ``passed``
for any other. Steps of the forward before and behind its layers are replaced too: it looks up no positions, and its rotary
tables are the same on every layout.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_mp.train.model.recompute import computed_again

Settings = Mapping[str, Any]  # arguments of a layer besides hidden states
Driver = Callable[[Tensor, Tensor], Tensor]  # hidden states and positions -> hidden states


def driver_of(base: nn.Module, argument: str) -> Driver:
    """Return a model's forward as a driver. ``argument``: the name of its argument for hidden states."""
    def drive(hidden: Tensor, positions: Tensor) -> Tensor:
        return cast(Tensor, base(**{argument: hidden}, position_ids=positions, use_cache=False).last_hidden_state)

    return drive


class LayerHost(Protocol):
    """The stage that layers belong to."""

    def block(self, path: str, hidden: Tensor, settings: Settings) -> Tensor:
        """Compute one layer."""

    def around(self, group: int, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute a group of layers with their parameters on the device."""

    def mask(self, path: str) -> Tensor | None:
        """Return the mask that attention adds to scores in a layer, or None if it needs none."""


class LayerGroup:
    """Layers that are recomputed together, or a single layer.

    Calls are recorded, and computed at the call of the last layer. So a group is a unit of recomputation, whatever loop calls it.

    Args:
        number: number of the group in its stage.
        again: True if the backward recomputes it.
    """

    def __init__(self, host: LayerHost, number: int, paths: Sequence[str], again: bool) -> None:
        self.host, self.number, self.paths, self.again = host, number, paths, again
        self._noted: list[Settings] = []

    def call(self, hidden: Tensor, settings: Settings) -> Tensor:
        self._noted.append(settings)
        if len(self._noted) < len(self.paths):
            return hidden
        noted, self._noted = self._noted, []
        return self.host.around(self.number, partial(self._computed, noted), hidden)

    def _computed(self, noted: Sequence[Settings], hidden: Tensor) -> Tensor:
        leaves, tree = tree_flatten(noted)

        def compute(hidden: Tensor, *leaves: Any) -> Tensor:
            for path, settings in zip(self.paths, tree_unflatten(leaves, tree), strict=True):
                hidden = self.host.block(path, hidden, settings)
            return hidden

        return computed_again(compute, hidden, *leaves) if self.again else compute(hidden, *leaves)


class LayerCall:
    """A layer of this stage in the model's loop. Its mask is the engine's, for documents and for tokens of context ranks."""

    def __init__(self, group: LayerGroup, path: str, block: nn.Module) -> None:
        self.group, self.path = group, path
        self.names = tuple(inspect.signature(type(block).forward).parameters)[2:]

    def __call__(self, hidden: Tensor, *positional: Any, **settings: Any) -> Tensor:
        arguments = dict(zip(self.names, positional, strict=False)) | settings
        return self.group.call(hidden, arguments | {"attention_mask": self.group.host.mask(self.path)})


def passed(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return hidden states unchanged, in place of a layer of another stage."""
    return hidden


class Nothing(nn.Module):
    """Replacement of learned positions, which the stage itself has added: a scalar zero."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class RotaryTables(nn.Module):
    """Replacement of a model's module of rotary tables, which has no parameters.

    transformers chooses frequencies by the largest position in a call (longrope, dynamic), which differs among ranks,
    microbatches and documents. Therefore each call also has the last position of a whole sample. Tables for whole samples are
    cached.

    Args:
        rotary: transformers' module, with values.
        positions: positions of this rank's tokens in samples of one document, (1, tokens).
        length: number of tokens of a whole sample.
    """

    def __init__(self, rotary: nn.Module, positions: Tensor, length: int) -> None:
        super().__init__()
        self._rotary = [rotary]  # outside of the module tree: its buffers belong to no checkpoint
        self.positions, self.length = positions, length
        self.kept: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def forward(self, hidden: Tensor, position_ids: Tensor, *kind: Any) -> tuple[Tensor, ...]:
        if position_ids is not self.positions:
            return self._tables(hidden, position_ids, *kind)
        if kind not in self.kept:
            self.kept[kind] = self._tables(hidden, position_ids, *kind)
        return self.kept[kind]

    @torch.no_grad()
    def _tables(self, hidden: Tensor, places: Tensor, *kind: Any) -> tuple[Tensor, ...]:
        rotary = self._rotary[0].to(hidden.device)
        return tuple(table[:, 1:].contiguous() for table in rotary(hidden, behind_the_last(places, self.length), *kind))


def behind_the_last(places: Tensor, length: int) -> Tensor:
    """Return positions, (samples, 1 + tokens), with the last position of a whole sample before the given ones."""
    return torch.cat((places.new_full((len(places), 1), length - 1), places), 1)


def change_before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Make a module compute with changed hidden states."""
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def cut_heads(attention: nn.Module, hidden: int, heads: int, kv_heads: int, ranks: int) -> None:
    """Set the numbers of heads of one tensor rank in an attention module of transformers. A module has some of these numbers."""
    numbers = {"split_size": hidden // ranks, "num_attention_heads": heads // ranks,
               "num_key_value_groups": heads // max(ranks, kv_heads)}
    for name, value in numbers.items():
        if hasattr(attention, name):
            setattr(attention, name, value)


def result_of(output: Any) -> Tensor:
    """Return the hidden states in a block's output."""
    return cast(Tensor, output if isinstance(output, Tensor) else output[0])
