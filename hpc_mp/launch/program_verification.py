"""Verification of somebody's own training script: with two tensor ranks it has the losses that it has with one.

The script gets its tensor degree where ``{tensor}`` stands in its command, and says its loss by ``hpc_mp.log``. It runs on as
many emulated ranks as the degree is, until it has said the loss of a few steps.
"""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import ProgramSpec
from hpc_mp.job.program import Program
from hpc_mp.job.spec import Job
from hpc_mp.launch.launch import LaunchRequest, launch
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import RankStatus, StepMetrics, read_records

TENSOR = "{tensor}"
STEPS = 3  # the first loss shows the forward alone, the others the gradients too
ROUNDING = 1e-5  # of fp32, as a share of a loss
STOP_S = 10.0  # that a program has to end when it has said enough


@dataclass(frozen=True, slots=True)
class ProgramVerified:
    """The losses of a script.

    Attributes:
        losses: of every step, with one tensor rank and with two.
        step, difference: the first step that differs, else the one that differs most; as a share of its loss.
        equal: True if all differences are rounding.
    """

    losses: tuple[tuple[float, float], ...]
    step: int
    difference: float
    equal: bool

    def words(self) -> str:
        """Return the verification in one line."""
        if self.equal:
            return f"verified  {len(self.losses)} losses with two tensor ranks are those with one (within {self.difference:.0e})"
        one, two = self.losses[self.step - 1]
        return f"differs   the loss of step {self.step} is {two:.9g} with two tensor ranks, and {one:.9g} with one (16 bits " \
               "differ by rounding: verify in fp32 or fp64)"


class _Enough(Listener):
    """Ends the program, as Ctrl-C does, when it has said enough."""

    def __init__(self) -> None:
        self._left, self._due = STEPS, -math.inf

    def update(self, status: RankStatus | None, steps: Sequence[StepMetrics]) -> None:
        self._left -= len(steps)
        if self._left <= 0 and time.monotonic() >= self._due:
            self._due = time.monotonic() + STOP_S
            signal.raise_signal(signal.SIGINT)


def verify_program(words: Sequence[str], overrides: Sequence[str] = ()) -> ProgramVerified:
    """Return the losses of a script with one and with two tensor ranks. Raises HpcMpError if it takes no tensor degree, fails, or
    says no loss. ``overrides``: of its job."""
    if not any(TENSOR in word for word in words):
        raise HpcMpError("the command", f"has no {TENSOR}, so that its tensor degree cannot be set",
                         f"write it where the degree stands: hpc-mp verify --program -- python train.py --tp {TENSOR}")
    pairs = tuple(zip(*(_losses(words, tensor, overrides) for tensor in (1, 2)), strict=True))
    shares = [abs(one - two) / max(abs(one), abs(two)) if one != two else 0.0 for one, two in pairs]
    step = next((number for number, share in enumerate(shares) if not share <= ROUNDING), shares.index(max(shares)))
    return ProgramVerified(pairs, step + 1, shares[step], shares[step] <= ROUNDING)


def _losses(words: Sequence[str], tensor: int, overrides: Sequence[str]) -> list[float]:
    who = f"the program with {TENSOR} = {tensor}"
    with TemporaryDirectory() as folder:
        spec = ProgramSpec(job=Job(name="verify", ranks_per_node=tensor, directory=folder), program=Program(
            command=tuple(word.replace(TENSOR, str(tensor)) for word in words), directory=str(Path.cwd())))
        outcome = launch(LaunchRequest(spec, "local", tuple(overrides)), _Enough())
        losses = [record.loss for record in read_records(RunDirectory(outcome.run).metrics, StepMetrics)][:STEPS]
    if outcome.state == "failed" or (outcome.state == "stopped" and len(losses) < STEPS):
        raise HpcMpError(who, f"{outcome.state}: {outcome.cause.message if outcome.cause else 'by a signal'}",
                         f"run it by itself: hpc-mp run --on local --ranks-per-node {tensor} -- COMMAND")
    if len(losses) < STEPS or not all(map(math.isfinite, losses)):
        raise HpcMpError(who, f"has said the loss of {sum(map(math.isfinite, losses))} steps by hpc_mp.log, of {STEPS} that are "
                         "compared", f"call hpc_mp.log(step=…, loss=…) in each of {STEPS} steps or more")
    return losses
