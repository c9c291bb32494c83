"""The tables of a job file about the cluster: the request to Slurm, the environment of the ranks, and notifications at the end
of the run. The tables about the training are in `spec`."""

from typing import Literal

from pydantic import Field

from hpc_mp.job.values import Address, Count, Dependency, Flag, Line, Name, NonNegative, Option, Section, Variable


class Component(Section):
    """Nodes of one kind in a heterogeneous job; omitted keys are as in ``[slurm]``."""

    nodes: Count
    partition: Line | None = None
    constraint: Line | None = None
    extra: dict[Option, Flag] = Field(default={})


class Slurm(Section):
    """The settings that the site needs. They have no effect on emulated nodes."""

    partition: Line | None = None
    """One or several, `"a,b"`; a partition unknown to Slurm is refused. Default: the site's. Example: `"gpu"`."""
    account: Line | None = None
    """Default: your default account. Example: `"proj"`."""
    qos: Line | None = None
    """Default: the account's. Example: `"high"`."""
    constraint: Line | None = None
    """Features of nodes, in sbatch's syntax. Example: `"a100&ib"`."""
    reservation: Line | None = None
    """Example: `"monday"`."""
    switches: Line | None = None
    """The maximum number of leaf switches, and the time to wait for such nodes. Refused unless the topology is a tree. Example:
    `"1@00:30:00"`."""
    gpu_type: Name | None = None
    """Default: the partition's only type. Required if the partition has several types and no constraint or list of nodes selects
    one. Example: `"h100"`."""
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = "auto"
    """`"gpus-per-node"`, `"gres"` or `"none"`; `auto` takes the form that the site's Slurm supports. Example: `"gres"`."""
    mpi: Literal["none", "pmix", "pmi2", "mpirun"] = "none"
    """`"pmix"` or `"pmi2"`: ranks meet through MPI, see [MPI](../user/jobs.md#mpi). With `program.start = "mpi"` also `"mpirun"`:
    the mpirun on `PATH` in the job starts the ranks. Default with that start: the first of `"pmix"` and `"pmi2"` that the site's
    srun supports, else `"mpirun"`. Example: `"pmix"`."""
    components: tuple[Component, ...] = ()
    """A heterogeneous job: tables of `nodes`, `partition`, `constraint`, `extra`. Example: `[{ nodes = 1 }, { nodes = 3,
    constraint = "big" }]`."""
    grace: Count = 120
    """Seconds before the time limit at which ranks save and stop; at most a quarter of the limit. Example: `600`."""
    retries: NonNegative = 3
    """The number of consecutive failures of machines without a new checkpoint after which another attempt still starts; 0 = none.
    Example: `10`."""
    depends: tuple[Dependency, ...] = ()
    """The runs or jobs for which this job waits: runs (a directory, or `DIRECTORY/NAME` for the newest run of a job) or ids of
    Slurm jobs. They must have completed; with `"afterany:…"` ended in any way, with `"afternotok:…"` failed. See
    [dependencies](../user/jobs.md#dependencies). Example: `["runs/pretrain"]`."""
    chain: NonNegative = 0
    """The number of jobs queued behind this one. Not with a sweep. Example: `3`."""
    container: Line | None = None
    """An image (`.sif`, `.img`, `.sqsh`) or its name in a registry, see [containers](../user/jobs.md#containers). Example:
    `"images/torch.sif"`."""
    container_runtime: Literal["auto", "pyxis", "apptainer", "singularity"] = "auto"
    """`"pyxis"`, `"apptainer"` or `"singularity"`; `auto`: pyxis if srun has `--container-image`, else apptainer. Example:
    `"apptainer"`."""
    container_mounts: tuple[Line, ...] = ()
    """`SOURCE[:TARGET[:FLAGS]]`, in addition to the mounts that the run needs. Example:
    `["/usr/share/site:/usr/share/site:ro"]`."""
    modules: tuple[Line, ...] = ()
    """`module purge`, then these. Example: `["cuda/12.8"]`."""
    conda: Line | None = None
    """An environment by name or directory; its Python runs the ranks. Example: `"envs/train"`."""
    venv: Line | None = None
    """A virtual environment; its Python runs the ranks. Example: `".venv"`."""
    python: Line | None = None
    """The ranks' interpreter; it takes precedence over conda and venv. Default: the interpreter of the launch, in a container
    `python3`. Example: `"/usr/bin/python3.12"`."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run on the first node before the ranks; their exports reach all ranks. Example: `["ulimit -c 0"]`."""
    extra: dict[Option, Flag] = Field(default={})
    """Any other option of sbatch, by its long name; `true` for an option without a value. The error for an unknown option
    suggests the nearest one; the error for an option that the script sets names the key to use. `exclusive = false` shares nodes,
    `mem = false` and `cpus-per-task = false` use the site's defaults. Example: `{ licenses = "fs:1", mail-type = "END" }`."""


class Environment(Section):
    """Environment variables of every rank, and the place of its caches."""

    profile: Name | None = None
    """The variables of a platform, by name (`hpc-mp env` on a node prints it) or `"auto"`: the profile that the doctor recorded
    for this cluster; without a record there is none, and a note says so. `"none"` disables the site's profile. See
    [environment.md](../user/environment.md). Example: `"azure-ndv5"`."""
    local: Line | None = None
    """A directory on each node's own disk. Default: `$TMPDIR`, else `/tmp`. Example: `"/local/scratch"`."""
    stage: bool = False
    """Pack the environment of the ranks' Python once, and unpack it on every node's own disk before the ranks start. See
    [staging](../user/jobs.md#staging-and-caches)."""
    health: bool = True
    """`hpc-mp doctor` checks every node before the ranks start, and the network that NCCL uses there. The job is queued again
    without nodes that have an error. See [doctor.md](../user/doctor.md#before-every-job). Example: `false`."""
    set: dict[Variable, str] = Field(default={})
    """Variables of every rank, literally; they take precedence over all others. Example: `{ NCCL_IB_HCA = "mlx5" }`."""


class Notify(Section):
    """Notification when the run ends: once, not at every restart by Slurm."""

    command: tuple[Line, ...] = ()
    """A program with its arguments, started without a shell when the run ends (under Slurm on the job's first node), in the run
    directory, for at most a minute. Its [variables](../user/jobs.md#notification) describe the outcome. Example: `["curl", "-d",
    "a run has ended", "ntfy.sh/my-topic"]`."""
    mail: Address | None = None
    """The recipient of one mail from Slurm when the run has ended. Example: `"me@example.org"`."""
