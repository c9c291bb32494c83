"""The job file of somebody's program: who runs where, and the command that every rank becomes. What it computes is its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.torchrun import IDENTITY
from hpc_mp.job.cluster import Environment, Notify, Slurm
from hpc_mp.job.errors import shown
from hpc_mp.job.spec import Job, grace_of
from hpc_mp.job.sweep import Sweep
from hpc_mp.job.values import NonNegative, PathName, Section, Variable, must

Command = Annotated[tuple[str, ...], must(
    "names no program", 'write for example command = ["python", "train.py", "--lr", "1e-3"]',
    lambda words: words and words[0])]


class Program(Section):
    """Somebody's distributed program, in place of `[model]`, `[data]` and `[train]`. See [programs](../user/programs.md)."""

    command: Command
    """Required. The program and its arguments, which reach it as they stand here: no shell reads them. A program without a slash
    is looked up on `PATH`. Example: `["python", "train.py", "--lr", "1e-3"]`."""
    directory: PathName = "."
    """Where it runs: a directory that all nodes see. Left out: where the job file lies. Example: `"../nanoGPT"`."""
    environment: dict[Variable, str] = Field(default={})
    """Variables of the program alone, byte for byte. They go before all others but those that tell a rank who it is. Example:
    `{ WANDB_MODE = "offline" }`."""
    start: Literal["rank", "node", "mpi"] = "rank"
    """`"rank"`: the command once for every rank, with the variables that torchrun sets. `"node"`: once for every node, for a
    command that starts `job.ranks_per_node` ranks there itself; `{nodes}`, `{node_rank}`, `{ranks_per_node}`, `{master_addr}`,
    `{master_port}` and `{run}` in it are replaced. `"mpi"`: once for every rank, which meet through MPI and find none of
    torchrun's variables. Example: `"node"`."""
    resumes: bool = False
    """Whether a later attempt goes on from what an earlier one has saved (`HPC_MP_RESUME` is 1 there). With `true` the job is
    queued again after the time limit, whatever its ranks end with; else that ends it, unless the first rank to end does so with
    one of `stop_codes`. Example: `true`."""
    signal: Literal["TERM", "INT", "HUP", "USR1", "USR2"] = "TERM"
    """What every rank gets `slurm.grace` seconds before the time limit, and by `hpc-mp cancel`. In preemption Slurm sends
    SIGTERM. Example: `"USR1"`."""
    stop_codes: tuple[Annotated[int, Field(ge=1, le=125, strict=True)], ...] = (75,)
    """Exit codes by which a program says that it has saved and is to be queued again. Ranks that end with them at different times
    wait for each other before: the first of them ends the others. Example: `[3, 75]`."""
    silent_limit: NonNegative = 3600
    """Seconds in which no rank prints a line until they count as hung; 0 = never. Example: `600`."""


class ProgramSpec(Section):
    """A whole job file with ``[program]``. Frozen; every value is either given or has the default shown here."""

    job: Job = Job()
    program: Program
    sweep: Sweep = Sweep()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()
    notify: Notify = Notify()

    @property
    def ranks(self) -> int:
        return self.job.nodes * self.job.ranks_per_node

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which ranks are told of it."""
        return grace_of(self.slurm, self.job)

    @property
    def tasks_per_node(self) -> int:
        """How often the command is started on a node."""
        return 1 if self.program.start == "node" else self.job.ranks_per_node


def meets_through_mpi(spec: ProgramSpec) -> bool:
    """Whether its ranks meet through MPI, be it beside torchrun's variables."""
    return spec.program.start == "mpi" or spec.slurm.mpi != "none"


# Keys of what a program shares with a training that mean nothing to a program, or are not built for it: (rule, remedy).
_ENGINE = "is for hpc-mp's own engine, and nobody knows the steps of another program"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("job.heartbeat_timeout", "job.step_timeout", "job.start_timeout", "job.load_timeout", "job.save_timeout"),
                    (_ENGINE, "leave it out; program.silent_limit says how long it may be silent")),
    "slurm.mpi": ("is for tasks that are ranks, and here a task starts those of its node itself", "leave it out"),
    "slurm.container": ("is not built for [program]", "leave it out, or let program.command start the container "
                        '(["apptainer", "exec", "image.sif", "python", "train.py"])'),
    "slurm.python": ("names the interpreter of hpc-mp's own ranks", "name the program's interpreter in program.command"),
    "environment.stage": ("packs the interpreter of hpc-mp's own ranks, and is not built for [program]", "leave it out"),
}


def check_program(spec: ProgramSpec) -> None:
    """Refuse what a program would not notice. Raises HpcMpError."""
    for key, (rule, remedy) in REFUSED.items():
        section, name = key.split(".")
        table = getattr(spec, section)
        value = getattr(table, name)
        if value != type(table).model_fields[name].default and (key != "slurm.mpi" or spec.program.start == "node"):
            raise HpcMpError(f"{key} = {shown(value)}", rule, remedy)
    for name in spec.program.environment:
        if name in IDENTITY or name.startswith("HPC_MP_"):
            raise HpcMpError(f"program.environment.{name}", "tells each rank who it is, and every rank has another value"
                             if name in IDENTITY else "belongs to hpc-mp", "leave it out")
