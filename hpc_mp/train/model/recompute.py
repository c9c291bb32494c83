"""Recomputation: the backward recomputes the activations that a forward has not kept.

=========== ===================================================== ==========================================================
recompute   kept between a forward and its backward               recomputed in the backward
=========== ===================================================== ==========================================================
none        all that a backward needs                             nothing
selective   the same, but of the attention core only its queries, the core: products with keys and values, softmax, dropout
            keys and values                                       (Korthikanti et al., arXiv:2205.05198)
full        the input of each block                               each block
every-N     the input of each N-th block of a stage               groups of N consecutive blocks, as Megatron-LM's
                                                                  ``uniform`` method and SageMaker's ``group_N`` do
=========== ===================================================== ==========================================================

``full`` is ``every-1``; a larger N keeps fewer inputs and holds N blocks at once in the backward. Embedding, last norm and head
are never recomputed. The core with torch's fused attention keeps nothing quadratic in the sequence, so that ``selective`` saves
little there: its output and one number per row. It is useful if attention weights are dropped, for which the engine has its own
attention.

Dropout needs no generator state: its masks are hashes of the moment, which the driver sets before each backward. The all-reduces
of the tensor axis in a block's forward are repeated, on all of its ranks. Deferred weight gradients hold recomputed inputs, so
that a schedule with W actions keeps a chunk's inputs of products from I to W.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

# (function, *arguments) -> its result; only the arguments are kept for the backward. Without gradients this is a plain call.
computed_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
