"""Text to samples: tokenizer, token files, deterministic sampler.

``find_files`` → ``prepare`` → ``Samples``. The first two run once per job, the last in every rank. No torch here:
samples are NumPy arrays.
"""

from hpc_mp.train.data.sampler import IGNORE, Samples, positions
from hpc_mp.train.data.tokens import TokenSet, load_tokens, prepare, prepare_job

__all__ = ["IGNORE", "Samples", "TokenSet", "load_tokens", "positions", "prepare", "prepare_job"]
