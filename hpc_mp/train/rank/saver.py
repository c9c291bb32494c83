"""The checkpoints of a run as its ranks save them: at once or in the background, and what follows if that fails."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from hpc_mp.diagnosis.texts import kind_of
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.origin import Counters
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.checkpoint.background import BackgroundWriter
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.failures import PeerGone, RankContext, Unwritable
from hpc_mp.train.rank.signals import Pace
from hpc_mp.train.rank.watchdog import Watchdog
from hpc_mp.train.step.engine import Engine


class Saver:
    """The saves of one rank. All ranks call its methods at the same steps.

    Args:
        keep: number of newest checkpoints to keep.
        limit: number of failures in a row after which the run ends; 0: it never does.
        background: True if training continues while a checkpoint is written.
        pace: learns how long a save takes.
        node_of: returns the host of a rank.
    """

    def __init__(self, context: RankContext, engine: Engine, keep: int, limit: int, background: bool, watchdog: Watchdog,
                 pace: Pace, node_of: Callable[[int], str]) -> None:
        self.context, self.engine, self.keep, self.limit = context, engine, keep, limit
        self.watchdog, self.pace, self.node_of = watchdog, pace, node_of
        self._writer = BackgroundWriter(checkpoint.parts_to_write(engine.held())) if background else None
        self._failed: checkpoint.SaveFailed | None = None
        self._failures = 0
        self._began = self._waited = 0.0

    @property
    def busy(self) -> bool:
        """True while this rank writes in the background."""
        return self._writer is not None and self._writer.busy

    def save(self, counters: Counters, last: bool) -> None:
        """Save a checkpoint. A failure is logged, because training continues.

        Args:
            last: True if no step follows, so that the checkpoint has to be complete now.

        Raises:
            SaveFailed: after the last of so many failures in a row.
            Unwritable, PeerGone: the same, if this rank's node, or another one, could not write and the others could.
            FencedOut: the run has been started again.
        """
        self.publish()
        self.watchdog.now("save")
        self._began = time.perf_counter()
        run, groups, fence = self.context.run, self.engine.groups, self.context.fence
        writer = None if last else self._writer
        if writer is None:
            self._attempt(counters.step, lambda: checkpoint.save(run, counters, self.engine.held(), groups, self.keep, fence))
        else:
            self._attempt(counters.step, lambda: self._begin(writer, checkpoint.writing_of(run, counters, groups, fence)))
            self._waited = time.perf_counter() - self._began

    def end(self) -> None:
        """Publish what is still being written. Raises as ``save``, also if the last checkpoint could not be saved."""
        self.publish()
        if self._failed is not None:
            self._give_up(self._failed, f"the last checkpoint could not be saved: {self._failed}")

    def publish(self) -> None:
        """Publish the checkpoint that has been written in the background, if there is one. Raises as ``save``."""
        if self._writer is None or self._writer.writing is None:
            return
        self.watchdog.now("save")
        began, writing = time.perf_counter(), self._writer.written()
        self._waited -= began
        self._attempt(writing.step, lambda: checkpoint.published(writing, self.context.run, self.keep))
        self.watchdog.now("step")

    def _begin(self, writer: BackgroundWriter, writing: checkpoint.Writing) -> None:
        writing.prepare()
        writer.begin(writing, checkpoint.parts_to_write(self.engine.held()))

    def _attempt(self, step: int, action: Callable[[], Path | None]) -> None:
        """Save, begin to, or end. Log a checkpoint that is complete or has failed, and count failures in a row."""
        try:
            path = action()
        except checkpoint.SaveFailed as error:
            self.context.log.say(f"checkpoint of step {step} FAILED: {error}. The earlier checkpoints are unharmed")
            self._failed, self._failures = error, self._failures + 1
            if self._failures == self.limit:
                self._give_up(error, f"{self._failures} checkpoints in a row could not be saved: {error}")
            return
        if path is None:
            return
        now = time.perf_counter()
        self._failed, self._failures, self.pace.save = None, 0, now - self._began
        waited = f"; training waited for {self._waited + now:.2f} s of them" if self._waited else ""
        self._waited = 0.0
        self.context.log.say(f"checkpoint {path.name} saved in {self.pace.save:.2f} s{waited}")

    def _give_up(self, failed: checkpoint.SaveFailed, message: str) -> NoReturn:
        """End the run because it cannot save checkpoints. A node to blame cannot record that, so a rank of another node does."""
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        space = kind_of(str(failed)) == "space"  # the file system is full; it does not matter which rank noticed it
        blamed = {self.node_of(failed_rank) for failed_rank in failed.ranks}
        well = [peer for peer in ranks if self.node_of(peer) not in blamed] if failed.refused else []
        if space or (not well and rank in failed.ranks):
            raise checkpoint.SaveFailed(message, failed.ranks)
        if not well:
            raise PeerGone(message)
        if rank == well[0]:
            for failed_rank in failed.ranks:
                write_failure(self.context.run, RankFailure(
                    failed_rank, self.node_of(failed_rank), "unwritable", message, time.time(), self.context.attempt))
        facts.barrier(self.engine.groups.host)
        raise Unwritable(message) if rank in failed.ranks else PeerGone(message)
