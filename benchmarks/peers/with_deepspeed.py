"""DeepSpeed's ZeRO, PipelineModule and AutoTP, on DeepSpeed 0.19."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor
from workload import SAMPLES, Layout, Step, adamw, batch_of, layers_of, llama_model, loss_of


class CutPipeline(PipelineModule):
    """A pipeline of two with a cut of ours: DeepSpeed's own methods do not know what a head costs."""

    def __init__(self, layers: list[Any], first: int) -> None:
        self.first, self.count = first, len(layers)
        super().__init__(layers, num_stages=2, loss_fn=loss_of)

    def _partition_layers(self, method: str) -> None:
        self.parts = [0, self.first, self.count]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])


def started(model: Any, layout: Layout) -> Any:
    """Start the engine. It clips gradients at 1 unless told otherwise; tensor ranks count as data ranks in its batch size."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // layout.data // layout.microbatches,
        "gradient_accumulation_steps": layout.microbatches, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": layout.zero}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": layout.precision == "bf16"}, "steps_per_print": 10**9, "wall_clock_breakdown": False}
    if layout.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tensor}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    return engine


def unpipelined(layout: Layout) -> Step:
    deepspeed.init_distributed("gloo", verbose=False)
    engine = started(llama_model(), layout)
    replica = 0 if layout.tensor > 1 else dist.get_rank()

    def step(number: int) -> Tensor:
        ids, labels = batch_of(number, replica, layout.data)
        loss = loss_of(engine(input_ids=ids, use_cache=False).logits, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def pipelined(layout: Layout) -> Step:
    deepspeed.init_distributed("gloo", verbose=False)
    engine = started(CutPipeline(*layers_of(llama_model())), layout)
    replica = engine.grid.get_data_parallel_rank()

    def step(number: int) -> Tensor:
        ids, labels = (part.chunk(layout.microbatches) for part in batch_of(number, replica, layout.data))
        return engine.train_batch(zip(ids, labels, strict=True))

    return step


WAYS: dict[str, Callable[[Layout], Step]] = {
    "DeepSpeed": unpipelined, "DeepSpeed AutoTP": unpipelined, "DeepSpeed PipelineModule": pipelined}
