"""One thread per process: many ranks share few cores, and sums keep one order. And a real Slurm where there can be one."""

import os
import signal
from collections.abc import Iterator

import pytest
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, so no import above may import it
# Started in the background or under nohup, a process ignores these, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A Slurm of four hosts, shared by all tests of a session: they mend what they break. Skipped where it cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab() as running:
        yield running
