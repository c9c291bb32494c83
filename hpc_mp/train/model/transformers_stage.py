"""A stage of the pipeline: a part of a Hugging Face model, driven by the model's own forward.

Its blocks are Hugging Face's own modules; their parameters are views of flat parameters, which the data axis owns. The module
tree has Hugging Face's names, so that the names of ``named_parameters`` are those of a checkpoint. ``build_stage`` builds it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan
from hpc_mp.layout.models import Family, ModelShape
from hpc_mp.layout.models.family import POSITIONS
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.logits import LogitsObjective
from hpc_mp.train.model.rotary_tables import RotaryTables
from hpc_mp.train.model.unit_stage import Prefetch, UnitStage, unsharded
from hpc_mp.train.model.vocabulary import NextToken
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.masks import Visible, begins_of, first_seen, offsets_of, restarted
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.stage import Batch, Boundary

HIDDEN = "hidden"
Settings = dict[str, Any]  # arguments of a layer besides hidden states


class TransformersStage(UnitStage):
    """One stage.

    Args:
        span: its layers, and whether it has the embedding and the head.

    Attributes:
        positions: positions in their sample of this context rank's tokens, (tokens,).
        driver: the model's forward without its head: hidden states and positions -> hidden states.
        rotary: the model's rotary tables; None if it has none.
        objective: the loss; only on the last stage.
        visible: window -> what tokens of the current microbatch see; None: all before them, or all.
    """

    driver: Callable[[Tensor, Tensor], Tensor]
    objective: NextToken | LogitsObjective

    def __init__(self, family: Family, shape: ModelShape, span: StageSpan, around: Surroundings) -> None:
        super().__init__(span, around, [f"{family.blocks}.{layer}" for layer in span.layers])
        self.family, self.shape = family, shape
        self.tensor, self.context = around.tensor, around.context
        self.positions = self.context.positions
        self.whole_samples = self.positions.unsqueeze(0)
        self.all_positions = torch.arange(self.context.sequence, device=self.positions.device)
        self.windows = {path: shape.window_of(layer) for path, layer in zip(self.blocks, span.layers, strict=True)}
        self.rotary: RotaryTables | None = None
        self.visible: dict[int | None, Visible | None] = {}
        self._kept: dict[int | None, Visible | None] = {}  # for samples of one document
        self._noted: list[Settings] = []

    def adopt(self, units: Mapping[str, Unit]) -> None:
        super().adopt(units)
        self.head_units, self.embedding_units = self.units_of((TIED, HEAD)), self.units_of((TIED, EMBEDDING))
        self.units_behind = [unit for unit in self.embedding_units if any(map(self.family.is_behind_embedding, unit.parameters))]

    def graft(self, path: str, module: nn.Module) -> None:
        """Attach a module at its Hugging Face path."""
        *parents, leaf = path.split(".")
        node: nn.Module = self
        for name in parents:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node.get_submodule(name)
        node.add_module(leaf, module)

    def layer_calls(self) -> list[Callable[..., Tensor]]:
        """Return what the model's forward calls in place of its layers: those of other stages return their input."""
        calls: list[Callable[..., Tensor]] = [_passed] * self.shape.layers
        for number, paths in enumerate(self.groups):
            for path in paths:
                names = [*inspect.signature(type(self.get_submodule(path)).forward).parameters][2:]
                calls[int(path.rpartition(".")[2])] = partial(self.called, number, path, names)
        return calls

    def drive_with(self, base: nn.Module) -> None:
        """Let the forward of a model without its head drive the stage."""
        def drive(hidden: Tensor, positions: Tensor) -> Tensor:
            arguments = {self.family.hidden_argument: hidden, "position_ids": positions, "use_cache": False}
            return cast(Tensor, base(**arguments).last_hidden_state)

        self.driver = drive

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a stage holds besides activations: parameters, positions and rotary tables."""
        yield from super().tensors()
        yield from (self.whole_samples, self.all_positions)
        yield from (tensor for visible in self._kept.values() if visible for tensor in (visible.first, visible.offsets))
        yield from (table for tables in (self.rotary.kept.values() if self.rotary else ()) for table in tables)

    def forward(self, received: Boundary, batch: Batch) -> Boundary | tuple[Tensor, Tensor]:
        """Compute this context rank's tokens of a microbatch.

        Args:
            received: hidden states from the stage before; empty on the first stage.
            batch: whole samples, (batch, sequence). ``ids`` on the first stage, with the indexes of the family's further
                embeddings; ``labels``, already shifted, on the last stage. ``documents`` on all stages: where documents begin
                (see ``masks``). Tokens attend to their own document, in which positions count from 0. Without it every sample is
                one document.
        """
        documents = batch.get("documents")
        begins = None if documents is None else begins_of(documents, self.all_positions)
        places = self.whole_samples if begins is None else restarted(self.positions, begins)
        hidden = self._embed(batch, places) if self.span.first else received[HIDDEN]
        self.visible = self._visible(documents, begins, len(hidden))
        hidden = self.driver(hidden, places)
        return self._finish(hidden, batch) if self.span.last else {HIDDEN: hidden}

    def called(self, group: int, path: str, names: Sequence[str], hidden: Tensor, *positional: Any, **settings: Any) -> Tensor:
        """Take the call of a layer by the model's forward.

        Calls are noted, and computed at the call of a group's last layer. So a group is a unit of recomputation, whatever loop
        calls it. Its mask is the engine's, for documents and for tokens of context ranks.

        Args:
            names: of the layer's arguments behind hidden states.
        """
        arguments = dict(zip(names, positional, strict=False)) | settings
        self._noted.append(arguments | {"attention_mask": self.visible[self.windows[path]]})
        paths = self.groups[group]
        if path != paths[-1]:
            return hidden
        leaves, tree = tree_flatten(self._noted)
        self._noted = []

        def compute(hidden: Tensor, *leaves: Any) -> tuple[Tensor]:
            for path, settings in zip(paths, tree_unflatten(leaves, tree), strict=True):
                hidden = self.block(path, hidden, settings)
            return (hidden,)

        return self.compute(group, compute, [hidden], leaves)[0]

    def block(self, path: str, hidden: Tensor, settings: Settings) -> Tensor:
        """Compute one layer, in ``Precision.computing``, which a recomputation does not inherit from the backward."""
        with profiled(path), self.precision.computing():
            output = self.get_submodule(path)(hidden, **settings)
        return cast(Tensor, output if isinstance(output, Tensor) else output[0])

    @torch.no_grad()
    def _visible(self, documents: Tensor | None, begins: Tensor | None, samples: int) -> dict[int | None, Visible | None]:
        """Return what tokens see, by window. Attention without it is causal or bidirectional by itself."""
        if begins is None and self._kept:
            return self._kept
        offsets = offsets_of(documents, samples, self.context.sequence, self.positions.device)
        causal = not self.shape.bidirectional
        first = {window: first_seen(begins, window, self.all_positions) for window in {*self.windows.values()}}
        visible = {window: None if token is None else Visible(token, offsets, window, causal) for window, token in first.items()}
        if begins is None:
            self._kept = visible
        return visible

    def _embed(self, batch: Batch, places: Tensor) -> Tensor:
        def compute(hidden: Tensor) -> tuple[Tensor]:
            for path in self.family.behind_embedding:
                hidden = self.get_submodule(path)(hidden)
            return (hidden,)

        for unit in self.embedding_units:
            unit.need()
        hidden: Tensor = self.get_submodule(self.family.embedding)(self.context.own(batch["ids"]))
        for path, name in self.family.lookups.items():
            index = places
            if name != POSITIONS:
                index = self.context.own(batch[name] if name in batch else torch.zeros_like(batch["ids"]))
            hidden = hidden + self.get_submodule(path)(self.tensor.share(index, 1))
        for unit in self.embedding_units:
            if unit not in self.units_behind:
                unit.release()  # the backward of a lookup needs no parameter
        return unsharded(self.units_behind, Prefetch(), compute, hidden)[0]

    def _finish(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        norm = self.get_submodule(self.family.norm)
        loss, count = unsharded(self.head_units, Prefetch(),
                                lambda hidden: self.objective(norm(hidden), batch, self.context.own), hidden)
        return loss, count


def _passed(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return hidden states unchanged, in place of a layer of another stage."""
    return hidden


class NoPositions(nn.Module):
    """Replacement of learned positions, which the stage itself has added: a scalar zero."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)
