"""Bootstrap of a rank, from the job file to a context: identity, job, threads, rendezvous, and the shared run directory."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.line_file import append_lines
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.job.layout import check_job, degrees_of, layout_of, read_shape
from hpc_mp.job.resolution import ResolvedKey, cut, resolved
from hpc_mp.job.spec import UNCOUNTED
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Placement, from_dict, place, to_dict
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, read_json, write_json
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
    """A rank's knowledge before it has met the other ranks. ``run``, ``placement``: as written by a launcher; None for ranks
    started by hand. ``record``: the launcher's record of this attempt, if the launcher counts attempts."""

    who: RankEnv
    where: Rendezvous
    fence: Fence
    run: RunDirectory | None
    placement: Placement | None
    record: AttemptRecord | None
    waits: Waits

    def context(self, run: RunDirectory, placement: Placement) -> RankContext:
        """Return the context. ``run`` and ``placement`` are this attempt's own, or made by rank 0."""
        attempt = self.record.attempt if self.record else run.attempt()
        collected = known_hosts(self.record) is not None  # srun labels the ranks' output and writes it to a file per node
        return RankContext(self.who, run, attempt, placement, self.fence, self.record, Log(run, self.who, collected), self.waits)


def start(job_file: Path, environ: Mapping[str, str] = os.environ) -> Bootstrap:
    """Find this rank's identity and the rendezvous. Raises HpcMpError if this rank has no place here, or a variable of its
    launcher is missing, and FencedOut if the run has been started again since."""
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
    """Return the host of each node of the placement; None if they were not known before the ranks started."""
    return (record.hosts or None) if record else None


def lay_out(spec: JobSpec) -> Placement:
    """Return the placement of a job that no launcher has laid out."""
    order = "cluster" if spec.parallel.order == "auto" else spec.parallel.order
    return place(degrees_of(spec), order, spec.job.ranks_per_node, spec.parallel.rank_map)


def read_job(job_file: Path, who: RankEnv) -> tuple[JobSpec, ModelShape]:
    """Return the job and the shape of its model. Raises HpcMpError if they do not fit each other or the number of ranks."""
    spec = load_job(job_file)
    shape = read_shape(spec)
    check_job(spec, shape)
    if who.world != spec.ranks:
        raise HpcMpError(f"{who.world} ranks ({who.source})", f"the job file asks for {spec.ranks} = "
                         f"nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node})",
                         "start that many ranks, or change job.nodes and job.ranks_per_node")
    if spec.train.steps == UNCOUNTED:
        raise HpcMpError(f"train.epochs = {spec.train.epochs:g}", "is made steps of by `hpc-mp launch`, and these ranks were "
                         "started by hand", "set train.steps: `hpc-mp data prepare` says how many they are")
    return spec, shape


def threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads for this rank's matrix products, from OpenMP's variable. Raises HpcMpError."""
    value = environ.get("OMP_NUM_THREADS", "1")
    if not value.isdigit() or int(value) == 0:
        raise HpcMpError(f"OMP_NUM_THREADS = {value!r}", "must be a whole number of at least 1",
                         "mend it in the environment or in environment.set")
    return int(value)


def join_run(begun: Bootstrap, spec: JobSpec, shape: ModelShape, store: SignedKeys) -> RankContext:
    """Join the launched run. Ranks started by hand join a new run that rank 0 makes."""
    run, placement = begun.run, begun.placement
    if run is None or placement is None:
        run, placement = _new_run(spec, shape, begun.who, store), lay_out(spec)
    return begun.context(run, placement)


def _new_run(spec: JobSpec, shape: ModelShape, who: RankEnv, store: SignedKeys) -> RunDirectory:
    key = "run directory"
    if who.rank == 0:
        run = create_run(Path(spec.job.directory), spec.job.name)
        partition = cut(ResolvedKey("parallel.partition", layout_of(spec, shape).layers))
        run.job.write_text(dump_job(resolved(spec, partition)), encoding="utf-8")
        write_json(run.placement, to_dict(lay_out(spec)))
        store.set(key, str(run.path))
    return RunDirectory(Path(store.get(key)))


def rank_start(context: RankContext, device: str) -> RankStart:
    """Return the record of this rank's start. ``device``: the device's name."""
    who, place_, task = context.who, context.place, os.environ.get("SLURM_PROCID", "")
    return RankStart(
        context.attempt, who.rank, who.node, os.uname().nodename, time.time(), os.getpid(), who.local_rank,
        place_.dp, place_.pp, place_.cp, place_.tp, context.fence.token, device, int(task) if task.isdigit() else None)


def announce(run: RunDirectory, everyone: Sequence[RankStart]) -> None:
    """Write all ranks' lines to ``ranks.jsonl``, on rank 0: shared file systems may tear lines that many ranks append at once."""
    append_lines(run.ranks, [line_of(start_) for start_ in everyone])


def status(context: RankContext, phase: str, detail: str = "", done: int = 0, total: int = 0) -> None:
    """Write rank 0's current phase for observers."""
    if context.who.rank == 0:
        with suppress(OSError):  # a full disk must not stop training
            write_record(context.run.status, RankStatus(context.attempt, phase, detail, done, total, time.time()))
