"""Text to samples: tokenizer, token files, deterministic sampler.

``find_files`` → ``prepare`` → ``Samples`` or ``HeldOut``. The first two run once per job, the last in every rank. No torch here:
samples are NumPy arrays.
"""

from hpc_mp.train.data.held_out import HeldOut, held_out_of, passes, prepare_held_out
from hpc_mp.train.data.pairs import PairRows, pairs_of
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.sampler import Samples, positions
from hpc_mp.train.data.tokens import TokenSet, load_tokens, prepare, prepare_job

__all__ = [
    "IGNORE", "HeldOut", "PairRows", "Samples", "TokenSet", "held_out_of", "load_tokens", "pairs_of", "passes", "positions",
    "prepare", "prepare_held_out", "prepare_job",
]
