"""The adapters of a stage, attached to its projections."""

from torch import nn

from hpc_mp.layout.models.adapter_weights import DOWN, adapted_weights
from hpc_mp.layout.models.tensor import part_of
from hpc_mp.train.model.transformers_modules import TransformersModules
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.adapter import Adapter, ExpertAdapter, InputDropout
from hpc_mp.train.parallel.experts import ExpertProjection
from hpc_mp.train.parallel.projection import Projection


def attach_adapters(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach the model's adapters to projections and experts."""
    adapters, adapted = model.shape.adapters, adapted_weights(model.family, model.shape)
    if adapters is None:
        return
    tokens = stage.positions
    own = stage.tensor.share(tokens, 0)
    for module in list(stage.modules()):
        if isinstance(module, ExpertProjection) and module.name in adapted:
            _, down, up = adapted[module.name]
            module.adapter = ExpertAdapter(down.name, up.name, adapters.scale, module.last, module.tensor)
        elif isinstance(module, Projection) and (target := module.names[0].removesuffix(".weight")) in adapted:
            _, down, up = adapted[target]
            first = part_of(model.family, model.shape, down, module.tensor.cut).box[-1].start
            dropout = InputDropout(adapters.dropout, f"{target}.{DOWN}", stage.around.clock, tokens, own, first, down.shape[-1])
            module.adapter = Adapter(down.name, up.name, adapters.scale, dropout, module.row, module.tensor)
