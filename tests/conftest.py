"""One thread per process: many ranks share few cores, and sums keep one order."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, so it stands before every other import
