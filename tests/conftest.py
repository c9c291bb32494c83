"""How tests run: threads, examples of hypothesis, which worker takes which file; and a real Slurm where there can be one."""

import gc
import os
import signal
import zlib
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings
from lab_users import uses_the_lab
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not
from xdist.scheduler import LoadFileScheduling

os.environ["OMP_NUM_THREADS"] = "1"  # many ranks share few cores, and sums keep one order; read when torch is first imported
os.environ["HPC_MP_VERIFY"] = "0"  # launches do not verify: tests/train/test_verify.py does
# Started in the background or under nohup, a process ignores these, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is imported and collected stays, torch and transformers among it: to search it for garbage again and again finds none.
gc.disable()

settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("ci")  # --hypothesis-profile names another

# The files that take longest go first, so that no worker sits with one of them while the others have nothing left.
LONGEST = (
    "test_heartbeat", "test_checkpoint", "test_launch_resume", "test_gate", "test_exact_layouts", "test_export",
    "test_exact_controls", "test_doctor_node", "test_order_slurm", "test_emulator",
    "test_survey_agents", "test_package", "test_launch_slurm", "test_exact_numbers",
    "test_profile_slurm", "test_survey_lab", "test_launch")

# Tests that start processes and wait for them, on machines that may be slow. `make test` gives one that fails a second chance and
# names it (RERUN). All others compute: what is wrong once is wrong, so they have none (nor has `make prove`).
TIMED = ("tests/clouds", "tests/cluster", "tests/doctor", "tests/end_to_end", "tests/environment", "tests/lab", "tests/launch",
         "tests/machines", "tests/package", "tests/program", "tests/report/test_notify", "tests/supervisor",
         "tests/train/test_fencing", "tests/train/test_heartbeat", "tests/train/test_rank_waits", "tests/train/test_rendezvous",
         "tests/train/test_tokens")


ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"  # `make gpu`: the engine of exactness tests is on a GPU
# Asking whether there is a GPU must not begin CUDA: ranks are forked from here.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


@cache
def gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


class TwoLabs(LoadFileScheduling):
    """Gives files to workers, and their tests that use the Slurm of the lab to two of these, which have one each: such tests wait
    more than they compute."""

    def _split_scope(self, nodeid: str) -> str:
        if ON_GPU:  # nothing here uses the lab, and beside a GPU are many cores
            return nodeid
        file = nodeid.partition("::")[0]
        return f"lab {zlib.crc32(file.encode()) % 2}" if uses_the_lab(self.config.rootpath, nodeid) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoLabs:
    return TwoLabs(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if uses_the_lab(item.config.rootpath, item.nodeid):
            return -1
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
    for item in items:
        if not item.nodeid.startswith(TIMED):
            item.add_marker(pytest.mark.flaky(reruns=0))
        if ON_GPU and not gpu_here():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


# Without the long proofs no test of a session's lab waits for Slurm to miss a node: none is missed because the machine is busy.
# Slurm asks its nodes three times in SlurmdTimeout, and some ends of jobs wait for it: with 120 s a requeue takes 30 s more.
UNHURRIED = {"SlurmdTimeout": "30", "MessageTimeout": "20", "BatchStartTimeout": "60"}


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A Slurm of four hosts, shared by all tests of a session: they mend what they break. Skipped where it cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    patience = UNHURRIED if "not prove" in request.config.getoption("markexpr") else {}
    with Lab(overrides={"KillWait": "2", **patience}) as running:  # what does not heed SIGTERM is killed so many seconds later
        yield running
