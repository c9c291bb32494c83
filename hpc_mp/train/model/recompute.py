"""Recomputation: the backward recomputes the activations that a forward has not kept.

``docs/user/memory.md`` has the settings. ``selective`` is that of Korthikanti et al. (arXiv:2205.05198); ``every-N`` makes groups
of blocks as Megatron-LM's ``uniform`` method and SageMaker's ``group_N`` do, and ``full`` is ``every-1``.

Dropout needs no generator state: its masks are hashes of the moment, which the driver sets before each backward.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

# (function, *arguments) -> its result; only the arguments are kept for the backward. Without gradients this is a plain call.
computed_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
