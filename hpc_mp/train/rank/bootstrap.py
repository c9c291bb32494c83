"""From a job file to a context: who this rank is, with what it computes, where all meet, and the run directory they share."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.job.resolution import ResolvedKey, cut, resolved
from hpc_mp.job.spec import UNCOUNTED
from hpc_mp.layout.models import ModelShape, check_layout, read_shape, stage_layers
from hpc_mp.layout.placement import Degrees, Placement, from_dict, place, to_dict
from hpc_mp.rundir import AttemptRecord, LineFile, RunDirectory, create_run, read_json, write_json
from hpc_mp.rundir.rank_env import RankEnv, at_place, identity, node_name, say_host
from hpc_mp.rundir.records import RankStart, RankStatus, line_of, write_record
from hpc_mp.train.rank import mpi
from hpc_mp.train.rank.failures import RankContext
from hpc_mp.train.rank.fencing import Fence, fence
from hpc_mp.train.rank.logs import Log
from hpc_mp.train.rank.proof import SignedKeys
from hpc_mp.train.rank.rendezvous import Rendezvous, rendezvous
from hpc_mp.train.rank.waits import Waits


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a rank knows before it has met the others.

    Attributes:
        run, placement: as a launcher wrote them; None for ranks started by hand.
        record: what a launcher that counts starts wrote down for this one.
    """

    who: RankEnv
    where: Rendezvous
    fence: Fence
    run: RunDirectory | None
    placement: Placement | None
    record: AttemptRecord | None
    waits: Waits

    def context(self, run: RunDirectory, placement: Placement) -> RankContext:
        """``run``, ``placement``: this attempt's own, or those that rank 0 made."""
        attempt = self.record.attempt if self.record else run.attempt()
        collected = known_hosts(self.record) is not None  # srun labels what ranks print and writes it to a file per node
        return RankContext(self.who, run, attempt, placement, self.fence, self.record, Log(run, self.who, collected), self.waits)


def start(job_file: Path, environ: Mapping[str, str] = os.environ) -> Bootstrap:
    """Find out who and where this rank is.

    Raises:
        HpcMpError: it has no place here, or what its launcher should have set is not there.
        FencedOut: the run has been started again since.
    """
    beside = RunDirectory(job_file.resolve().parent)
    run = beside if beside.placement.exists() else None
    placement = from_dict(read_json(run.placement)) if run else None
    mine, record = fence(run, environ)
    where = rendezvous(record, environ)
    hosts = known_hosts(record)
    if environ.get(mpi.MPI) == "1":
        laid_out = placement or lay_out(load_job(job_file))
        with mpi.world() as comm:
            address = (record.address or None) if record else None
            who, where = mpi.come_up(comm, laid_out, hosts, node_name(environ), where.secret, address, environ)
    elif placement is not None and hosts is not None:
        if "SLURM_LOCALID" not in environ:
            raise HpcMpError("SLURM_LOCALID", "is not set", "start ranks with srun, as the script of `hpc-mp launch` does")
        who = at_place(placement, hosts, node_name(environ), int(environ["SLURM_LOCALID"]), "Slurm")
    else:
        who = identity(environ)
    if run is not None and record is not None and hosts is None:
        say_host(run, who)
    return Bootstrap(who, where, mine, run, placement, record, Waits(who.rank))


def known_hosts(record: AttemptRecord | None) -> tuple[str, ...] | None:
    """Of each node of the placement; None when nobody has named them before the ranks came up."""
    return (record.hosts or None) if record else None


def lay_out(spec: JobSpec) -> Placement:
    """The placement of a job that no launcher has laid out."""
    degrees = Degrees(spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree, spec.parallel.context, spec.parallel.expert)
    order = "cluster" if spec.parallel.order == "auto" else spec.parallel.order
    return place(degrees, order, spec.job.ranks_per_node, spec.parallel.rank_map)


def read_job(job_file: Path, who: RankEnv) -> tuple[JobSpec, ModelShape]:
    """The job and the shape of its model. Raises HpcMpError when they do not go together with as many ranks."""
    spec = load_job(job_file)
    shape = read_shape(spec)
    check_layout(shape, spec)
    if who.world != spec.ranks:
        raise HpcMpError(f"{who.world} ranks ({who.source})", f"the job file asks for {spec.ranks} = "
                         f"nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node})",
                         "start that many ranks, or change job.nodes and job.ranks_per_node")
    if spec.train.steps == UNCOUNTED:
        raise HpcMpError(f"train.epochs = {spec.train.epochs:g}", "is made steps of by `hpc-mp launch`, and these ranks were "
                         "started by hand", "set train.steps: `hpc-mp data prepare` says how many they are")
    return spec, shape


def threads(environ: Mapping[str, str] = os.environ) -> int:
    """Threads of this rank's matrix products, as OpenMP's variable says. Raises HpcMpError."""
    given = environ.get("OMP_NUM_THREADS", "1")
    if not given.isdigit() or int(given) == 0:
        raise HpcMpError(f"OMP_NUM_THREADS = {given!r}", "must be a whole number of at least 1",
                         "mend it in the environment or in environment.set")
    return int(given)


def join_run(begun: Bootstrap, spec: JobSpec, shape: ModelShape, store: SignedKeys) -> RankContext:
    """In the launched run, or for ranks started by hand in a new one that rank 0 makes."""
    run, placement = begun.run, begun.placement
    if run is None or placement is None:
        run, placement = _new_run(spec, shape, begun.who, store), lay_out(spec)
    return begun.context(run, placement)


def _new_run(spec: JobSpec, shape: ModelShape, who: RankEnv, store: SignedKeys) -> RunDirectory:
    key = "run directory"
    if who.rank == 0:
        run = create_run(Path(spec.job.directory), spec.job.name)
        found = cut(ResolvedKey("parallel.partition", stage_layers(spec, shape)))
        run.job.write_text(dump_job(resolved(spec, found)), encoding="utf-8")
        write_json(run.placement, to_dict(lay_out(spec)))
        store.set(key, str(run.path))
    return RunDirectory(Path(store.get(key)))


def rank_start(context: RankContext, device: str) -> RankStart:
    """What is to be known of this rank. ``device``: its name."""
    who, place_, task = context.who, context.place, os.environ.get("SLURM_PROCID", "")
    return RankStart(
        context.attempt, who.rank, who.node, os.uname().nodename, time.time(), os.getpid(), who.local_rank,
        place_.dp, place_.pp, place_.cp, place_.tp, context.fence.token, device, int(task) if task.isdigit() else None)


def announce(run: RunDirectory, everyone: Sequence[RankStart]) -> None:
    """All ranks' lines in ``ranks.jsonl``, which rank 0 writes: a shared file system may tear lines that many append at once."""
    file = LineFile(run.ranks, limit=len(everyone))
    for start_ in everyone:
        file.write(line_of(start_))
    file.close()


def status(context: RankContext, phase: str, detail: str = "", done: int = 0, total: int = 0) -> None:
    """What rank 0 is doing, for whoever watches."""
    if context.who.rank == 0:
        with suppress(OSError):  # a full disk must not stop training
            write_record(context.run.status, RankStatus(context.attempt, phase, detail, done, total, time.time()))
