"""A model of transformers as the engine's ``StagedModel``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hpc_mp.layout.flat import FlatLayout, StageSpan, rank_units
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import expert_capacity
from hpc_mp.train.model.build_stage import build_stage
from hpc_mp.train.model.encoder_decoder import carried
from hpc_mp.train.model.transformers_modules import TransformersModules
from hpc_mp.train.model.transformers_stage import HIDDEN, TransformersStage
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.stage import Carried


@dataclass(frozen=True, slots=True)
class TransformersModel(TransformersModules):
    """A ``StagedModel``: one tensor crosses between its stages, the hidden states; several if it has an encoder."""

    @property
    def experts(self) -> int:
        return self.shape.experts

    def capacity(self, layout: Layout) -> int | None:
        return expert_capacity(layout.expert_capacity, layout.sequence, self.shape)

    def units(self, layout: Layout, spans: Iterable[StageSpan], tensor: int, expert: int) -> Mapping[str, FlatLayout]:
        return rank_units(layout, self.shape, spans, tensor, expert)

    def module_shapes(self, spans: Iterable[StageSpan]) -> Mapping[str, tuple[int, ...]]:
        whole = self.skeleton()
        layers = {self.family.path(layer): self.block(whole, layer) for span in spans for layer in span.layers}
        return {f"{path}.{name}" if path else name: tuple(parameter.shape) for path, module in {"": whole, **layers}.items()
                for name, parameter in module.named_parameters()}

    def received(self, layout: Layout, stage: int, tokens: int, dtype: torch.dtype) -> Mapping[str, Carried]:
        if self.family.decoder is not None:
            return carried(self, layout, stage, dtype)
        return {HIDDEN: Carried((layout.samples, tokens, self.shape.hidden), dtype)} if stage else {}

    def build(self, span: StageSpan, around: Surroundings) -> TransformersStage:
        return build_stage(self, span, around)
