"""What the stages of a rank share."""

from dataclasses import dataclass

from hpc_mp.train.engine.capacity import Capacity
from hpc_mp.train.engine.context import ContextAxis
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.expert_axis import ExpertAxis
from hpc_mp.train.engine.precision import Precision
from hpc_mp.train.engine.projection import TensorAxis
from hpc_mp.train.engine.router_loss import RouterLoss


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the stages of a rank share.

    Attributes:
        context: which tokens of a sample attention sees on this rank, and how they attend to the others.
        experts: the ranks that share out the experts of a block; ``capacity``: what these take.
        router_loss: what routers add to the loss.
        clock: tells dropout where training is.
        recompute: which blocks are computed again in the backward, see ``recompute``.
        compile: whether blocks and the loss are compiled, see ``compilation``.
    """

    tensor: TensorAxis
    context: ContextAxis
    experts: ExpertAxis
    router_loss: RouterLoss
    capacity: Capacity
    clock: DropoutClock
    precision: Precision
    recompute: str
    compile: bool
