"""The adapters of a stage, attached to its projections."""

from torch import nn

from hpc_mp.layout.models.adapter_weights import DOWN, adapted_weights
from hpc_mp.train.model.transformers_modules import TransformersModules
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.adapter import Adapter, InputDropout
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
            _, *factors = adapted[module.name]
            pair = (ExpertProjection(factor.name, module.last, module.tensor) for factor in factors)
            module.adapter = Adapter(adapters.scale, nn.Identity(), *pair)
        elif isinstance(module, Projection) and (target := module.names[0].removesuffix(".weight")) in adapted:
            _, *factors = adapted[target]
            projections = [Projection(factor.name, None, transposed=False, row=False, tensor=module.tensor) for factor in factors]
            for projection in projections:
                projection.last = module.row
            inputs = factors[0].shape[-1]
            first = module.tensor.part(inputs)[0] if module.row else 0
            dropout = InputDropout(adapters.dropout, f"{target}.{DOWN}", stage.around.clock, tokens, own, first, inputs)
            module.adapter = Adapter(adapters.scale, dropout, *projections)
