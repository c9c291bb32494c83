"""A model's sheet: what a reader of transformers' code found out about a model that no family's table describes. No torch.

``hpc_mp.train.model.reader`` writes it, once for a configuration and a release of transformers; it is a JSON file, from which the
control half makes the same ``Family`` and ``ModelShape`` as from a table.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.fields import DROPOUT
from hpc_mp.layout.models.shape import ModelShape

NO_PLAN = "transformers has no plan of tensor parallelism for it"
CUT_WITH = {"fc2": "fc1"}  # projections of an MLP that is no module of its own


@dataclass(frozen=True, slots=True)
class Sheet:
    """A model as it was read.

    Attributes:
        sizes: those of ``ModelShape``.
        module: the module of transformers that has its code.
        dropouts: fields of its configuration that hold a dropout probability.
        kinds: of every layer, the number of its weights in ``blocks``.
        regions: modules of a block that tensor ranks cut as a whole; others are whole on every rank. ``attention`` may be among
            them.
        whole: module of a block -> the reason why it is not cut.
        experts, router, apart: as in ``Family``.
        unattended: layers without an attention that the engine knows: mixers of tokens of another kind.
        needs_samples, needs_tokens, own_attention, selected, drops_by, dropout: as in ``Family``.
        head_scale: what hidden states are multiplied with before the head, or logits behind it.
        embeddings, norm, head: weights around the blocks, by full name.
    """

    transformers: str
    module: str
    architecture: str
    sizes: dict[str, Any]
    dropouts: tuple[str, ...]
    embedding: str
    layers: str
    norm_module: str
    head_module: str
    rotary: tuple[str, ...]
    before: tuple[str, ...]
    attention: str
    regions: tuple[str, ...]
    whole: dict[str, str]
    experts: str | None
    router: str
    apart: tuple[str, ...]
    unattended: tuple[int, ...]
    tuples: bool
    needs_samples: str
    needs_tokens: str
    own_attention: bool
    selected: dict[str, str]
    drops_by: str
    dropout: float
    head_scale: float
    kinds: tuple[int, ...]
    blocks: tuple[tuple[Weight, ...], ...]
    embeddings: tuple[Weight, ...]
    norm: tuple[Weight, ...]
    head: tuple[Weight, ...]


FORMAT = TypeAdapter(Sheet)


@dataclass(frozen=True, slots=True)
class ReadShape(ModelShape):
    """The shape of a model that was read, and its family, for which no table stands."""

    family: Family = field(kw_only=True, compare=False, repr=False)


def shape_of(sheet: Sheet) -> ReadShape:
    """Return the shape of a model that was read."""
    top = sheet.attention.partition(".")[0]
    mlp = next((region for region in sheet.regions if region != top), "mlp")
    apart = {*(() if top in sheet.regions else (sheet.attention,)), mlp} - {*sheet.regions}
    family = Family(
        model_type=sheet.sizes["model_type"], architecture=sheet.architecture, code=sheet.module,
        fields=dict.fromkeys(sheet.dropouts, DROPOUT), read=lambda _: shape_of(sheet),
        embedding=sheet.embedding, blocks=sheet.layers, norm=sheet.norm_module, head=sheet.head_module,
        rotary=sheet.rotary, behind_embedding=sheet.before,
        attention=sheet.attention, mlp=mlp, whole=dict.fromkeys(apart, NO_PLAN) | sheet.whole,
        cut_with={name: other for name, other in CUT_WITH.items() if other in sheet.regions},
        experts=sheet.experts, router=sheet.router, apart=sheet.apart,
        block_weights=partial(_block, sheet), alike=False, unattended=frozenset(sheet.unattended), tuples=sheet.tuples,
        needs_samples=sheet.needs_samples, needs_tokens=sheet.needs_tokens,
        own_attention=sheet.own_attention, selected=sheet.selected, drops_by=sheet.drops_by, dropout=sheet.dropout,
        head_scale=sheet.head_scale,
        embedding_weights=lambda _: sheet.embeddings, norm_weights=lambda _: sheet.norm, head_weights=lambda _: sheet.head)
    sizes: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in sheet.sizes.items()}
    return ReadShape(**sizes, family=family)


def _block(sheet: Sheet, _: ModelShape, layer: int) -> tuple[Weight, ...]:
    return sheet.blocks[sheet.kinds[layer]]
