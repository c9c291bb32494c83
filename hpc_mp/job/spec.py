"""The job file: one validated, frozen description of a run. Every table is a class, every key a field with its documentation.

The string below a field says what the key does; the reference of the documentation is made from these strings, the types and
the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpc_mp.job.errors import wrong
from hpc_mp.job.values import (
    Betas,
    Config,
    Count,
    Flag,
    Line,
    Name,
    NonNegative,
    Option,
    Order,
    Partition,
    PathName,
    Patterns,
    RankMap,
    Rate,
    Share,
    Time,
    Variable,
    seconds_of,
)

MICROBATCH_TOKENS = 8192  # one sequence of Llama 3's training length: what torchtitan's recipes give a GPU at a time
MOST_MICROBATCHES = 2**16  # a rank's schedule has as many actions of each kind


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Job(Section):
    """Who runs where."""

    name: Name = "job"
    """What squeue shows; runs lie in `directory/name`. Example: `"llama"`."""
    nodes: Count = 1
    """Exactly that many. Example: `4`."""
    ranks_per_node: Count = 1
    """One task and, with `cuda`, one GPU each. Example: `8`."""
    time_limit: Time = "01:00:00"
    """As Slurm writes times. Ranks save and stop before it and the job is queued again: a shorter limit may start sooner.
    Example: `"1-12"`."""
    directory: PathName = "runs"
    """Where runs lie: a file system that all nodes share. Example: `"../runs"`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cuda` where the partition lists GPUs, else `cpu`. Say `"cuda"` where the site has GPUs and does not count them. Example:
    `"cuda"`."""
    heartbeat_timeout: NonNegative = 30
    """Seconds without a sign of life until a node counts as lost; 0 = never. Too short: a busy network looks like a dead node.
    Example: `60`."""
    step_timeout: NonNegative = 1800
    """Seconds without a finished step until ranks count as hung; 0 = never. The first step has three times as long. Example:
    `600`."""
    start_timeout: NonNegative = 86400
    """Seconds from the ranks' meeting until tokens, process groups and the model are ready; 0 = any time. Terabytes of text take
    hours, once. Example: `7200`."""
    load_timeout: NonNegative = 7200
    """Seconds that reading first values or a checkpoint may take; 0 = any time. A shared file system that all ranks read from at
    once may give each of them little. Example: `14400`."""
    save_timeout: NonNegative = 7200
    """Seconds that saving a checkpoint may take; 0 = any time. Example: `14400`."""


class Model(Section):
    """Which model: a Hugging Face checkpoint directory, or a config to start from random weights."""

    pretrained: PathName | None = None
    """A Hugging Face checkpoint directory: its weights, its config and, if tokenizer files lie there, its tokenizer."""
    config: Config | None = None
    """A table with `model_type` (the family, by Hugging Face's name, for example `"gpt2"`) and sizes under Hugging Face's names:
    random weights. A name that the family does not know is refused."""
    stage: bool = False
    """The checkpoint in `model.pretrained` is copied to every node's own disk; not once the run has one of its own."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.pretrained is None) == (self.config is None):
            given = "neither pretrained nor config" if self.pretrained is None else "both pretrained and config"
            raise wrong(f"has {given}", "set pretrained to the directory of a checkpoint, or config to a table with "
                        "model_type and sizes")
        return self


class Data(Section):
    """What to train on."""

    files: Patterns
    """Required. Paths or globs (`**` for any depth) of text files and of `.jsonl` files with rows `{"text": …}` or `{"prompt":
    …, "completion": …}`; a prompt does not count in the loss. Compressed files and parquet are refused."""
    tokenizer: PathName | None = None
    """A directory that holds a tokenizer. Left out: the checkpoint's own, else one is trained on the files and kept in
    `DIRECTORY/.cache`."""
    sequence_length: Count
    """Required. Tokens of a sample; at most the model's positions."""
    stage: bool = False
    """The token files are copied to every node's own disk, by its first rank."""


class Parallel(Section):
    """How the ranks share the work. The data degree is what is left: ranks / (tensor x pipeline x context)."""

    tensor: Count = 1
    """Cuts every layer over so many ranks. Talks most: keep it inside a node."""
    pipeline: Count = 1
    """Puts layers on so many stages. Sends little; stages wait for each other unless there are many microbatches."""
    context: Count = 1
    """Only 1 is built."""
    expert: Count = 1
    """Only 1 is built."""
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    """What data ranks share out: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters. Less memory, more
    messages."""
    shard_degree: Count | None = None
    """Over how many data ranks ZeRO shares out; a divisor of the data degree. Left out: over all."""
    order: Order = "auto"
    """Letters D, P, T (right-most varies fastest over ranks), `"cluster"` = DPT, `"spread"` = TPD. `auto` takes the order in
    which a step waits least for links between nodes, and says for how many seconds where `hpc-mp doctor` has measured them.
    `hpc-mp placement` shows all."""
    rank_map: RankMap = "auto"
    """The node of every rank, see [placement](../how-it-works/placement.md). Example: `[1, 1, 0, 0]`."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Or `"gpipe"`, which holds the activations of all microbatches. `hpc-mp schedule --draw` draws them."""
    virtual_stages: Count = 1
    """Only 1 is built."""
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES, strict=True)] | None = None
    """Pieces of a replica's batch per step. Left out: without a pipeline so many that each has at most 8,192 tokens, else up to 4
    per stage."""
    partition: Partition = "auto"
    """Layers of every stage, such as `[5, 7]`. `auto` balances their cost, embedding and head included."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Only `"none"` is built."""
    offload: Literal["none", "optimizer", "activations"] = "none"
    """Only `"none"` is built."""


class Train(Section):
    """The optimization."""

    steps: Count
    """Required. Optimizer steps in all, those before a resume included."""
    global_batch: Count
    """Required. Sequences per step over all ranks; a multiple of data degree × microbatches."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Or `"sgd"`."""
    learning_rate: Rate = 3e-4
    """After the warm-up."""
    betas: Betas = (0.9, 0.95)
    """Of AdamW."""
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    """Of AdamW."""
    momentum: Share = 0.0
    """Of SGD; refused with AdamW."""
    warmup_steps: NonNegative = 0
    """Steps in which the rate rises along a line."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; `"linear"` and `"cosine"` fall to zero at `train.steps`."""
    weight_decay: Rate = 0.0
    """On every parameter that `train.no_decay` does not name."""
    no_decay: tuple[Line, ...] = ("*.bias", "*norm.weight", "*.ln_?.weight")
    """Parameters without weight decay: patterns (`*`, `?`) of their Hugging Face names. Left out: biases and norms; `[]`: none.
    Example: `["*.bias", "*norm.weight", "*embed_tokens*"]`."""
    clip: Rate = 1.0
    """Largest gradient norm; 0 = off."""
    skip_steps: NonNegative = 10
    """A step whose gradient norm is not finite is skipped: nothing changes, and its samples are named in the log. So many in a
    run; one more ends it. 0 = the first one does."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """`"bf16"` computes in bf16 and keeps parameters, gradient sums and optimizer state in fp32; `"fp64"` for proofs. fp16 is
    not built."""
    dropout: Share | None = None
    """Overrides every probability of the model's config."""
    seed: NonNegative = 0
    """Of first values, sample order and dropout."""


class Checkpoint(Section):
    """When state is saved. The last step always is."""

    every: NonNegative = 0
    """Steps between two checkpoints; 0 = none in between. What a dead node costs is the steps since the last one."""
    keep: Count = 2
    """How many stay."""
    resume: PathName | None = None
    """Another run to take the state from, steps and optimizer included, for a new run of its own."""


class Component(Section):
    """Nodes of one kind in a heterogeneous job; what is left out is as in ``[slurm]``."""

    nodes: Count
    partition: Line | None = None
    constraint: Line | None = None
    extra: dict[Option, Flag] = {}


class Slurm(Section):
    """What the site needs; nothing of it has an effect on emulated nodes."""

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
    mpi: Literal["none", "pmix", "pmi2"] = "none"
    """`"pmix"` or `"pmi2"`: ranks meet through MPI, see [MPI](../user/jobs.md#mpi). Example: `"pmix"`."""
    array: tuple[dict[str, Any], ...] = ()
    """One job per table of overrides, see [arrays](../user/jobs.md#arrays-and-heterogeneous-jobs). Example: `[{ "train.seed"
    = 1 }, {
    "train.seed" = 2 }]`."""
    components: tuple[Component, ...] = ()
    """A heterogeneous job: tables of `nodes`, `partition`, `constraint`, `extra`. Example: `[{ nodes = 1 }, { nodes = 3,
    constraint = "big" }]`."""
    grace: Count = 120
    """Seconds before the time limit in which ranks save and stop; at most a quarter of the limit. Example: `600`."""
    retries: NonNegative = 3
    """So many failures of machines in a row without a new checkpoint are followed by another attempt; 0 = none. Example: `10`."""
    chain: NonNegative = 0
    """Jobs queued behind this one. Not with an array. Example: `3`."""
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
    extra: dict[Option, Flag] = {}
    """Any other option of sbatch, by its long name; `true` for one without a value. An unknown one is answered with the
    nearest,
    one that the script settles with the key to use. `exclusive = false` shares nodes, `mem = false` leaves memory to the
    site. Example: `{ licenses = "fs:1", mail-type = "END" }`."""


class Environment(Section):
    """Environment variables of every rank, and where its caches lie."""

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
    """`hpc-mp doctor` looks at every node before the ranks start, and at the network that NCCL takes there; a node with an
    error
    is left out, and the job queued again without it. See [doctor.md](../user/doctor.md#before-every-job). Example: `false`."""
    set: dict[Variable, str] = {}
    """Variables of every rank, literally; the last word. Example: `{ NCCL_IB_HCA = "mlx5" }`."""


class JobSpec(Section):
    """A whole job file. Frozen; every value is either given or has the default shown here."""

    job: Job = Job()
    model: Model
    data: Data
    parallel: Parallel = Parallel()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()

    @property
    def ranks(self) -> int:
        return self.job.nodes * self.job.ranks_per_node

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which ranks save and stop: ``slurm.grace``, at most a quarter of the limit."""
        limit = seconds_of(self.job.time_limit)
        return self.slurm.grace if limit is None else max(1, min(self.slurm.grace, limit // 4))

    @property
    def data_degree(self) -> int:
        """D: how many replicas of the model train side by side."""
        p = self.parallel
        return self.ranks // (p.tensor * p.pipeline * p.context)

    @property
    def shard_degree(self) -> int:
        """Over how many ranks of the data axis ZeRO shards (1 for ZeRO-0)."""
        if self.parallel.zero == 0:
            return 1
        return self.parallel.shard_degree or self.data_degree

    @property
    def microbatches(self) -> int:
        """Microbatches per replica and optimizer step.

        Default: without a pipeline as few as have at most ``MICROBATCH_TOKENS`` each, else up to 4 per stage.
        """
        if self.parallel.microbatches is not None:
            return self.parallel.microbatches
        batch = self.train.global_batch // max(1, self.data_degree)
        if self.parallel.pipeline == 1:
            least = -(-batch * self.data.sequence_length // MICROBATCH_TOKENS)
            return next((m for m in range(max(1, least), batch) if batch % m == 0), max(1, batch))
        per_replica = self.train.global_batch // self.data_degree
        most = min(per_replica, 4 * self.parallel.pipeline, MOST_MICROBATCHES)
        return next(m for m in range(most, 0, -1) if per_replica % m == 0)

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.train.global_batch // (self.data_degree * self.microbatches)
