"""The surroundings of a stage: axes, clock and settings, shared by all stages of a rank."""

from dataclasses import dataclass

from hpc_mp.train.device.precision import Precision
from hpc_mp.train.parallel.capacity import Capacity
from hpc_mp.train.parallel.context import ContextAxis
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.expert_axis import ExpertAxis
from hpc_mp.train.parallel.projection import TensorAxis
from hpc_mp.train.parallel.router_loss import RouterLoss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Terms of a training's loss besides the cross entropy of the next token. An evaluation's loss does not have them.
    ``smoothing``: the share of each label that is spread evenly over all words (arXiv:1512.00567, section 7), as torch's
    ``cross_entropy(label_smoothing=…)`` has it. ``z``: factor of the squared logarithm of the sum of the exponentials of a
    token's logits (arXiv:2204.02311, section 5)."""

    smoothing: float = 0.0
    z: float = 0.0


NO_TERMS = LossTerms()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Axes, clock and settings that all stages of a rank share."""

    tensor: TensorAxis
    context: ContextAxis  # the tokens of a sample on this rank, and their attention to other ranks' tokens
    # experts: the ranks that share the experts of a block; ``capacity``: limit of the choices that experts take
    experts: ExpertAxis
    router_loss: RouterLoss
    capacity: Capacity
    clock: DropoutClock  # the current moment of training, from which dropout draws
    precision: Precision
    recompute: str  # the recomputation setting, see ``recompute``
    compile: bool  # True if blocks and the loss are compiled, see ``compilation``
    loss_terms: LossTerms = NO_TERMS  # additions to the loss of a training
