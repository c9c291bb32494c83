"""A stage of the pipeline: a part of a Hugging Face model, driven by the model's own forward.

Its blocks are Hugging Face's own modules; their parameters are views of flat parameters, which the data axis owns. The module
tree has Hugging Face's names, so that the names of ``named_parameters`` are those of a checkpoint. ``build_stage`` builds it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan
from hpc_mp.layout.models import Family, ModelShape
from hpc_mp.layout.models.family import POSITIONS
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.forward_trace import ALIBI
from hpc_mp.train.model.rotary_tables import RotaryTables
from hpc_mp.train.model.unit_stage import UnitStage, closed, opened
from hpc_mp.train.model.vocabulary import LogitsObjective, NextToken
from hpc_mp.train.parallel.collectives import sum_over
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.masks import Visible, begins_of, first_seen, in_chunks, offsets_of, restarted
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.stage import Batch, Boundary

HIDDEN = "hidden"
Settings = dict[str, Any]  # arguments of a layer besides hidden states
ARGUMENTS = {"token_types": "token_type_ids"}  # an embedding's index -> its name in Hugging Face's forward


@dataclass(slots=True)
class Microbatch:
    """The values that the layers of a stage take beside the arguments of their calls, and those that they leave."""

    received: Tensor | None  # hidden states from the stage before; None on the first stage
    places: Tensor  # positions of this context rank's tokens, (samples or 1, tokens)
    visible: Mapping[int | None, Visible | None]  # window -> what tokens see; None: all before them, or all
    result: Tensor | None = None  # hidden states behind the stage's last layer


class TransformersStage(UnitStage):
    """One stage.

    Args:
        span: its layers, and whether it has the embedding and the head.

    Attributes:
        positions: positions in their sample of this context rank's tokens, (tokens,).
        driver: the model's forward without its head: embeddings, positions and further indexes -> hidden states.
        rotary: the model's rotary tables.
        objective: the loss; only on the last stage.
        microbatch: the current one.
        queries: numbers of this rank's attention heads, by layer.
    """

    driver: Callable[..., Tensor]
    microbatch: Microbatch
    objective: NextToken | LogitsObjective

    def __init__(self, family: Family, shape: ModelShape, span: StageSpan, around: Surroundings) -> None:
        super().__init__(span, around, [*map(family.path, span.layers)])
        self.family, self.shape = family, shape
        self.tensor, self.context = around.tensor, around.context
        self.positions = self.context.positions
        self.whole_samples = self.positions.unsqueeze(0)
        self.all_positions = torch.arange(self.context.sequence, device=self.positions.device)
        self.windows = {path: shape.window_of(layer) for path, layer in zip(self.blocks, span.layers, strict=True)
                        if layer not in family.unattended}
        self.rotary: list[RotaryTables] = []
        self._kept: dict[int | None, Visible | None] = {}  # for samples of one document
        self._noted: list[Settings] = []
        self.queries: dict[str, range] = {}
        self._biases: Tensor | None = None

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

    def layer_calls(self, layers: nn.ModuleList) -> list["LayerCall"]:
        """Return what the model's forward finds in place of its layers: calls of the stage. Other stages' layers pass on what
        they get."""
        calls: list[Callable[..., Tensor]] = [lambda hidden, *_, **__: hidden] * self.shape.layers
        for number, paths in enumerate(self.groups):
            for path in paths:
                names = [*inspect.signature(type(self.get_submodule(path)).forward).parameters][2:]
                calls[int(path.rpartition(".")[2])] = partial(self.called, number, path, names)
        if not self.groups:
            calls[0] = lambda hidden, *_, **__: self._leave(self._enter(hidden))
        return [LayerCall(call, layer, self.family.tuples) for call, layer in zip(calls, cycle(layers), strict=False)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a stage holds besides activations: parameters, positions and rotary tables."""
        yield from super().tensors()
        yield from (self.whole_samples, self.all_positions, *(() if self._biases is None else (self._biases,)))
        yield from (tensor for visible in self._kept.values() if visible for tensor in (visible.first, visible.offsets))
        yield from (table for rotary in self.rotary for tables in rotary.kept.values()
                    for table in ((tables,) if isinstance(tables, Tensor) else tables))

    def forward(self, received: Boundary, batch: Batch, gradient: Tensor | None) -> Boundary | tuple[Tensor, Tensor]:
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
        hidden = self._embed(batch) if self.span.first else received[HIDDEN].detach()  # of others only the shape is used
        self.microbatch = Microbatch(received.get(HIDDEN), places, self._visible(documents, begins, len(hidden)))
        for rotary in self.rotary:
            rotary.places = places
        own = self.tensor.share(places, 1)
        indexes = {ARGUMENTS[name]: self._index(name, batch, own) for name in self.family.lookups.values() if name != POSITIONS}
        rows = self._counted(batch["ids"], begins) if self.span.first and self.shape.first_position else own
        with self.precision.computing():
            hidden = self.driver(inputs_embeds=hidden, position_ids=rows, **indexes)
        result = self.microbatch.result
        self.microbatch.received = self.microbatch.result = None
        return self._finish(hidden, batch, gradient) if result is None else {HIDDEN: result}

    def called(self, group: int, path: str, names: Sequence[str], hidden: Tensor, *positional: Any, **settings: Any) -> Tensor:
        """Take the call of a layer by the model's forward.

        Calls are noted, and computed at the call of a group's last layer. So a group is a unit of recomputation, whatever loop
        calls it. Its mask is the engine's, for documents and for tokens of context ranks.

        Args:
            names: of the layer's arguments behind hidden states.
        """
        if path == self.blocks[0]:
            hidden = self._enter(hidden)
        arguments = dict(zip(names, positional, strict=False)) | settings
        arguments |= {"position_ids": self.microbatch.places} if "position_ids" in arguments else {}
        if path in self.windows:
            visible = self.microbatch.visible[self.windows[path]]
            arguments["attention_mask"] = visible
            if visible is not None and self.family.own_attention:
                arguments["attention_mask"] = visible.whole(hidden.dtype).expand(len(hidden), -1, -1, -1)
        if arguments.get(ALIBI) is not None:
            arguments[ALIBI] = self._alibi(hidden)[[*self.queries[path]]].repeat(len(hidden), 1, 1)
        self._noted.append(arguments)
        paths = self.groups[group]
        if path != paths[-1]:
            return hidden
        noted, self._noted = self._noted, []

        def compute(hidden: Tensor, noted: Sequence[Settings]) -> tuple[Tensor]:
            for path, settings in zip(paths, noted, strict=True):
                hidden = self.block(path, hidden, settings)
            return (hidden,)

        if self.recomputes:  # it has to be given each tensor as an argument
            leaves, tree = tree_flatten(noted)
            hidden, = self.compute(group, lambda hidden, *leaves: compute(hidden, tree_unflatten(leaves, tree)), [hidden], leaves)
        else:
            hidden, = self.compute(group, compute, [hidden], [noted])
        return self._leave(hidden) if path == self.blocks[-1] else hidden

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
        make = self._chunk if self.shape.chunked else self._window
        visible = {window: make(window, documents, begins, samples) for window in {*self.windows.values()}}
        if begins is None:
            self._kept = visible
        return visible

    def _window(self, window: int | None, documents: Tensor | None, begins: Tensor | None, samples: int) -> Visible | None:
        causal, hides = not self.shape.bidirectional, window is not None and window < self.context.sequence
        first = first_seen(begins, window if causal else None, self.all_positions)
        if first is None and (causal or not hides) and not self.family.own_attention:
            return None
        first = torch.zeros_like(self.all_positions).unsqueeze(0) if first is None else first
        return Visible(first, offsets_of(documents, samples, self.context.sequence, self.positions.device), window, causal)

    def _chunk(self, chunk: int | None, documents: Tensor | None, begins: Tensor | None, samples: int) -> Visible | None:
        if chunk is None or chunk >= self.context.sequence:
            return self._window(None, documents, begins, samples)
        documents = in_chunks(documents, begins, chunk, samples, self.all_positions)
        return self._window(None, documents, begins_of(documents, self.all_positions), samples)

    @torch.no_grad()
    def _alibi(self, hidden: Tensor) -> Tensor:
        """Return the biases of all heads for distances in samples, (heads, 1, sequence), as transformers makes them. What is the
        same for all keys of a query has no effect, so that they hold for documents too."""
        if self._biases is None:
            make = import_module(self.family.modules[0]).build_alibi_tensor
            with self.precision.computing():
                self._biases = make(torch.ones_like(self.all_positions).unsqueeze(0), self.shape.heads, hidden.dtype)
        return self._biases

    def _embed(self, batch: Batch) -> Tensor:
        """Return the tokens' embeddings. What the forward does with them before the first layer needs the same units."""
        for unit in self.embedding_units:
            unit.need()
        hidden: Tensor = self.get_submodule(self.family.embedding)(self.context.own(batch["ids"]))
        return opened(self.units_behind, hidden)[0]

    def _index(self, name: str, batch: Batch, own: Tensor) -> Tensor:
        """Return the index of a further embedding for this rank's tokens, zeros if the batch has none."""
        return self.tensor.share(self.context.own(batch[name]), 1) if name in batch else torch.zeros_like(own)

    def _counted(self, ids: Tensor, begins: Tensor | None) -> Tensor:
        """Return the rows of the embedding of positions of this rank's tokens, if padding is not counted."""
        padding = self.shape.first_position - 1
        counted = (ids != padding).long()
        before = counted.cumsum(1) - counted
        row = padding + counted * (1 + before - (0 if begins is None else before.gather(1, begins)))
        return self.tensor.share(self.context.own(row), 1)

    def _enter(self, hidden: Tensor) -> Tensor:
        """Return the input of the first layer, given what the forward made of the embeddings."""
        if self.microbatch.received is not None:
            return self.microbatch.received
        for unit in self.embedding_units:
            unit.release()  # the backward of a lookup needs no parameter
        return closed(self.units_behind, hidden)[0]

    def _leave(self, hidden: Tensor) -> Tensor:
        """Return what the forward goes on with behind the last layer: on the last stage with the last norm."""
        if self.span.last:
            return opened(self.head_units, hidden)[0]
        self.microbatch.result = hidden
        return hidden

    def mean_of_row(self, hidden: Tensor) -> Tensor:
        """Return the mean of each sample's first document in place of the hidden states of all tokens of this rank."""
        total = partial(sum_over, axes=(self.context.axis, *self.tensor.sharers))
        inside = self.tensor.share(self.microbatch.places == self.positions, 1).unsqueeze(-1)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = with_backward(total, total, (hidden * inside).sum(1, keepdim=True, dtype=wide))
        return (sums / total(inside.sum(1, keepdim=True).to(wide))).to(hidden.dtype).expand_as(hidden)

    def _finish(self, hidden: Tensor, batch: Batch, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.family.norm.startswith(f"{self.family.base}."):
            hidden = self.get_submodule(self.family.norm)(hidden)
        for path in self.family.behind_norm:
            hidden = self.get_submodule(path)(hidden)
        if self.family.head_scale != 1.0:
            hidden = hidden * self.family.head_scale
        loss, count = closed(self.head_units, *self.objective(hidden, batch, self.context.own, gradient))
        return loss, count


class LayerCall:
    """A function in place of a layer in the forward of a model, with the attributes of the layer.

    Args:
        tuples: True if the forward takes hidden states out of a tuple.
    """

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module, tuples: bool) -> None:
        self.function, self.layer, self.tuples = function, layer, tuples

    def __call__(self, *tensors: Any, **settings: Any) -> Tensor | tuple[Tensor]:
        hidden = self.function(*(tensors or (settings.pop("hidden_states"),)), **settings)
        return (hidden,) if self.tuples else hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Absent(nn.Module):
    """Replacement of a module that another stage has. Nobody uses what it returns: its input, a zero for an index."""

    def forward(self, *args: Tensor, **settings: Tensor) -> Tensor:
        x = next(iter((*args, *settings.values())))
        return x if x.is_floating_point() and x.dim() > 2 else torch.zeros((), device=x.device)
