"""Bytes of model state per rank: parameters, gradients and optimizer state; activations are not counted here.

With P parameters on a rank of the tensor and pipeline axes, d shards, m bytes of a master and of a gradient sum, c bytes of a
parameter in the compute format, and s numbers of optimizer state per parameter, a rank holds

==== ==================================== ======================== =============
zero parameters                           gradients                optimizer
==== ==================================== ======================== =============
0    c P (+ m P if the formats differ)    m P                      s m P
1    c P (+ m P/d)                        m P                      s m P/d
2    c P (+ m P/d)                        m P/d + one unit's m U   s m P/d
3    m P/d + two units' c U               m P/d + one unit's m U   s m P/d
==== ==================================== ======================== =============

If gradients are summed once per step, ZeRO-2 and 3 hold m P of them like ZeRO-1, because microbatches add up in whole gradients.
With recompute ``every-N``, N + 1 units are gathered instead of two. With expert parallelism, each of a block's two units has its
own d, and U is both of them, because they are gathered and freed together. So bf16 over fp32 masters with AdamW: ZeRO-1 6 + 12/d
bytes per parameter, ZeRO-2 2 + 16/d and a unit, ZeRO-3 16/d and units. The units are those of ``layout/flat.py``, which the
engine allocates, including padding: the counts are equal to the byte.

Offloaded optimizer state counts as bytes of the host or of the disk, and the rank holds the buffers of ``layout/offload.py``
instead. With parameters offloaded, m P/d of them, and c P/d if the formats differ, count as bytes of the host. The buffers, which
have a row for them, count as optimizer bytes. Then units without other shards are also gathered and freed.

Parameters that are not trained, beside adapters, count c P alone, with ZeRO-3 c P/d and two units' c U: a rank holds no masters,
gradients and state of them. Those that the model itself never trains have the format of masters. AdamW's mean of gradients in
bf16 counts 2 bytes in place of m, and streams through buffers too.
"""

from collections import Counter

from hpc_mp.layout.flat import FlatLayout, blocks_together, rank_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.offload import BUFFERS, chunk_elements
from hpc_mp.layout.owners import most_state
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.plan import StateBytes

# precision -> bytes of a master parameter and of a gradient sum, and of a parameter in the compute format
BYTES = {"fp64": (8, 8), "fp32": (4, 4), "tf32": (4, 4), "bf16": (4, 2), "fp16": (4, 2)}


def state_bytes(layout: Layout, shape: ModelShape) -> dict[tuple[int, int], StateBytes]:
    """Return the state of the ranks at (pipeline, tensor) coordinates at the peak of a step, whatever their data coordinate."""
    return {(pipeline, tensor): _bytes(layout, list(units_of(layout, shape, pipeline, tensor).values()), tensor)
            for pipeline in range(layout.degrees.pipeline) for tensor in range(layout.degrees.tensor)}


def units_of(layout: Layout, shape: ModelShape, pipeline: int, tensor: int) -> dict[str, FlatLayout]:
    """Return the flat units of a rank at these coordinates, by name."""
    spans = stage_spans(layout.layers)
    held = [spans[stage] for stage, holder in enumerate(schedule_of(layout).placement) if holder == pipeline]
    return rank_units(layout, shape, held, tensor)


def _bytes(layout: Layout, units: list[FlatLayout], tensor: int) -> StateBytes:
    master, computed = BYTES[layout.precision]
    slots = layout.optimizer_slots
    trained = [unit for unit in units if unit.trained]
    part = sum(unit.part for unit in trained)
    cut = [unit for unit in units if unit.shards > 1]
    parted = [unit for unit in cut if unit.trained] if layout.reduce == "microbatch" else []
    away = "parameters" in layout.offload
    gathered = units if away else cut if layout.zero == 3 else []
    together = 1 + (blocks_together(layout.recompute) or 1)
    inside = sum(unit.part for unit in trained if unit not in gathered) if master == computed else 0  # masters in parameters
    masters = (part - inside) * master + sum(unit.part for unit in gathered if not unit.trained) * computed
    fixed = [unit for unit in units if unit.fixed]
    passing = [unit for unit in gathered if unit.fixed]
    wider = (_whole(fixed, passing, together) + sum(unit.part for unit in passing)) * (master - computed)
    parameters = _whole(units, gathered, together) * computed + wider + (0 if away else masters)
    host = masters + (part * computed if master != computed else 0) if away else 0
    gradients = (sum(unit.part for unit in parted) + _whole(trained, parted, 1)) * master
    optimizer = most_state(layout.optimizer, slots, trained, layout.degrees.tensor, tensor) * master
    optimizer -= len(layout.narrow_slots) * part * (master - BYTES["bf16"][1])
    state_away = "optimizer" in layout.offload
    buffers = BUFFERS * chunk_elements(unit.part for unit in trained) * (slots + away) * master \
        if away or state_away or layout.narrow_slots else 0
    if not state_away:
        return StateBytes(parameters, gradients, optimizer + buffers, host=host)
    if layout.offload_directory is None:
        return StateBytes(parameters, gradients, buffers, host=host + optimizer)
    return StateBytes(parameters, gradients, buffers, host=host, disk=optimizer)


def _whole(units: list[FlatLayout], passing: list[FlatLayout], limit: int) -> int:
    """Return the elements of units that a rank has whole at once; of the passing units only those of ``limit`` blocks."""
    blocks: Counter[str] = Counter()
    for unit in passing:
        blocks[unit.block] += unit.padded
    return sum(unit.padded for unit in units if unit not in passing) + sum(size for _, size in blocks.most_common(limit))
