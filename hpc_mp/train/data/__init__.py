"""Text to samples: tokenizer, token files, deterministic sampler.

``find_files`` → ``prepare`` → ``training_samples`` or ``held_out_samples``. The first two run once per job, the last in every
rank. No torch here: samples are NumPy arrays.
"""

from hpc_mp.train.data.held_out import HeldOut, passes, prepare_held_out
from hpc_mp.train.data.labelled import LabelledRows, held_out_samples, training_samples
from hpc_mp.train.data.pairs import PairRows
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.sampler import Samples, positions
from hpc_mp.train.data.tokens import TokenSet, load_tokens, prepare, prepare_job

__all__ = [
    "IGNORE", "HeldOut", "LabelledRows", "PairRows", "Samples", "TokenSet", "held_out_samples", "load_tokens", "passes",
    "positions", "prepare", "prepare_held_out", "prepare_job", "training_samples",
]
