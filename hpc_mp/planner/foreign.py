"""Configurations of other frameworks as keys of a job file, with an answer for each of their own keys."""

import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.job.elsewhere import elsewhere
from hpc_mp.job.parallel import Parallel
from hpc_mp.job.spec import Data, Train
from hpc_mp.job.values import leaves, toml_value

# "OURS: PATTERN=A|B …;": what keys set if they have one of these values; without them, by a number or a word of ``elsewhere``.
# The first row that fits counts; of keys that set the same, the later row. OURS: a key of a job file, or in capitals what is
# combined below; "+" joins several, "*" is the value. "-": no effect; "as …": what it counts as.
TABLE = """tensor: tensor_model_parallel_size tp_size *autotp_size; pipeline: pipeline_model_parallel_size pp_size stages;
context: context_parallel_size cp_size; expert: expert_model_parallel_size ep_size; exp_avg_dtype=bf16: exp_avg_dtype=bf16;
context_method: cp_comm_type; sequence=true: sequence_parallel=true; order=DPT: use_tp_pp_dp_mapping=true;
virtual_stages+schedule=interleaved_1f1b: num_virtual_stages_per_* virtual_pipeline_model_*; LAYERS+schedule=interleaved_1f1b:
num_layers_per_virtual_*; LAYERS: layers_per_stage; PIECE: pp_microbatch_size; schedule=interleaved_1f1b+virtual_stages=2:
pp_schedule=interleaved1f1b; schedule: pp_schedule; zero: stage zero_stage; zero=0: strategy=ddp; zero=1:
use_distributed_optimizer=true *sharding_strategy=optim; zero=2: *sharding_strategy=2|optim_grads|shard_grad_op
fsdp=shard_grad_op; zero=3: use_torch_fsdp2=true *sharding_strategy=1|optim_grads_params|full_shard distributed_type=fsdp
fsdp=true|full_shard; zero=3+NODE=true: *sharding_strategy=4|hybrid_shard fsdp=hybrid_shard; zero=2:
reshard_after_forward=false; reduce=microbatch: defer_fsdp_grad_sync=false; SAMPLES: micro_batch_size
train_micro_batch_size_per_gpu local_batch_size per_device_train_batch_size; global_batch: global_batch_size train_batch_size;
microbatches: gradient_accumulation_steps; sequence_length: seq_length seq_len max_length packed_sequence_size; precision:
precision mixed_precision param_dtype; precision=fp16: fp16=true fp16.enabled=true; precision=bf16: bf16=true bf16.enabled=true;
recompute=selective: recompute_activations=true; recompute: recompute_granularity activation_checkpointing
gradient_checkpointing; recompute=every-*: recompute_num_layers; recompute=full: recompute_method=block; PARAMETERS=3:
offload_param*device=cpu|nvme; OPTIMIZER=0: optimizer_cpu_offload=true offload_optimizer*device=cpu|nvme;
OPTIMIZER=0+PARAMETERS=3: fsdp=offload cpu_offload=true offload_params=true offload_policy._target_=*; optimizer=sgd:
optimizer=sgd optim=sgd optimizer.type=sgd; optimizer=adamw: optimizer._target_=torch.optim.adam; optimizer: optimizer optim
optimizer.type optimizer._target_; -: deepspeed=null fsdp_config=null expert_tensor_*=null zero_hpz_*=1 dp_replicate_size=1
version=1|2 strategy=fsdp2 reshard_after_forward=true distributed_type=multi_gpu|deepspeed|no fsdp=auto_wrap
recompute_method=uniform defer_fsdp_grad_sync=true round_virtual_*=up scale_grads_* activation_checkpoint_interval=0 lr_*
train_samples no_load_* log_* save* ckpt* wandb* val* dataloader* loss_fn.* rng.* checkpoint.* ci.* path_or_* *num_samples*
trust_* prescale_* tensorboard* *_dir min_lr steps_per_* wall_* merge_* split mock_* distributed_* dist_env.* recipe manual_gc
init_m* use_m* fp16.* bf16.* scheduler.* *_kwargs.* state_dict_* cpu_ram_* rot* norm* _target_ *_env* *_function machine_rank;
as part of the framework's factors: overlap_* *fusion* *flash* attention_b* backend.* tp_comm_* transformer_i* *bucket*
*prefetch* contiguous_* stage3_* reduce_scatter sub_group_size *.buffer_* *pin_memory aio.* *_wrap* compile.*; as sums and
masters in fp32: *_reduce_in_* torch_dtype reduce_dtype; as 16-bit products: fp8*; as a full batch: rampup_*; as experts of
equal load: *moe*; as the model of --model: *name_or_path vocab_* *tokenizer_* num_layers *hidden_size num_att* num_query_*
group_query* kv_channels max_position_* num_experts make_vocab_* swiglu position_* untie_* disable_bias*; as the ranks of the
plan: num_nodes devices num_proc* num_mach* dp_size dp_shard_*; as no recomputation: activation_checkpointing.*"""
ROWS = [(re.compile(key.replace(".", r"\.").replace("*", ".*")), values.split("|"), " ".join(ours.split())) for ours, names in (
    row.split(":") for row in TABLE.split(";")) for key, _, values in (word.partition("=") for word in names.split())]
KEYS = {name: f"{table.__name__.lower()}.{name}" for table in (Train, Data, Parallel) for name in table.model_fields}
INSIDE = re.compile(r"--|(?:(?:deepspeed|zero_optimization|distributed|pipeline|step_scheduler|model|config|data|dataset|ddp|"
                    r"packed_\w+|trainer|strategy|plugins|optim|mp_policy|\w+_config)\.)+(?:(?:fsdp|parallelism_config)_)?|")
HARMLESS = re.compile(r"(?:job|data|train|evaluate|checkpoint|track)\.(?!stage|compile|global|precision|optimi|seq|exp|mom)")
IDLE = {"tensor": ["sequence"], "context": ["context_method"], "pipeline": ["schedule", "virtual_stages", "LAYERS", "PIECE"]}
OFF, NOTHING, UNKNOWN = {"none", "null", "false", "0", "-1"}, "no effect on memory or speed", "not known"
PLAIN: dict[str, Any] = {"order": "PDT", "zero": 0, "precision": "fp32", "partition": "uniform"}
FORMS = (  # a framework, the beginnings of its keys, and its defaults
    ("DeepSpeed", ("train_batch", "train_micro", "zero_opt", "deepspeed.", "deepspeed_"), PLAIN | {"partition": "parameters"}),
    ("NeMo", ("distributed.", "step_scheduler."), PLAIN | {"zero": 3, "reduce": "step", "precision": "bf16"}),
    ("PyTorch FSDP", ("per_device_", "fsdp", "distributed_type", "output_dir"), PLAIN | {"reduce": "step"}),
    ("NeMo", ("trainer.",), PLAIN), ("Megatron-LM", ("--",), PLAIN))
ASSIGNED = re.compile(r"""^[ \t]*(?:export +)?(\w+)(\+?)=(\([^)]*\)|"[^"]*"|'[^']*'|[^\s;]*)""", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
BLOCK = re.compile(r"^[ \t]*(?:(if|for|while|until|case)|fi|done|esac)\b", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)(--[\w-]+)[=\s]*((?:(?!--)\S+\s*)*)")


class Answer(NamedTuple):
    """The fate of a key: "taken", "no effect on memory or speed", "not known", or "counted as …"; ``ours``: what it sets."""
    key: str
    value: Any
    kind: str
    ours: str


class Foreign(NamedTuple):
    """A configuration. ``settings``: keys of a job file, and in capitals what ``layout_settings`` resolves."""
    framework: str
    answers: tuple[Answer, ...]
    settings: dict[str, Any]


def read_foreign(path: Path) -> Foreign:
    """Read a configuration. Raises HpcMpError for a file that is unreadable or of no known form, and for an invalid number."""
    text = text_of(path, "configuration")
    try:
        pairs = list(leaves("", {str(key): value for key, value in yaml.safe_load(text.replace("\t", " ")).items()}).items()) \
            if path.suffix in (".json", ".yaml", ".yml") else _options(text)
        form = next(form for form in FORMS if any(key.startswith(form[1]) for key, _ in pairs))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, StopIteration, yaml.YAMLError) as error:
        raise HpcMpError(str(path), "is damaged, or has no keys of DeepSpeed, Megatron-LM, NeMo, transformers or accelerate "
                         f"({' '.join(str(error).split())[:200] or 'none is known'})", "correct it, or name another") from None
    meant = [_meaning(key, value) for key, value in pairs]
    made = dict(form[2])
    for _, _, settings in sorted(meant, key=lambda item: item[0]):
        made |= settings
    made = {key: item for key, item in made.items() if all(key not in IDLE[axis] or made.get(axis, 1) > 1 for axis in IDLE)}
    answers = []
    for (key, value), (_, kind, settings) in zip(pairs, meant, strict=True):
        left = {name: made[name] for name in settings if name in made}
        ours = ", ".join(f"{KEYS.get(name, name)} = {toml_value(item)}" for name, item in left.items())
        fate = NOTHING if not left else "taken" if left == settings else f"counted as {ours}"
        answers.append(Answer(key, value, kind or fate, ours))
    return Foreign(form[0], tuple(answers), {KEYS.get(name, name): item for name, item in made.items()})


def _meaning(key: str, value: Any) -> tuple[int, str, dict[str, Any]]:
    """Return the row of a key, its fate if it sets nothing, and what it sets. Raises HpcMpError for an invalid number."""
    name = INSIDE.sub("", key, 1).replace("-", "_")
    words = [str(word).lower() for word in (value if isinstance(value, list) else str(value).split())] or ["none"]
    rows = [(number, values, ours) for number, (pattern, values, ours) in enumerate(ROWS) if pattern.fullmatch(name)]
    if not rows and HARMLESS.match(elsewhere().names.get(last := name.rpartition(".")[2]) or KEYS.get(last, "")):
        rows = [(0, [""], "-")]
    allowed = {*words, "*", *(["true"] if words[0].startswith("$") else [])}  # a variable that a script does not set is empty
    fit = [row for row in rows if (row[1] == [""] and not {*words} <= OFF) or allowed & {*row[1]}][:len(words)]
    if rows and words == ["auto"] and not rows[0][2].startswith(("-", "as ")):
        return 0, "counted as the training arguments' value" if key.startswith("deepspeed") else UNKNOWN, {}
    settings: dict[str, Any] = {}
    for name, eq, here in (part.partition("=") for row in fit for part in row[2].split("+") if row[2][:3] not in ("-", "as ")):
        known, word = elsewhere().values.get(KEYS.get(name, ""), {}), here.replace("*", words[0]) if eq else " ".join(words)
        if (item := {"true": True, "false": False}.get(here) if eq else known.get(word)) is None:
            item = int(word) if word.isdecimal() and len(word) < 10 else word if eq or word in known.values() else None
        if item is None and known:
            return 0, UNKNOWN, {}
        if item is None:
            raise HpcMpError(f"{key} = {word}", "must be a whole number", "write the number in its place")
        settings[name] = item
    number, _, ours = fit[0] if fit else (0, [], "-" if rows and {*words} <= OFF else "?")
    return number, "" if settings else {"-": NOTHING, "?": UNKNOWN}.get(ours, f"counted {ours}"), settings


def _options(text: str) -> list[tuple[str, Any]]:
    """Return the options of the program that a script starts. What a condition or a loop sets becomes an unknown option."""
    plain = re.sub(r"\$\((?!\()[^()]*\)|`[^`]*`", "$_", re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text)).replace("\\\n", " ")
    variables: dict[str, str] = {}
    def expanded(text: str) -> str:
        for _ in range(3):  # a default may hold a variable
            text = VARIABLE.sub(lambda name: variables.get(name[1] or name[2], name[0] if name[3] is None else name[3]), text)
        return re.sub("[\"'()]", "", PRODUCT.sub(lambda product: str(prod(map(int, product[1].split("*")))), text))
    for match in ASSIGNED.finditer(plain):
        inside = sum(1 if block[1] else -1 for block in BLOCK.finditer(plain, 0, match.start())) > 0
        value = f"{'--' * ('--' in match[3])}{match[1]}-in-a-condition" if inside else expanded(match[3])
        variables[match[1]] = f"{variables.get(match[1], '')} {value}" if match[2] or inside else value
    lines = (expanded(line).partition(".py ")[2] for line in ASSIGNED.sub("", plain).splitlines())
    program = re.split(r"\s[\d&]?[>|;&]", max(lines, key=len, default=""))[0]
    return [(name, value.strip() or True) for name, value in OPTION.findall(program)]


def layout_settings(foreign: Foreign, ranks: int, ranks_per_node: int, layers: int) -> dict[str, Any]:
    """Return the settings of a job on so many ranks. Raises HpcMpError if no batch is stated, or a number does not divide."""
    made: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.context": 1} | foreign.settings
    axes = {axis: made[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "context")}
    data, samples = max(1, ranks // prod(axes.values())), made.get("PIECE", made.get("SAMPLES", 0))
    batch = made.get("train.global_batch", samples * made.get("parallel.microbatches", 1) * data)
    if not batch:
        raise HpcMpError(f"the configuration of {foreign.framework}", "states no batch size", "add the batch sizes to the file")
    count = made.get("parallel.microbatches", max(1, batch // (data * samples)) if samples else 1)
    made |= {"train.global_batch": batch, "parallel.microbatches": count}
    for what, size, factors in (("ranks", ranks, {"data": data} | axes), ("the global batch", batch, {
            "data": data, "microbatches": count, "microbatch size": samples or batch // (data * count)})):
        if size != prod(factors.values()):
            product = " × ".join(f"{name}({factor})" for name, factor in factors.items())
            raise HpcMpError(f"{what} = {size}", f"is not {product} = {prod(factors.values())}", "choose numbers that divide")
    made |= {"parallel.shard_degree": min(ranks_per_node, data * axes["context"])} if "NODE" in made else {}
    made |= {"parallel.virtual_stages": -(-layers // (made["LAYERS"] * axes["pipeline"]))} if "LAYERS" in made else {}
    offload = [name.lower() for name in ("OPTIMIZER", "PARAMETERS") if made.get(name, 4) <= made["parallel.zero"]]
    return {key: item for key, item in made.items() if "." in key} | ({"parallel.offload": offload} if offload else {})
