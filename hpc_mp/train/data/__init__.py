"""Text to samples: tokenizer, token files, deterministic sampler.

``find_files`` → ``prepare`` → ``training_samples`` or ``held_out_samples``. The first two run once per job, the last in every
rank. No torch here: samples are NumPy arrays.
"""

from hpc_mp.train.data.held_out import HeldOut, held_out_samples, passes, prepare_held_out
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.sample_rows import LabelledRows, PairRows, SampleRows, rows_of
from hpc_mp.train.data.sampler import Samples, positions, training_samples
from hpc_mp.train.data.tokens import TokenSet, load_tokens, prepare, prepare_job

__all__ = [
    "IGNORE", "HeldOut", "LabelledRows", "PairRows", "SampleRows", "Samples", "TokenSet", "held_out_samples", "load_tokens",
    "passes", "positions", "prepare", "prepare_held_out", "prepare_job", "rows_of", "training_samples",
]
