"""The surroundings of a stage: axes, clock and settings, shared by all stages of a rank."""

from dataclasses import dataclass

from torch import Tensor

from hpc_mp.train.device.precision import Precision
from hpc_mp.train.parallel.capacity import Capacity
from hpc_mp.train.parallel.context import ContextAxis
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.projection import TensorAxis
from hpc_mp.train.parallel.router_loss import RouterLoss


@dataclass(slots=True)
class LossGradient:
    """The gradient that the summed loss of the last stage will get in its backward, a scalar; the pipeline sets it before the
    forward. None: no backward follows."""

    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Terms of a training's loss besides the cross entropy of the next token. An evaluation's loss does not have them.

    Attributes:
        smoothing: the share of each label that is spread evenly over all words (arXiv:1512.00567, section 7), as torch's
            ``cross_entropy(label_smoothing=…)`` has it.
        z: factor of the squared logarithm of the sum of the exponentials of a token's logits (arXiv:2204.02311, section 5).
    """

    smoothing: float = 0.0
    z: float = 0.0


NO_TERMS = LossTerms()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Axes, clock and settings that all stages of a rank share.

    Attributes:
        context: the tokens of a sample on this rank, and their attention to other ranks' tokens.
        experts: the ranks that share the experts of a block; ``capacity``: limit of the choices that experts take.
        router_loss: the losses of routers.
        loss_terms: additions to the loss of a training.
        loss_gradient: what the loss is multiplied with, for an objective that computes its gradient in the forward.
        clock: the current moment of training, from which dropout draws.
        recompute: the recomputation setting, see ``recompute``.
        compile: True if blocks and the loss are compiled, see ``compilation``.
    """

    tensor: TensorAxis
    context: ContextAxis
    experts: ExpertAxis
    router_loss: RouterLoss
    capacity: Capacity
    loss_gradient: LossGradient
    clock: DropoutClock
    precision: Precision
    recompute: str
    compile: bool
    loss_terms: LossTerms = NO_TERMS
