"""Settings of an engine, and a replica's share of a step."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.learning_rate import learning_rate
from hpc_mp.layout.schedule import Schedule
from hpc_mp.train.optimizer.optimizer import HomeMaker, OptimizerSettings
from hpc_mp.train.optimizer.optimizer_state import OnDevice
from hpc_mp.train.parallel.dropout import Moment
from hpc_mp.train.pipeline.stage import Batch
from hpc_mp.train.step.loss_scale import ScaleRule, Unscaled

Rate = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a model's layout and its training.

    Attributes:
        schedule: schedule of the layout: the stages of each rank of a pipeline, and the order of its actions.
        seed: seed of dropout.
        rate: step, from 0 -> learning rate; None: the rate of the optimizer's settings.
        loss_scale: rule of fp16's loss scale.
        home: makes the home of optimizer state between two steps.
        router_balance, router_z: weights of the routers' balance loss (a mean over samples) and z loss (a mean over tokens).
        compile: True if blocks and the loss are compiled, see ``compilation``.
    """

    layout: Layout
    schedule: Schedule
    seed: int
    optimizer: OptimizerSettings
    rate: Rate | None = None
    loss_scale: ScaleRule = field(default_factory=Unscaled)
    home: HomeMaker = OnDevice
    router_balance: float = 0.0
    router_z: float = 0.0
    compile: bool = False

    def learning_rate(self, number: int) -> float:
        """Return the learning rate of a step. ``number``: counts from 0."""
        return learning_rate(number, self.optimizer) if self.rate is None else self.rate(number)


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A replica's share of a step.

    Attributes:
        batch: (stage, microbatch) -> the tensors that the stage needs of it, on the device.
        moment: microbatch -> the step and the global positions of its samples.
        labels: number of labels in this share that count in the loss; None: the forward counts them.
        enter: called with the number of a microbatch before each of its forwards; None: not called.
    """

    batch: Callable[[int, int], Batch]
    moment: Callable[[int], Moment]
    labels: int | None
    enter: Callable[[int], None] | None = None
