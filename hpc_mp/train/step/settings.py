"""Settings of an engine."""

from collections.abc import Callable
from dataclasses import dataclass

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.learning_rate import learning_rate
from hpc_mp.layout.schedule import Schedule
from hpc_mp.train.optimizer.optimizer import OptimizerSettings
from hpc_mp.train.optimizer.optimizer_state import HomeMaker, OnDevice
from hpc_mp.train.parallel.surroundings import NO_TERMS, LossTerms
from hpc_mp.train.step.loss_scale import ScaleRule

Rate = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a model's layout and its training."""

    layout: Layout
    schedule: Schedule  # schedule of the layout: the stages of each rank of a pipeline, and the order of its actions
    seed: int  # of dropout
    optimizer: OptimizerSettings
    rate: Rate | None = None  # step, from 0 -> learning rate; None: the rate of the optimizer's settings
    loss_scale: ScaleRule | None = None  # rule of fp16's loss scale; None in other number formats
    home: HomeMaker = OnDevice  # makes the home of optimizer state between two steps
    # router_balance, router_z: weights of the routers' balance loss (a mean over samples) and z loss (a mean over tokens)
    router_balance: float = 0.0
    router_z: float = 0.0
    compile: bool = False  # True if blocks and the loss are compiled, see ``build_stage``
    loss_terms: LossTerms = NO_TERMS  # additions to the loss of a training

    def learning_rate(self, number: int) -> float:
        """Return the learning rate of a step. ``number``: counts from 0."""
        return learning_rate(number, self.optimizer) if self.rate is None else self.rate(number)
