"""The rows of the table: a layout of ours, and the peers that have it too."""

from dataclasses import dataclass

from workload import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """A layout, and the names of peers in ``with_torch`` and ``with_deepspeed``.

    Attributes:
        ours: our ways; the fastest one stands against the peers.
        ways: all that are measured, besides the plain process.
        tolerance: of losses of the first turn, from those of the plain process. Correct ways differ by 3e-6 in fp32 and 1e-3 in
            bf16; gradients clipped at norm 1 by 6e-3. AdamW hides a constant factor of the gradients.
    """

    layout: Layout
    peers: tuple[str, ...]
    ours: tuple[str, ...] = ("ours",)

    @property
    def ways(self) -> tuple[str, ...]:
        return (*self.ours, *self.peers)

    @property
    def tolerance(self) -> float:
        return 4e-3 if self.layout.precision == "bf16" else 3e-5


PIPELINES = ("torch 1F1B", "torch GPipe", "torch ZBV", "DeepSpeed PipelineModule")
SQUARE = ("torch 1F1B x DDP", "torch 1F1B x DDP + ZeroRedundancyOptimizer", "torch 1F1B x FSDP2", "DeepSpeed PipelineModule")
SCHEDULES = "ours", "ours, zero bubble"
ROWS = {
    "plain, two threads": Row(Layout(threads=2), (), ("plain, two threads",)),
    "fp32 ZeRO-0": Row(Layout(2), ("DDP", "DeepSpeed")),
    "fp32 ZeRO-1": Row(Layout(2, zero=1), ("DDP + ZeroRedundancyOptimizer", "DeepSpeed")),
    "fp32 ZeRO-2": Row(Layout(2, zero=2), ("FSDP2, no reshard", "DeepSpeed")),
    "fp32 ZeRO-3": Row(Layout(2, zero=3), ("FSDP2", "DeepSpeed")),
    "fp32 pp 2": Row(Layout(2, pipeline=2, microbatches=4), PIPELINES, SCHEDULES),
    "fp32 tp 2": Row(Layout(2, tensor=2), ("torch DTensor", "DeepSpeed AutoTP")),
    "fp32 pp 2 x dp 2 ZeRO-1": Row(Layout(4, pipeline=2, zero=1, microbatches=4), SQUARE, SCHEDULES),
    "bf16 ZeRO-1": Row(Layout(2, zero=1, precision="bf16"), ("DeepSpeed",)),
    "bf16 ZeRO-2": Row(Layout(2, zero=2, precision="bf16"), ("FSDP2, no reshard", "DeepSpeed")),
    "bf16 ZeRO-3": Row(Layout(2, zero=3, precision="bf16"), ("FSDP2", "DeepSpeed")),
    "bf16 pp 2": Row(Layout(2, pipeline=2, microbatches=4, precision="bf16"), PIPELINES, SCHEDULES),
}
