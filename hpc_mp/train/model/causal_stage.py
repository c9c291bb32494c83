"""A stage of the pipeline: a part of a Hugging Face model, driven by the model's own forward.

Its blocks are Hugging Face's own modules; their parameters are views of flat parameters, which the data axis owns. The module
tree has Hugging Face's names, so that the names of ``named_parameters`` are those of a checkpoint. ``build_stage`` builds it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan
from hpc_mp.layout.models import Family, ModelShape
from hpc_mp.layout.models.family import POSITIONS
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.layers import Driver, RotaryTables, Settings, result_of
from hpc_mp.train.model.logits import LogitsObjective
from hpc_mp.train.model.vocabulary import NextToken, VocabularyEmbedding
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.experts import ExpertProjection
from hpc_mp.train.parallel.masks import document_mask, first_seen, restarted
from hpc_mp.train.parallel.projection import Projection
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.parallel.unshard import Prefetch, unsharded
from hpc_mp.train.pipeline.stage import Batch, Boundary

HIDDEN = "hidden"


class CausalStage(nn.Module):
    """One stage.

    Args:
        span: its layers, and whether it has the embedding and the head.
        groups: paths of its layers, in groups that are recomputed together.

    Attributes:
        positions: positions in their sample of this context rank's tokens, (tokens,).
        driver: the model's forward; ``build_stage`` sets it.
        rotary: one module of rotary tables, or none; outside of the module tree, because it has no parameters.
        objective: the loss; only on the last stage.
    """

    driver: Driver
    objective: NextToken | LogitsObjective

    def __init__(self, family: Family, shape: ModelShape, span: StageSpan, groups: Sequence[Sequence[str]],
                 around: Surroundings) -> None:
        super().__init__()
        self.family, self.shape, self.span, self.groups = family, shape, span, groups
        self.tensor, self.context, self.precision = around.tensor, around.context, around.precision
        self.positions = self.context.positions
        self.windows = {f"{family.blocks}.{layer}": shape.window_of(layer) for layer in span.layers}
        self.whole_samples = self.positions.unsqueeze(0)
        self.rotary: list[RotaryTables] = []
        self.units: dict[str, Unit] = {}
        self.gathered: list[tuple[list[Unit], Prefetch]] = []  # units of each group, and those to prefetch with it
        self.embedded: list[Unit] = []  # units of the embedding; ``behind``: of the modules behind it
        self.behind: list[Unit] = []
        self._masks: dict[int | None, Tensor | None] = {}  # by window, for the current microbatch
        self._kept_masks: dict[int | None, Tensor | None] = {}  # by window, for samples of one document

    def graft(self, path: str, module: nn.Module) -> None:
        """Attach a module at its Hugging Face path."""
        *parents, leaf = path.split(".")
        node: nn.Module = self
        for name in parents:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node.get_submodule(name)
        node.add_module(leaf, module)

    def adopt(self, units: Mapping[str, Unit]) -> None:
        """Replace the parameters of transformers' modules by those of this stage's units."""
        self.units = dict(units)
        parameters = {name: parameter for unit in self.units.values() for name, parameter in unit.parameters.items()}
        sinks = {name: sink for unit in self.units.values() for name, sink in unit.sinks.items()}
        others = [name for name, _ in self.named_parameters()]
        owned: set[str] = set()
        for module in self.modules():
            if isinstance(module, Projection | ExpertProjection | VocabularyEmbedding):
                module.adopt(parameters, sinks)
                owned |= module.owned
        for name in others:
            parent, leaf = name.rsplit(".", 1)
            self.get_submodule(parent).register_parameter(leaf, parameters[name])
        for unit in units.values():
            for name in unit.parameters.keys() - owned:
                unit.collect(name)
        self.embedded = [units[name] for name in (TIED, EMBEDDING) if name in units]
        self.behind = [unit for unit in self.embedded if any(map(self.family.is_behind_embedding, unit.parameters))]
        several = [[unit for unit in units.values() if unit.layout.block in paths] for paths in self.groups]
        first = [[unit for unit in units.values() if unit.layout.block in paths[:1]] for paths in self.groups]
        self.gathered = [(group, Prefetch(behind, before)) for group, before, behind in zip(
            several, [[], *first], [*first[1:], []], strict=False)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a stage holds besides activations: parameters, masks, positions and rotary tables."""
        yield from (unit.whole for unit in self.units.values())
        yield self.whole_samples
        yield from (mask for mask in self._kept_masks.values() if mask is not None)
        yield from (table for rotary in self.rotary for tables in rotary.kept.values() for table in tables)

    def forward(self, received: Boundary, batch: Batch) -> Boundary | tuple[Tensor, Tensor]:
        """Compute this context rank's tokens of a microbatch.

        Args:
            received: hidden states from the stage before; empty on the first stage.
            batch: whole samples, (batch, sequence). ``ids`` on the first stage, with the indexes of the family's further
                embeddings; ``labels``, already shifted, on the last stage. ``begins`` on all stages: the place in its sample at
                which each token's document begins. Tokens attend to their own document, in which positions count from 0.
                Without it every sample is one document.
        """
        begins = batch.get("begins")
        places = self.whole_samples if begins is None else restarted(self.positions, begins)
        hidden = self._embed(batch, places) if self.span.first else received[HIDDEN]
        if self.span.layers:
            self._see(begins, hidden.dtype)
        hidden = self.driver(hidden, places)
        if not self.span.last:
            return {HIDDEN: hidden}
        return self._finish(hidden, batch)

    def block(self, path: str, hidden: Tensor, settings: Settings) -> Tensor:
        """Compute one layer, in ``Precision.computing``, which a recomputation does not inherit from the backward."""
        with profiled(path), self.precision.computing():
            return result_of(self.get_submodule(path)(hidden, **settings))

    def mask(self, path: str) -> Tensor | None:
        return self._masks[self.windows[path]]

    def around(self, group: int, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute a group of layers with its parameters unsharded.

        The next group's parameters are prefetched at its beginning; in the backward, those of the group before.
        """
        return unsharded(*self.gathered[group], lambda hidden: (compute(hidden),), hidden)[0]

    @torch.no_grad()
    def _see(self, begins: Tensor | None, dtype: torch.dtype) -> None:
        """Set the masks of the layers. Attention without a mask is causal or bidirectional by itself."""
        if begins is None and self._kept_masks:
            self._masks = self._kept_masks
            return
        masks, make = {}, document_mask if self.shape.bidirectional else self.context.mask
        for window in set(self.windows.values()):
            first = first_seen(begins, window, self.positions)
            masks[window] = None if first is None else make(first, dtype)
        self._masks = masks
        if begins is None:
            self._kept_masks = masks

    def _embed(self, batch: Batch, places: Tensor) -> Tensor:
        def behind(hidden: Tensor) -> tuple[Tensor]:
            for path in self.family.behind_embedding:
                hidden = self.get_submodule(path)(hidden)
            return (hidden,)

        for unit in self.embedded:
            unit.need()
        hidden: Tensor = self.get_submodule(self.family.embedding)(self.context.own(batch["ids"]))
        for path, name in self.family.lookups.items():
            hidden = hidden + self.get_submodule(path)(self.tensor.share(self._index(name, batch, places), 1))
        for unit in self.embedded:
            if unit not in self.behind:
                unit.release()  # the backward of a lookup needs no parameter
        return unsharded(self.behind, Prefetch(), behind, hidden)[0]

    def _index(self, name: str, batch: Batch, places: Tensor) -> Tensor:
        """Return the indexes with which a further embedding looks up this rank's tokens."""
        if name == POSITIONS:
            return places
        return self.context.own(batch[name] if name in batch else torch.zeros_like(batch["ids"]))

    def _finish(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        def objective(hidden: Tensor) -> tuple[Tensor, Tensor]:
            return self.objective(self.get_submodule(self.family.norm)(hidden), batch, self.context.own)

        loss, count = unsharded([self.units[name] for name in (TIED, HEAD) if name in self.units], Prefetch(), objective, hidden)
        return loss, count
