"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and a model's shape; no torch.

The peak is the largest of some moments: a forward's end and its loss, a backward's beginning, and its first block. A moment holds
the state, the activations of the chunks in flight, and the temporaries of what runs. What blocks keep, and what they need while
they run, are tables by the kinds of norms, attention and MLPs, derived from the modules of transformers and the engine.
``counted`` is what a dry run counts (``hpc_mp.train.dry_run``), for jobs without dropout, in eager mode, of samples of one
document; benchmarks/footprint_check.py compares both.

``libraries`` is an estimate: a CUDA context with workspaces (1 GiB, as in ``dry_run.CONTEXT``), the buffers of NCCL's
communicators (``dry_run.host``), and gaps between allocations: 6 % of what comes and goes. Measured jobs on A100 need 5 to 9 GB
besides what formulas count, with everything that nvidia-smi shows (arXiv:2211.05100 and the logs of its training).
"""

from dataclasses import dataclass

from hpc_mp.layout.flat import blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.activations import chunk_counts
from hpc_mp.planner.memory import BYTES, state_bytes

CONTEXT = 1 << 30  # bytes of a CUDA context with its kernels and workspaces, see dry_run.CONTEXT
CONNECTION = (1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16  # bytes of a connection of NCCL, see dry_run.host
COLLECTIVE, CHANNEL = 2 * 16, 4  # connections of a communicator for collectives, and between stages
SLACK = 0.06  # share of activations and temporaries that is lost in gaps between allocations
CHUNK = 1 << 26  # logits that are there at once, see train.model.vocabulary


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a rank at its peak, and those of the host. ``messages``: received from other stages, or sent and not arrived."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    working: int
    messages: int
    libraries: int
    host: int

    @property
    def counted(self) -> int:
        """What a dry run counts."""
        return (self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered + self.working
                + self.messages)

    @property
    def total(self) -> int:
        return self.counted + self.libraries


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, chunks, schedule, spans = state_bytes(layout, shape), chunk_counts(layout), schedule_of(layout), stage_spans(
        layout.layers)
    master, c = BYTES[layout.precision]
    wide, degrees, family = max(4, c), layout.degrees, family_of(shape)
    all_tokens = layout.samples * layout.sequence // degrees.context
    tokens = -(-all_tokens // degrees.tensor) if layout.sequence_parallel else all_tokens
    heads, h = heads_of(shape.heads, shape.kv_heads, degrees.tensor, 0), shape.hidden
    q, kv = len(heads.query) * shape.head_dim, len(heads.kv) * shape.head_dim
    inner = -(-shape.intermediate // degrees.tensor)
    norm = tokens * h * (wide + c)
    mlp = (4 if shape.gated_mlp else 5) * all_tokens * inner * c
    kept = 2 * norm + all_tokens * (2 * h * c + c * (2 * q + 2 * kv) + wide * len(heads.query)) + mlp
    together = blocks_together(layout.recompute)
    results = []
    for pipeline in range(degrees.pipeline):
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        stages = [stage for stage, holder in enumerate(schedule.placement) if holder == pipeline]
        blocks = max(len(spans[stage].layers) for stage in stages)
        last = len(spans) - 1 in stages
        chunk = blocks * kept if together is None else -(-blocks // together) * tokens * h * c
        activations = chunks[pipeline].here * chunk + (together or 0) * kept
        product = 0 if c == master else c * h * inner
        working, logits = 2 * all_tokens * inner * c + product + 2 * tokens * h * c, 0
        if last:
            width = -(-(shape.classes or shape.vocabulary) // degrees.tensor)
            rows = min(all_tokens, max(1, CHUNK // width))
            logits = 2 * rows * width * (wide + c)
            activations, working = activations + norm + tokens * h * c, tokens * h * c
        messages = 0 if degrees.pipeline == 1 else chunks[pipeline].held * tokens * h * c
        communicators = 1 + sum(size > 1 for size in (degrees.tensor, degrees.context, layout.state_degree, degrees.expert))
        libraries = CONTEXT + (communicators * COLLECTIVE + (degrees.pipeline > 1) * 4 * CHANNEL) * CONNECTION
        libraries += int(SLACK * (activations + working + logits))
        results.append(Footprint(state.parameters, state.gradients, state.optimizer, activations, logits, 0, working, messages,
                                 libraries, state.host))
    assert family.base
    return tuple(results)
