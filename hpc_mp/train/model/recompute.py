"""Recomputation: what a forward does not keep is computed once more when the backward comes.

=========== ===================================================== ==========================================================
recompute   kept between a forward and its backward               computed again
=========== ===================================================== ==========================================================
none        everything that a backward needs                      nothing
selective   the same without what is inside the attention core:   the core: products with keys and values, softmax, dropout
            its queries, keys and values are kept                 (Korthikanti et al., arXiv:2205.05198)
full        the input of each block                               each block, just before its backward
every-N     the input of each N-th block of a stage               groups of N blocks one behind the other, as Megatron-LM's
                                                                  ``uniform`` method and SageMaker's ``group_N`` do
=========== ===================================================== ==========================================================

``full`` is ``every-1``; a larger N keeps fewer inputs and holds N blocks at once in the backward. Embedding, last norm and head
are never computed again. The core with torch's fused attention keeps nothing quadratic in the sequence, so that ``selective``
frees little there: its output and one number per row. It pays where attention weights are dropped, which takes our own attention.

Dropout needs no generator's state: its masks are hashes of the moment, which the driver sets before each backward. The tensor
axis sums again what a block's forward sums, on all of its ranks alike. Weight gradients that wait for their W hold recomputed
inputs, so a schedule with W keeps a chunk's inputs of products from I to W.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpc_mp.layout.flat import blocks_together
from hpc_mp.train.parallel.dropout import ATTENTION

Computed = TypeVar("Computed")
FUSED = "hpc_mp_fused"  # torch's own attention, under a name for which transformers makes no masks


def groups_of(blocks: Sequence[str], recompute: str) -> Iterator[Sequence[str]]:
    """The blocks of a stage, by what is computed again together; one by one where nothing is."""
    size = blocks_together(recompute) or 1
    return (blocks[place:place + size] for place in range(0, len(blocks), size))


def attention_name(own: bool, recompute: str) -> str:
    """The attention function that a model's blocks use, in transformers' table.

    Args:
        own: whether it is what torch's fused attention does not compute: weights are dropped, or scores have a cap.
    """
    name = ATTENTION if own else FUSED
    return recomputed_name(name) if recompute == "selective" else name


def computed_again(function: Callable[..., Computed], *tensors: Tensor | None) -> Computed:
    """``function(*tensors)``; of what it computes only the arguments are kept. Without gradients it is just called."""
    return cast(Computed, checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False))


def recomputed_name(name: str) -> str:
    """The name of an attention function beside its own, under which its inside is computed again."""
    return f"hpc_mp_recomputed_{name}"
