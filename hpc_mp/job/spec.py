"""The job file: one validated, frozen description of a run. Every table is a class, every key a documented field.

The string below a field documents the key. The reference is generated from these strings, the class docstrings and the
defaults.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpc_mp.job import values
from hpc_mp.job.cluster import Environment, Notify, Slurm
from hpc_mp.job.errors import wrong
from hpc_mp.job.learning_rate import ScheduleOptions
from hpc_mp.job.lora import Lora
from hpc_mp.job.parallel import MOST_MICROBATCHES, Parallel
from hpc_mp.job.rows import Form, Labelled, RowForm
from hpc_mp.job.sweep import Sweep
from hpc_mp.layout.learning_rate import ScheduleOfRate
from hpc_mp.layout.optimizers import VECTORS
from hpc_mp.layout.schedule.names import stages_per_rank

MICROBATCH_TOKENS = 8192  # one sequence of Llama 3's training length: the microbatch per GPU in torchtitan's recipes
MEMORY_WEIGHT = 0.0  # SageMaker's 0.8 is for models that do not fit: stages of equal bytes wait for the slowest stage
UNCOUNTED = 0  # steps of a job with epochs, until its tokens are counted
HORIZON = 2  # one forward and one backward: in that time, 1F1B in steady state offloads one microbatch and fetches one


class Job(values.Section):
    """The placement of the job's ranks on nodes."""

    name: values.Name = "job"
    """The name in squeue; runs are in `directory/name`. Example: `"llama"`."""
    nodes: values.Count = 1
    """The number of nodes. Example: `4`."""
    ranks_per_node: values.Count = 1
    """Each rank is one task and, with `cuda`, has one GPU. Example: `8`."""
    time_limit: values.Time = "01:00:00"
    """In a format of Slurm. Ranks save and stop before the limit, and the job is queued again: a shorter limit may start sooner.
    Example: `"1-12"`."""
    directory: values.PathName = "runs"
    """The directory of all runs, on a file system that all nodes share. Example: `"../runs"`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` means `cuda` if the partition lists GPUs, else `cpu`. Set `"cuda"` if the site has GPUs that Slurm does not list.
    Example: `"cuda"`."""
    heartbeat_timeout: values.NonNegative = 30
    """Seconds without a heartbeat until a node counts as lost; 0 = never. If too short, a busy network looks like a dead node.
    Example: `60`."""
    meet_timeout: values.NonNegative = 90
    """Seconds that a rank waits for the others at the start, plus a tenth of a second for each rank; the missing ranks are then
    named. For a program in a Slurm job without a container, ranks that have not started are named one minute later. 0 = a day.
    Raise it if the file system from which all ranks load their packages is slow. Example: `600`."""
    step_timeout: values.NonNegative = 1800
    """Seconds without a finished step until ranks count as hung; 0 = never. The limit is three times as long for the first step
    and for each pass of an evaluation, which computes the forwards of a step. Example: `600`."""
    start_timeout: values.NonNegative = 86400
    """Seconds from the rendezvous of the ranks until tokens, process groups and the model are ready; 0 = no limit. Tokenizing
    terabytes of text takes hours, once. Example: `7200`."""
    load_timeout: values.NonNegative = 7200
    """Seconds for reading initial values or a checkpoint; 0 = no limit. A shared file system can be slow if all ranks read from
    it at once. Example: `14400`."""
    save_timeout: values.NonNegative = 7200
    """Seconds for saving a checkpoint; 0 = no limit. Example: `14400`."""


OF_EACH_S = 0.1  # additional seconds per rank: all ranks load their packages from one file system


def time_to_meet(job: Job) -> float:
    """Return ``job.meet_timeout`` for all ranks, in seconds; 0 = no timeout."""
    return job.meet_timeout and job.meet_timeout + OF_EACH_S * job.nodes * job.ranks_per_node


def grace_of(slurm: Slurm, job: Job) -> int:
    """Return ``slurm.grace``, at most a quarter of ``job.time_limit``; in seconds."""
    limit = values.seconds_of(job.time_limit)
    return slurm.grace if limit is None else max(1, min(slurm.grace, limit // 4))


class Model(values.Section):
    """The model: a Hugging Face checkpoint directory, or a config to start from random weights."""

    pretrained: values.PathName | None = None
    """A Hugging Face checkpoint directory: its weights, its config and its tokenizer. `data.tokenizer` can name another
    tokenizer."""
    config: values.Config | None = None
    """A table with `model_type` (Hugging Face's name of the family, for example `"gpt2"`) and sizes under Hugging Face's names.
    The weights are random. A name that the family does not have is refused."""
    stage: bool = False
    """Copy the checkpoint in `model.pretrained` to every node's own disk. A run that has its own checkpoint does not copy it
    again."""

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if (self.pretrained is None) == (self.config is None):
            if self.config is not None:
                raise wrong("has both pretrained and config", "leave config out to train a checkpoint, or pretrained to "
                            "start from random weights")
            raise wrong("has neither pretrained nor config", "set pretrained to the directory of a checkpoint, or config to a "
                        "table with model_type and sizes")
        return self


class Data(values.Section):
    """The training data."""

    files: values.Patterns
    """Required. Paths or globs (`**` for any depth) of text files, of rows in `.jsonl`, `.json`, `.parquet` and `.arrow` files,
    and of directories that `datasets` saved; text and JSON may end in `.gz` or `.zst`. They are read as streams. A file
    whose content does not match its name is refused. See [the data](../user/data.md)."""
    format: Form = "auto"
    """What rows hold. `"auto"`: `{"text": …}`, `{"prompt": …, "completion": …}` or `{"messages": […]}`, by their keys; one of
    `"text"`, `"prompt"` and `"messages"` chooses, if rows have the keys of several. `"sharegpt"`: `{"conversations": [{"from": …,
    "value": …}]}`. `"alpaca"`: `{"instruction": …, "input": …, "output": …}`. Of a prompt with its completion only the completion
    counts in the loss, of a chat only the assistant's turns. See [rows](../user/data.md#rows). Example: `"sharegpt"`."""
    text: tuple[values.Line, ...] = Field(("text",), min_length=1, max_length=2)
    """For classification: the key of the text in rows, or the keys of a pair of texts. Example: `["premise", "hypothesis"]`."""
    label: values.Line = "label"
    """For classification: the key of the class in rows: one of `data.labels`, or its number, from 0. Example: `"sentiment"`."""
    labels: tuple[values.Line, ...] = ()
    """For classification: the names of all classes, in the order of their numbers. They are written into the exported config. See
    [classification](../user/data.md#classification). Example: `["negative", "positive"]`."""
    template: values.PathName | None = None
    """A file with a chat template in Jinja, in place of the tokenizer's own. It is exported with the model. See
    [chats](../user/data.md#chats). Example: `"chatml.jinja"`."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """A mixture: the share of the samples that come from each pattern of `data.files`, in any unit. What ends early is passed
    again. Default: every sample is passed once in an epoch. See [mixtures](../user/data.md#mixtures). Example: `[0.7, 0.3]`."""
    tokenizer: values.PathName | None = None
    """A directory that holds a tokenizer. Default: the checkpoint's own. For a model with random weights, a tokenizer is trained
    on the files and kept in `DIRECTORY/.cache`."""
    sequence_length: values.Count
    """Required. Tokens of a sample; at most the model's positions."""
    prompt_length: values.Count | None = None
    """Required for models with an encoder (T5), and for these only: the places of a sample that the encoder has for a prompt and
    its end. The decoder has the rest of `data.sequence_length` for the completion and its end. Each row of `data.files`, of
    `format = "prompt"`, is a sample; one that is too long is refused. See [T5](../user/models.md#t5). Example: `512`."""
    documents: Literal["joined", "separate"] = "joined"
    """A sample can contain several documents (a text file, or a row). `"joined"`: tokens attend to earlier documents of their
    sample, and positions continue. `"separate"`: tokens attend only to their own document, and positions restart with each
    document; its first token is not a label, because nothing precedes it. Held-out text is treated in the same way. On a GPU
    in 16 bits this costs nothing: the kernel skips other documents. Otherwise masks are computed for 1,024 queries at a time.
    A run keeps its first setting. See [documents](../user/jobs.md#documents). Example: `"separate"`."""
    stage: bool = False
    """Copy the token files to every node's own disk; the node's first rank does it."""

    @property
    def form(self) -> RowForm:
        """The contents of rows."""
        return Labelled(self.text, self.label, self.labels, self.sequence_length) if self.labels else self.format


class LossScale(values.Section):
    """The loss scale of fp16: its initial value, and the conditions of its changes."""

    initial: Annotated[float, Field(gt=0, strict=True)] = 65536.0
    window: values.NonNegative = 1000
    hysteresis: values.Count = 2
    consecutive_hysteresis: bool = False
    minimum: Annotated[float, Field(gt=0, strict=True)] = 1.0


class ProfiledSteps(values.Section):
    """The window of torch's profiler: its number of steps, the first of them, and the ranks that write a trace."""

    steps: values.NonNegative = 0
    from_step: values.Count = 3
    on_ranks: tuple[values.NonNegative, ...] = (0,)


class Train(values.Section):
    """The optimization."""

    steps: values.Count = Field(default_factory=lambda: UNCOUNTED)  # not a meaningful default
    """Required, unless `train.epochs` is set. The total number of optimizer steps, including those before a resume."""
    epochs: Annotated[float, Field(gt=0, strict=True)] | None = None
    """Instead of `train.steps`: the number of times that every sample is trained on. `hpc-mp launch` tokenizes the text (as
    `hpc-mp data prepare` does, once), counts its samples and writes the number of steps, rounded up, into the run's job file.
    Example: `3`."""
    global_batch: values.Count
    """Required. Sequences per step over all ranks; a multiple of data degree × microbatches."""
    gradient_accumulation_steps: values.Count | None = None
    """Another name for `parallel.microbatches`: a step adds up the gradients of so many microbatches, each of global_batch /
    (data degree × this number) sequences. A job file has only one of the two. Example: `4`."""
    objective: Literal["next_token", "classification"] = "next_token"
    """`"classification"`: the classes of samples, by a head for `data.labels`; the loss is a mean over rows. See
    [classification](../user/training.md#classification). Example: `"classification"`."""
    optimizer: Literal["adamw", "sgd", "muon", "adafactor"] = "adamw"
    """`"adamw"`, `"sgd"`, `"muon"` (matrices of blocks by Muon, all else by AdamW) or `"adafactor"`: those of torch. See
    [optimizers](../user/training.md#optimizers)."""
    learning_rate: values.Rate = 3e-4
    """The rate after the warm-up."""
    betas: values.Betas = (0.9, 0.95)
    """For AdamW, also for the parameters that Muon leaves to it."""
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    """For AdamW."""
    exp_avg_dtype: Literal["bf16"] | None = None
    """`"bf16"`: AdamW keeps the mean of gradients in 16 bits, 2 bytes less for each parameter, and less exactly: see
    [optimizers](../user/training.md#optimizers). Default: as masters. Example: `"bf16"`."""
    momentum: values.Share = 0.0
    """For SGD; refused with other optimizers."""
    muon_momentum: values.Share = 0.95
    """For the matrices that Muon trains. Example: `0.9`."""
    warmup_steps: values.NonNegative = 0
    """Steps in which the rate rises linearly."""
    lr_factors: dict[values.Line, values.Rate] = Field(default={})
    """Other learning rates for some parameters: patterns (`*`, `?`, `[ab]`) of Hugging Face's names, with factors of the rate of
    a step. The first pattern that matches counts, and each must match a parameter. With 0 a parameter keeps its value. Example:
    `{ "lm_head.*" = 10.0, "*embed_tokens*" = 0.1 }`."""
    lr_schedule: ScheduleOfRate = "constant"
    """The schedule after the warm-up; `"linear"` and `"cosine"` fall to zero at `train.steps`. Transformers' other schedules have
    their names there, and the same rate in every step: `"constant_with_warmup"`, `"cosine_with_restarts"`, `"polynomial"`,
    `"inverse_sqrt"`, `"cosine_with_min_lr"`, `"cosine_warmup_with_min_lr"`, `"warmup_stable_decay"`. See [the
    learning rate](../user/training.md#the-learning-rate). Example: `"cosine_with_min_lr"`."""
    lr_schedule_options: ScheduleOptions = ScheduleOptions()
    """Options of transformers' schedules, with the names and defaults of its `lr_scheduler_kwargs`: `num_cycles`, `min_lr`,
    `min_lr_rate`, `warmup_lr_rate`, `lr_end`, `power`, `timescale`, `num_stable_steps`, `num_decay_steps`, `warmup_type`,
    `decay_type`, `min_lr_ratio`. An option that the schedule does not have is refused. Example: `{ min_lr_rate = 0.1 }`."""
    weight_decay: values.Rate = 0.0
    """For every parameter that `train.no_decay` does not match."""
    no_decay: tuple[values.Line, ...] = (VECTORS, "*bias")
    """Parameters without decay: patterns (`*`, `?`, `[ab]`) of Hugging Face's names; `"vectors"` stands for all of one dimension,
    such as norms. Default: these and all biases; `[]`: none. Example: `["vectors", "*bias", "*embed_tokens*"]`."""
    label_smoothing: values.Share = 0.0
    """The share of each label that is spread evenly over all words, as torch's `cross_entropy` has it. The loss of a step
    contains it, that of an evaluation does not. Example: `0.1`."""
    z_loss: values.Rate = 0.0
    """A factor of the z loss: the squared logarithm of the sum of the exponentials of a token's logits, a mean over labels that
    count. It keeps logits small. The loss of a step contains it, that of an evaluation does not. Example: `1e-4`."""
    clip: values.Rate = 1.0
    """The largest gradient norm; 0 = no limit."""
    skip_steps: values.NonNegative = 10
    """The number of steps in a run that may be skipped. A step whose gradient norm is not finite is skipped: nothing changes, and
    the log names its samples. One more such step ends the run; 0: the first one does."""
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """`"bf16"` and `"fp16"` compute in 16 bits and keep parameters, gradient sums and optimizer state in fp32; fp16 uses
    `train.loss_scale`. `"tf32"` is fp32 whose matrix products round their factors to 10 bits behind the point, which GPUs since
    the A100 compute several times as fast. `"fp64"` is for proofs."""
    compile: bool = False
    """Compile blocks and the loss with torch.compile: on a GPU a step takes a quarter less time, see [GPUs](../user/gpu.md), and
    the first one half a minute more. It needs a C compiler on every node and does not work with fp64. Numbers differ in the last
    bits."""
    loss_scale: LossScale = LossScale()
    """For fp16, with DeepSpeed's rule and defaults: a factor of the loss's gradient that preserves small gradients. It doubles
    after `window` steps without an overflow and halves at an overflow, down to `minimum`. It ignores `hysteresis` − 1 overflows
    first, and again after each growth (with `consecutive_hysteresis`, after each step without an overflow). `window = 0`: it
    stays constant. A step that overflows is skipped; it counts in `train.skip_steps` only if the scale cannot decrease. Example:
    `{ initial = 1024, window = 0 }`."""
    router_balance: values.Rate = 0.0
    """For models with experts: a factor of the routers' balance loss, see [models](../user/models.md#router-losses). 0 = none.
    Example: `1e-3`."""
    router_z: values.Rate = 0.0
    """For models with experts: a factor of the routers' z loss, see [models](../user/models.md#router-losses). 0 = none. Example:
    `1e-3`."""
    expert_capacity: Annotated[float, Field(gt=0, strict=True)] | None = None
    """For models with experts: a factor C. An expert takes at most ceil(C × sequence × choices of a token / experts) choices of
    each sample, the earliest positions first; the rest is dropped, in training and evaluation, see
    [models](../user/models.md#capacity). Default: nothing is dropped. Example: `1.25`."""
    dropout: values.Share | None = None
    """Overrides every dropout probability of the model's config."""
    seed: values.NonNegative = 0
    """For initial values, sample order and dropout."""
    profile: ProfiledSteps = ProfiledSteps()
    """Traces of torch's profiler, with phases, actions, layers and collectives by name: of so many consecutive `steps`, from
    `from_step` on, of some ranks. A step may take some hundred MB. See [a profile](../user/training.md#a-profile). Example:
    `{ steps = 2, from_step = 10, on_ranks = [0, 8] }`."""

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if (self.steps == UNCOUNTED) == (self.epochs is None):
            keys = "neither steps nor epochs" if self.epochs is None else "both steps and epochs"
            raise wrong(f"has {keys}", "set steps to the number of optimizer steps, or epochs to how many times the text is "
                        "trained on")
        return self


class Evaluate(values.Section):
    """The loss on held-out text: the mean over all its tokens that count, without dropout. Training is bit for bit the same with
    and without it."""

    files: tuple[values.PathName, ...] = ()
    """Paths or globs as in `data.files`. The text is tokenized and cut into samples as the training's, and every token is read
    once. Default: no evaluation. Example: `["corpus/held-out/*.txt"]`."""
    share: values.Share = 0.0
    """Instead of `evaluate.files`: the share of the documents in `data.files` (rows, or text files) that is held out. Whether a
    document is held out depends on its content alone: equal documents stay together, and a larger corpus holds out the same ones.
    They are never trained on. Example: `0.01`."""
    every: values.NonNegative = 0
    """Steps between two evaluations; 0 = none in between. There is always one after the last step. Example: `500`."""
    patience: values.NonNegative = 0
    """The run ends, as completed, after so many evaluations in a row that are not better than the best one before; 0 = never.
    Its best checkpoint is kept, see `checkpoint.keep`. Example: `3`."""
    gain: values.Rate = 0.0
    """For `patience`: how much less a loss, or more an accuracy, must be. Example: `0.01`."""
    best: Literal["loss", "accuracy"] = "loss"
    """Which evaluation is the best, for `patience` and the checkpoint that is kept: the one with the least loss or, of a
    classification, with the highest accuracy; of equal ones the first. Example: `"accuracy"`."""

    @property
    def active(self) -> bool:
        """True if the job evaluates."""
        return bool(self.files) or self.share > 0


class Checkpoint(values.Section):
    """The times at which state is saved. It is always saved after the last step."""

    every: values.NonNegative = 0
    """Steps between two checkpoints; 0 = none in between. A dead node costs the steps since the last checkpoint."""
    background: bool = False
    """Train on while a checkpoint is written: ranks wait for a copy of what they write in host memory, which takes as much of
    that. The last checkpoint is written at once. Example: `true`."""
    keep: values.Count = 2
    """The number of newest checkpoints to keep. The best one by `evaluate.best` is kept too, among those with an
    evaluation at their step: let `evaluate.every` divide `checkpoint.every`."""
    failures: values.NonNegative = 2
    """The number of consecutive failures to save a checkpoint after which the run stops; 0 = it continues. If a node could not
    write while others could, the job is queued again without it. Example: `1`."""
    resume: values.PathName | None = None
    """Another run from which a new run takes its state, including steps and optimizer."""


class Track(values.Section):
    """Copies of the numbers of `metrics.jsonl` and `evaluations.jsonl` for programs that show them. Rank 0 writes them, and what
    such a program lacks does not end a training."""

    to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """The programs: TensorBoard, Weights & Biases, MLflow. Their libraries must be installed where ranks run. See
    [tracking](../user/training.md#tracking). Example: `["tensorboard"]`."""
    experiment: values.Line | None = None
    """The project of W&B, or the experiment of MLflow. Default: `job.name`. Example: `"llama"`."""


class JobSpec(values.Section):
    """A whole job file. Frozen; every value is either given or has the default shown here."""

    job: Job = Job()
    model: Model
    data: Data
    parallel: Parallel = Parallel()
    train: Train
    lora: Lora = Lora()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()
    sweep: Sweep = Sweep()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()
    notify: Notify = Notify()

    @property
    def ranks(self) -> int:
        return self.job.nodes * self.job.ranks_per_node

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which ranks save and stop."""
        return grace_of(self.slurm, self.job)

    @property
    def data_degree(self) -> int:
        """D: the number of replicas of the model that train in parallel."""
        p = self.parallel
        return self.ranks // (p.tensor * p.pipeline * p.context)

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks of the pipeline."""
        p = self.parallel
        return p.pipeline * stages_per_rank(p.schedule, p.virtual_stages)

    @property
    def state_degree(self) -> int:
        """D × C: the number of ranks that train the same parameters, on different samples or different tokens of a sample."""
        return self.data_degree * self.parallel.context

    @property
    def shard_degree(self) -> int:
        """The number of these ranks over which ZeRO shards (1 for ZeRO-0)."""
        if self.parallel.zero == 0:
            return 1
        return self.parallel.shard_degree or self.state_degree

    @property
    def reduce(self) -> Literal["microbatch", "step"]:
        """The interval at which data ranks reduce gradients. With one microbatch both values are equivalent, and "microbatch"
        needs no whole gradients."""
        if self.parallel.zero < 2 or (self.parallel.reduce == "step" and self.microbatches > 1):
            return "step"
        return "microbatch"

    @property
    def profile(self) -> Path:
        """The file with measured seconds and bytes of the model's units."""
        return Path(self.parallel.profile or Path(self.job.directory) / ".cache" / f"profile-{self.job.name}.json")

    @property
    def memory_weight(self) -> float:
        """The weight of memory in a measured partition, between 0 and 1."""
        return MEMORY_WEIGHT if self.parallel.memory_weight is None else self.parallel.memory_weight

    @property
    def offload_horizon(self) -> int | None:
        """The number of computations before its backward at which a microbatch's activations are fetched; None: not offloaded."""
        p = self.parallel
        if "activations" not in p.offload:
            return None
        return HORIZON if p.offload_horizon is None else p.offload_horizon

    @property
    def microbatches(self) -> int:
        """Microbatches per replica and optimizer step. Default: without a pipeline, the fewest with at most ``MICROBATCH_TOKENS``
        tokens each. Otherwise up to 4 per pipeline rank; for interleaved 1F1B, a multiple of the ranks if one exists."""
        if (microbatches := self.parallel.microbatches or self.train.gradient_accumulation_steps) is not None:
            return microbatches
        batch = self.train.global_batch // max(1, self.data_degree)
        if self.parallel.pipeline == 1:
            least = -(-batch * self.data.sequence_length // MICROBATCH_TOKENS)
            divisors = [m for m in range(1, min(batch, MOST_MICROBATCHES) + 1) if batch % m == 0] or [1]
            return next((m for m in divisors if m >= least), divisors[-1])
        limit = max(1, min(batch, 4 * self.parallel.pipeline, MOST_MICROBATCHES))
        unit = self.parallel.pipeline if self.parallel.schedule == "interleaved_1f1b" else 1
        fitting = [m for m in range(limit, 0, -1) if batch % m == 0]
        return next((m for m in fitting if m % unit == 0), fitting[0])

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.train.global_batch // (self.data_degree * self.microbatches)
