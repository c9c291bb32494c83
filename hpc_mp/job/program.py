"""The job file of the user's program: the placement of ranks, and the command that each rank runs."""

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import IDENTITY, NUMBERINGS
from hpc_mp.base.text import shown
from hpc_mp.job.cluster import Environment, Notify, Slurm
from hpc_mp.job.spec import Job, grace_of
from hpc_mp.job.sweep import Sweep
from hpc_mp.job.values import Count, Line, NonNegative, Order, PathName, RankMap, Section, Variable, must

Axes = Annotated[Line, must(
    f"must be one of {', '.join(NUMBERINGS)}, or a permutation of the letters DPT or DPCT", "write for example \"megatron\"",
    lambda name: name in NUMBERINGS or sorted(name) in (sorted("DPT"), sorted("DPCT")))]

Command = Annotated[tuple[str, ...], must(
    "names no program", 'write for example command = ["python", "train.py", "--lr", "1e-3"]', lambda words: words and words[0])]


class Program(Section):
    """The user's distributed program, in place of `[model]`, `[data]` and `[train]`. See [programs](../user/programs.md)."""

    command: Command
    """Required. The program and its arguments, which are passed literally, without a shell. A program without a slash is looked
    up on `PATH`. Example: `["python", "train.py", "--lr", "1e-3"]`."""
    directory: PathName = "."
    """The working directory, which all nodes must see. Default: the directory of the job file. Example: `"../nanoGPT"`."""
    environment: dict[Variable, str] = Field(default={})
    """Variables of the program only, byte for byte. They take precedence over all others except those that identify a rank.
    Example: `{ WANDB_MODE = "offline" }`."""
    stage: tuple[PathName, ...] = ()
    """Files and directories that are copied to every node's own disk before the ranks start: `/disk/set` is then also
    `$HPC_MP_STAGED/disk/set`. See [staging](../user/programs.md#copies-on-the-nodes-own-disks). Example: `["/data/imagenet"]`."""
    start: Literal["rank", "node", "mpi", "script"] = "rank"
    """`"rank"`: the command runs once for every rank, with the variables that torchrun sets. `"node"`: once for every node, for a
    command that starts `job.ranks_per_node` ranks there itself; `{nodes}`, `{node_rank}`, `{ranks_per_node}`, `{master_addr}`,
    `{master_port}` and `{run}` in it are replaced. `"mpi"`: once for every rank; ranks meet through MPI and have none of
    torchrun's variables. `"script"`: a job script and its arguments run once, on the job's first node, with the variables that
    `sbatch` would set. The ranks that it starts with srun, mpirun, torchrun and similar programs are watched. Example:
    `"node"`."""
    axes: Axes | None = None
    """The program's rank numbering for its tensor, pipeline and data groups: `"megatron"`, `"deepspeed"`, `"nanotron"`,
    `"torchtitan"`, or letters as in `parallel.order` (the right-most varies fastest). `[parallel]` then sets the sizes of the
    groups and their order on nodes. Example: `"megatron"`."""
    resumes: bool = False
    """True if a later attempt continues from saved state (`HPC_MP_RESUME` is 1 there). The job is then queued again after the
    time limit with any exit code of its ranks. Otherwise it ends there, unless the first rank to end has one of `stop_codes`.
    Example: `true`."""
    signal: Literal["TERM", "INT", "HUP", "USR1", "USR2"] = "TERM"
    """The signal that every rank gets `slurm.grace` seconds before the time limit, and from `hpc-mp cancel`. At a preemption,
    Slurm sends SIGTERM. Example: `"USR1"`."""
    stop_codes: tuple[Annotated[int, Field(ge=1, le=125, strict=True)], ...] = (75,)
    """Exit codes that mean: the program has saved, queue it again. Ranks that end with them at different times must first wait
    for each other: the end of the first rank ends the others. Example: `[3, 75]`."""
    silent_limit: NonNegative = 3600
    """Seconds without a printed line, or a step logged with `hpc_mp.log`, of any rank until the ranks count as hung; 0 = never.
    Example: `600`."""


class ProgramParallel(Section):
    """The sizes and the placement on nodes of a program's axes, if it has any (`program.axes`)."""

    tensor: Count = 1
    """Ranks of a tensor group, which communicate most: keep them inside a node. Example: `8`."""
    pipeline: Count = 1
    """Stages. Example: `4`."""
    context: Count = 1
    """Ranks that share a sample's tokens. Example: `2`."""
    data: Count | None = None
    """Replicas. Default: ranks / (tensor x pipeline x context). Example: `2`."""
    order: Order = "auto"
    """Letters D, P, C, T, `"cluster"` = DPT or `"spread"` = TPD: each rank number goes to the process that has its coordinates in
    this order. `auto`: the program's own numbering. Example: `"cluster"`."""
    rank_map: RankMap = "auto"
    """`"block"`, `"cyclic"`, or the node of every rank. Example: `[1, 1, 0, 0]`."""


class ProgramSpec(Section):
    """A whole job file with ``[program]``. Frozen; every value is either given or has the default shown here."""

    job: Job = Job()
    program: Program
    parallel: ProgramParallel = ProgramParallel()
    sweep: Sweep = Sweep()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()
    notify: Notify = Notify()

    @property
    def ranks(self) -> int:
        return self.job.nodes * self.job.ranks_per_node

    @property
    def data_degree(self) -> int:
        """The number of replicas."""
        return self.ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which ranks are notified."""
        return grace_of(self.slurm, self.job)

    @property
    def tasks_per_node(self) -> int:
        """The number of times that the command is started on a node."""
        return 1 if self.program.start in ("node", "script") else self.job.ranks_per_node

    @property
    def by_script(self) -> bool:
        """True if the program is a job script, which starts ranks itself."""
        return self.program.start == "script"

    @property
    def by_mpirun(self) -> bool:
        """True if mpirun starts the ranks in a Slurm job."""
        return self.program.start == "mpi" and self.slurm.mpi == "mpirun"

    @property
    def srun_tasks_per_node(self) -> int:
        """The number of srun's tasks per node: mpirun, or its daemon, is one."""
        return 1 if self.by_mpirun else self.tasks_per_node


def meets_through_mpi(spec: ProgramSpec) -> bool:
    """Return True if the ranks rendezvous through MPI, even if torchrun's variables are set too."""
    return spec.program.start == "mpi" or spec.slurm.mpi != "none"


# Keys shared with a training that have no meaning for a program, or are not implemented for it: (rule, remedy).
_ENGINE = "is only for hpc-mp's own engine: the steps of another program are unknown"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys((f"job.{what}_timeout" for what in ("heartbeat", "step", "start", "load", "save")),
                    (_ENGINE, "leave it out; program.silent_limit sets how long the program may be silent")),
    "slurm.mpi": ("is for tasks that are ranks, but here each task starts the ranks of its node", "leave it out"),
    "slurm.python": ("is the interpreter of hpc-mp's own ranks", "name the program's interpreter in program.command"),
}


def of_engine(key: str, spec: ProgramSpec) -> bool:
    """Return True if a key has no meaning for this program: it would be refused, or belongs to axes that the program lacks."""
    refused = key in REFUSED and (key != "slurm.mpi" or spec.program.start == "node")
    return refused or (key.startswith("parallel.") and spec.program.axes is None)


def check_program(spec: ProgramSpec) -> None:
    """Refuse settings that would have no effect on a program. Raises HpcMpError."""
    for key, (rule, remedy) in REFUSED.items():
        section, name = key.split(".")
        table = getattr(spec, section)
        value = getattr(table, name)
        if value != type(table).model_fields[name].default and (key != "slurm.mpi" or spec.program.start == "node"):
            raise HpcMpError(f"{key} = {shown(value)}", rule, remedy)
    if spec.by_script:
        _check_settings_of_script(spec)
    if spec.slurm.mpi == "mpirun" and spec.program.start != "mpi":
        raise HpcMpError(f"slurm.mpi = {shown(spec.slurm.mpi)} with program.start = {shown(spec.program.start)}",
                         "identifies ranks only through MPI, but this start does so with torchrun's variables",
                         'set program.start = "mpi", or slurm.mpi = "pmix" to have both')
    if spec.by_mpirun and spec.slurm.container is not None:
        raise HpcMpError('slurm.mpi = "mpirun" with slurm.container', "starts ranks outside the image, and the image's MPI "
                         "could not connect to that mpirun", 'set slurm.mpi = "pmix" or "pmi2", or let program.command start '
                         'the container (["apptainer", "exec", "image.sif", "./solve"])')
    _check_axes(spec)
    _check_stage(spec.program.stage)
    for name in spec.program.environment:
        if name in IDENTITY or name.startswith("HPC_MP_"):
            raise HpcMpError(f"program.environment.{name}", "identifies a rank: every rank has its own value"
                             if name in IDENTITY else "is reserved for hpc-mp", "leave it out")


OF_A_SCRIPT = ("modules", "conda", "venv", "setup", "container", "components", "mpi")
"""Keys of `[slurm]` that prepare what a script prepares itself."""


def _check_settings_of_script(spec: ProgramSpec) -> None:
    """Refuse settings that change how ranks start, which the script decides. Raises HpcMpError."""
    for name in OF_A_SCRIPT:
        if getattr(spec.slurm, name) != type(spec.slurm).model_fields[name].get_default(call_default_factory=True):
            raise HpcMpError(f'slurm.{name} with program.start = "script"', "has no effect: the script itself prepares its ranks",
                             "write it into the script, and leave it out here")
    if spec.environment.stage:
        raise HpcMpError('environment.stage with program.start = "script"', "has no effect: the script chooses its Python",
                         "leave it out")


def _check_stage(paths: tuple[str, ...]) -> None:
    """Refuse copies that would be nested. Raises HpcMpError."""
    for path in map(PurePath, paths):
        for inner in map(PurePath, paths):
            if path in inner.parents or path == PurePath(path.anchor):
                raise HpcMpError(f"program.stage = {shown(paths)}", f"{inner} is inside {path}" if path in inner.parents
                                 else "is the root directory", "name directories that do not contain each other")


def _check_axes(spec: ProgramSpec) -> None:
    """Refuse axes if the program's rank numbering is unknown, or if their product is not the rank count. Raises HpcMpError."""
    p = spec.parallel
    keys = [name for name, field in ProgramParallel.model_fields.items() if getattr(p, name) != field.default]
    if spec.program.axes is None:
        if keys:
            raise HpcMpError(f"[parallel] {', '.join(keys)}", "has no effect: it is unknown how the program numbers its ranks",
                             f"set program.axes: {', '.join(NUMBERINGS)} or letters; or leave [parallel] out")
        return
    if spec.program.start != "rank":
        raise HpcMpError(f"program.axes = {shown(spec.program.axes)} with program.start = {shown(spec.program.start)}",
                         "has no effect: with this start hpc-mp does not number the ranks",
                         'set program.start = "rank", or leave axes out')
    cut = p.tensor * p.pipeline * p.context
    sizes = f"tensor({p.tensor}) × pipeline({p.pipeline})" + (f" × context({p.context})" if p.context > 1 else "")
    if spec.ranks % cut or (p.data is not None and cut * p.data != spec.ranks):
        product = sizes + (f" × data({p.data})" if p.data is not None else "")
        raise HpcMpError(f"[parallel] {product}", f"does not equal the {spec.ranks} ranks of nodes({spec.job.nodes}) × "
                         f"ranks_per_node({spec.job.ranks_per_node})", "change these numbers until the products agree")
