"""Forward and backward passes of batches of one shape: a rank's stages, built for that shape, and the pipeline that runs them.

Passes of several shapes share the parameters of a rank, and with them its gradients and its optimizer.
"""

from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Residency, residency
from hpc_mp.train.device.precision import PRECISIONS
from hpc_mp.train.parallel.capacity import Capacity
from hpc_mp.train.parallel.context import ContextAxis
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.parallel.projection import TensorAxis, WeightGradients
from hpc_mp.train.parallel.router_loss import RouterLoss
from hpc_mp.train.parallel.sequence import SequenceAxis
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.pipeline import Pipeline
from hpc_mp.train.pipeline.stage import StagedModel
from hpc_mp.train.step.settings import EngineSettings


class Passes:
    """Passes of batches of one shape.

    Args:
        model: builds the stages; a model that depends on the shape of a batch was made for this shape.
        layout: its samples per microbatch and sequence length are those of this shape.
        data: the data axis, which owns the parameters of the rank.

    Attributes:
        router_loss: losses of the routers.
        capacity: limit of the choices that experts take.
    """

    def __init__(self, model: StagedModel, layout: Layout, settings: EngineSettings, groups: Groups, data: DataAxis) -> None:
        schedule, device = settings.schedule, data.slabs.device
        context = ContextAxis(groups.context, layout.context_method, layout.sequence, device)
        along = groups.tensor, layout.tensor_modules, WeightGradients()
        tensor = SequenceAxis(*along, len(context.positions)) if layout.sequence_parallel else TensorAxis(*along)
        batch = layout.samples * layout.microbatches * layout.degrees.data  # the weights are those of means over the global batch
        self.router_loss = RouterLoss(settings.router_balance / batch, settings.router_z / (batch * layout.sequence),
                                      layout.samples, layout.sequence, device)
        self.capacity = Capacity(model.capacity(layout), layout.samples, device)
        precision = PRECISIONS[layout.precision]
        around = Surroundings(tensor, context, ExpertAxis(groups.expert, model.experts), self.router_loss, self.capacity,
                              DropoutClock(settings.seed), precision, layout.recompute, settings.compile, settings.loss_terms)
        spans = stage_spans(layout.layers)
        stages = {stage: model.build(spans[stage], around) for stage in data.stages}
        for stage, built in stages.items():
            built.adopt({unit.layout.unit: unit for unit in data.stages[stage]})
        tokens = len(tensor.share(context.positions, 0))
        boundaries = [model.received(layout, stage, tokens, precision.compute) for stage in range(layout.stages)]
        horizon, actions = layout.offload_horizon, schedule.ranks[groups.pipeline]
        self.pipeline = Pipeline(stages, boundaries, data, groups, around, schedule,
                                 Residency() if horizon is None else residency(actions, horizon))
