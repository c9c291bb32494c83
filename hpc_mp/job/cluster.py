"""The tables of a job file about the cluster: the request to Slurm, the environment of the ranks, and notifications at the end
of the run. The tables about the training are in `spec`."""

from __future__ import annotations

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
    """One or several, `"a,b"`; one that Slurm does not know is refused. Left out: the site's default one. Example: `"gpu"`."""
    account: Line | None = None
    """Left out: your default one. Example: `"proj"`."""
    qos: Line | None = None
    """Left out: the account's. Example: `"high"`."""
    constraint: Line | None = None
    """Features of nodes, as sbatch takes them. Example: `"a100&ib"`."""
    reservation: Line | None = None
    """Example: `"monday"`."""
    switches: Line | None = None
    """Leaf switches to span at most, and how long to wait for that. Refused where the topology is no tree. Example:
    `"1@00:30:00"`."""
    gpu_type: Name | None = None
    """Left out: the partition's only type; refused where it has several and no constraint or list of nodes chooses. Example:
    `"h100"`."""
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = "auto"
    """`"gpus-per-node"`, `"gres"` or `"none"`; `auto` takes the form that the site's Slurm knows. Example: `"gres"`."""
    mpi: Literal["none", "pmix", "pmi2", "mpirun"] = "none"
    """`"pmix"` or `"pmi2"`: ranks meet through MPI, see [MPI](../user/jobs.md#mpi). With `program.start = "mpi"` also `"mpirun"`:
    the one on `PATH` in the job starts them. Left out there: the first of the two that the site's srun has, else `"mpirun"`.
    Example: `"pmix"`."""
    components: tuple[Component, ...] = ()
    """A heterogeneous job: tables of `nodes`, `partition`, `constraint`, `extra`. Example: `[{ nodes = 1 }, { nodes = 3,
    constraint = "big" }]`."""
    grace: Count = 120
    """Seconds before the time limit in which ranks save and stop; at most a quarter of the limit. Example: `600`."""
    retries: NonNegative = 3
    """So many failures of machines in a row without a new checkpoint are followed by another attempt; 0 = none. Example: `10`."""
    depends: tuple[Dependency, ...] = ()
    """What must have come before this job starts: runs (a directory, or `DIRECTORY/NAME` for the newest run of a job) or ids of
    Slurm jobs, which must have completed; with `"afterany:…"` ended in any way, with `"afternotok:…"` failed. See
    [dependencies](../user/jobs.md#dependencies). Example: `["runs/pretrain"]`."""
    chain: NonNegative = 0
    """Jobs queued behind this one. Not with a sweep. Example: `3`."""
    container: Line | None = None
    """An image (`.sif`, `.img`, `.sqsh`) or its name in a registry, see [containers](../user/jobs.md#containers). Example:
    `"images/torch.sif"`."""
    container_runtime: Literal["auto", "pyxis", "apptainer", "singularity"] = "auto"
    """`"pyxis"`, `"apptainer"` or `"singularity"`; `auto`: pyxis where srun knows `--container-image`, else apptainer. Example:
    `"apptainer"`."""
    container_mounts: tuple[Line, ...] = ()
    """`SOURCE[:TARGET[:FLAGS]]` beside what the run needs. Example: `["/usr/share/site:/usr/share/site:ro"]`."""
    modules: tuple[Line, ...] = ()
    """`module purge`, then these. Example: `["cuda/12.8"]`."""
    conda: Line | None = None
    """An environment by name or directory; its Python runs the ranks. Example: `"envs/train"`."""
    venv: Line | None = None
    """A virtual environment; its Python runs the ranks. Example: `".venv"`."""
    python: Line | None = None
    """The ranks' interpreter, before conda and venv. Left out: the launching one, in a container `python3`. Example:
    `"/usr/bin/python3.12"`."""
    setup: tuple[str, ...] = ()
    """Lines of bash on the first node, before the ranks; what they export reaches all ranks. Example: `["ulimit -c 0"]`."""
    extra: dict[Option, Flag] = Field(default={})
    """Any other option of sbatch, by its long name; `true` for one without a value. An unknown one is answered with the nearest,
    one that the script settles with the key to use. `exclusive = false` shares nodes, `mem = false` leaves memory to the
    site. Example: `{ licenses = "fs:1", mail-type = "END" }`."""


class Environment(Section):
    """Environment variables of every rank, and the place of its caches."""

    profile: Name | None = None
    """The variables of a platform, by name (`hpc-mp env` on a node says which it is) or `"auto"`: the one that the doctor noted
    for this cluster; none if it noted none, and that is said. `"none"` switches a site's off. See
    [environment.md](../user/environment.md). Example: `"azure-ndv5"`."""
    local: Line | None = None
    """A directory on each node's own disk. Left out: `$TMPDIR`, else `/tmp`. Example: `"/local/scratch"`."""
    stage: bool = False
    """The environment of the ranks' Python is packed once and unpacked on every node's own disk before they start. See
    [staging](../user/jobs.md#staging-and-caches)."""
    health: bool = True
    """`hpc-mp doctor` looks at every node before the ranks start, and at the network that NCCL takes there; a node with an error
    is left out, and the job queued again without it. See [doctor.md](../user/doctor.md#before-every-job). Example: `false`."""
    set: dict[Variable, str] = Field(default={})
    """Variables of every rank, literally; the last word. Example: `{ NCCL_IB_HCA = "mlx5" }`."""


class Notify(Section):
    """Notification when the run ends: once, not at every restart by Slurm."""

    command: tuple[Line, ...] = ()
    """A program with its arguments, started without a shell where the run ends (under Slurm on the job's first node), in the run
    directory, for a minute at most. How the run ended is in its [variables](../user/jobs.md#notification). Example:
    `["curl", "-d", "a run has ended", "ntfy.sh/my-topic"]`."""
    mail: Address | None = None
    """Whom Slurm sends a mail when the run has ended: one mail, of the job that ends it. Example: `"me@example.org"`."""
