"""Configurations of other frameworks as keys of a job file, with an answer for each of their own keys.

Scripts are not run: variables and arrays are expanded, and what a condition or a loop sets is not known.
"""

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
from hpc_mp.layout.models.shape import NAMES

# "OURS: PATTERN=A|B …;": what keys set if they have one of these values; without them, by a number or a word of ``elsewhere``.
# The first row that fits counts; of keys that set the same, the later row. OURS: a key of a job file, a field of a model, or in
# capitals what is combined below; "+" joins several. "-": no effect; "as …": what it counts as.
TABLE = """tensor: tensor_model_parallel_size tp_size *autotp_size; pipeline: pipeline_model_parallel_size pp_size stages;
context: context_parallel_size cp_size; expert: expert_model_parallel_size ep_size; context+context_method=ulysses: sp_size;
context_method: cp_comm_type; sequence=true: sequence_parallel=true; order=DPT: use_tp_pp_dp_mapping=true;
schedule=interleaved_1f1b+virtual_stages=2: pp_schedule=interleaved1f1b; schedule: pp_schedule; PIECE: pp_microbatch_size;
virtual_stages: num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size; LAYERS:
num_layers_per_virtual_pipeline_stage layers_per_stage; zero: stage zero_stage; zero=0: strategy=ddp
*sharding_strategy=3|no_shard; zero=1: use_distributed_optimizer=true *sharding_strategy=optim; zero=2:
*sharding_strategy=2|optim_grads|shard_grad_op fsdp=shard_grad_op; zero=3: use_torch_fsdp2=true
*sharding_strategy=1|optim_grads_params|full_shard distributed_type=fsdp fsdp=true|full_shard; zero=3+NODE=true:
*sharding_strategy=4|hybrid_shard fsdp=hybrid_shard; REPLICAS: dp_replicate_size; RESHARD=true: reshard_after_forward=true;
RESHARD=false: reshard_after_forward=false; reduce=microbatch: defer_fsdp_grad_sync=false; SAMPLES: micro_batch_size
train_micro_batch_size_per_gpu local_batch_size per_device_train_batch_size; global_batch: global_batch_size train_batch_size;
microbatches: gradient_accumulation_steps; sequence_length: seq_length seq_len max_length packed_sequence_size; precision:
precision mixed_precision param_dtype; precision=fp16: fp16=true fp16.enabled=true; precision=bf16: bf16=true
bf16.enabled=true; recompute=selective: recompute_activations=true; recompute: recompute_granularity activation_checkpointing
gradient_checkpointing; GROUP: recompute_num_layers; GROUP=1: recompute_method=block; PARAMETERS=3:
offload_param?device=cpu|nvme; OPTIMIZER=0: optimizer_cpu_offload=true offload_optimizer?device=cpu|nvme;
OPTIMIZER=0+PARAMETERS=3: fsdp=offload cpu_offload=true offload_params=true offload_policy._target_=*; optimizer=sgd:
optimizer=sgd optim=sgd optimizer.type=sgd; optimizer=adamw: optimizer._target_=torch.optim.adam; optimizer: optimizer optim
optimizer.type optimizer._target_; exp_avg_dtype=bf16: exp_avg_dtype=bf16; compile=true: torch_compile=true; model_type=llama:
swiglu=true; num_hidden_layers: num_layers; hidden_size: hidden_size; intermediate_size: *ffn_hidden_size; num_attention_heads:
num_attention_heads; num_key_value_heads: num_query_groups; head_dim: kv_channels; max_position_embeddings:
max_position_embeddings; num_experts_per_tok: moe_router_topk; vocab_size=50257: tokenizer_type=gpt2bpetokenizer;
vocab_size=32000: tokenizer_type=llama2tokenizer; vocab_size: vocab_size; model_type=mixtral+num_local_experts: num_experts;
ROWS: make_vocab_size_divisible_by; tie_word_embeddings=false: untie_embeddings_and_output_weights=true; -: deepspeed=null
fsdp_config=null expert_tensor_parallel_size=null zero_hpz_partition_size=1 strategy=fsdp2|megatron_fsdp version=1|2
distributed_type=multi_gpu|deepspeed|no fsdp=auto_wrap recompute_method=uniform tokenizer_type use_megatron_fsdp
position_embedding_type defer_fsdp_grad_sync=true round_virtual_stages_to_pp_multiple=up activation_checkpoint_interval=0
scale_grads_in_schedule group_query_attention disable_bias_linear lr_* log_* save* ckpt* tensorboard* wandb* steps_per_print
wall_clock_* *_dir data_cache* *tokenizer* merge_file split mock_data init_method_std distributed_* dist_env.* recipe exit_*
manual_gc* use_mcore_models fp16.* bf16.* scheduler.* do_* *_kwargs.* state_dict_type cpu_ram_* sync_module_* rotary_*
normalization _target_ *environment *_function machine_rank; as what the framework's own factors hold: overlap_* *fusion*
*flash* attention_backend attn_implementation backend.* tp_comm_* transformer_impl *bucket* *prefetch* contiguous_gradients
stage3_* reduce_scatter sub_group_size *.buffer_* *pin_memory aio.* use_orig_params *_wrap_policy *_cls_to_wrap; as sums and
masters in fp32: *grad_accum_* *reduce_in_* torch_dtype reduce_dtype output_dtype; as 16-bit products: fp8* fp4*; as a full
batch: rampup_batch_size; as host memory: *nvme_path; as equally many tokens of each expert: *moe*; as the model of --model:
*name_or_path vocab_file; as the ranks of the plan: num_nodes devices num_processes num_machines dp_size dp_shard_size; as no
recomputation: activation_checkpointing.*"""
ROWS = [(re.compile(name.replace(".", r"\.").replace("?", ".").replace("*", ".*")), values.split("|"), " ".join(ours.split()))
        for ours, _, names in (row.partition(":") for row in TABLE.split(";"))
        for name, _, values in (word.partition("=") for word in names.split())]
KEYS = {name: f"{table.__name__.lower()}.{name}" for table in (Train, Data, Parallel) for name in table.model_fields}
INSIDE = re.compile(r"--|(?:(?:deepspeed|zero_optimization|distributed|pipeline|step_scheduler|model|config|data|dataset|ddp|"
                    r"packed_\w+|trainer|strategy|plugins|optim|mp_policy|\w+_config)\.)+(?:(?:fsdp|parallelism_config)_)?|")
HARMLESS = re.compile(r"(?:job|data|train|evaluate|checkpoint|track)\.(?!stage|compil|global|precis|optimi|sequence|exp_|mom|expert)")
IDLE = {"tensor": ["sequence"], "context": ["context_method"], "pipeline": ["schedule", "virtual_stages", "LAYERS", "PIECE"]}
OFF, NOTHING, UNKNOWN = {"none", "null", "false", "0", "-1"}, "no effect on memory or speed", "not known"
PLAIN: dict[str, Any] = {"order": "PDT", "zero": 0, "precision": "fp32", "partition": "uniform"}
AUTOMODEL = {"zero": 3, "RESHARD": "auto", "reduce": "step", "precision": "bf16"}
MEGATRON = {"model_type": "gpt2", "tie_word_embeddings": True}
FORMS = (  # the framework, the beginnings of its keys, what it does by default, and what "auto" is
    ("DeepSpeed", ("train_batch_size", "train_micro_", "zero_optimization."), {"partition": "parameters"}, UNKNOWN),
    ("NeMo", ("distributed.", "step_scheduler."), AUTOMODEL, UNKNOWN),
    ("NeMo", ("trainer.",), MEGATRON, UNKNOWN), ("Megatron-LM", ("--",), MEGATRON, UNKNOWN),
    ("DeepSpeed", ("deepspeed.", "deepspeed_config."), {"partition": "parameters"}, "counted as the training arguments' value"),
    ("PyTorch FSDP", ("per_device_", "fsdp", "distributed_type", "output_dir"), {"reduce": "step"}, UNKNOWN))
ASSIGNED = re.compile(r"""^[ \t]*(?:export +)?(\w+)(\+?)=(\([^)]*\)|"[^"]*"|'[^']*'|[^\s;]*)""", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
BLOCK = re.compile(r"^[ \t]*(?:(if|for|while|until|case)|fi|done|esac)\b", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)(--[\w-]+)[=\s]*((?:(?!--)\S+\s*)*)")


class Answer(NamedTuple):
    """The fate of a key: "taken", "no effect on memory or speed", "not known", or "counted as …"; ``ours``: what it sets."""
    key: str
    value: Any
    kind: str
    ours: str


class Foreign(NamedTuple):
    """A configuration. ``settings``: keys of a job file, and in capitals what ``layout_settings`` resolves; ``config``: of the
    model, in Hugging Face's names, None if the file does not state its sizes."""
    framework: str
    answers: tuple[Answer, ...]
    settings: dict[str, Any]
    config: dict[str, Any] | None


def read_foreign(path: Path) -> Foreign:
    """Read a configuration. Raises HpcMpError for a file that is unreadable or of no known form, and for an invalid number."""
    text = text_of(path, "configuration")
    try:
        pairs = list(leaves("", {str(key): value for key, value in yaml.safe_load(text.replace("\t", " ")).items()}).items()) \
            if path.suffix in (".json", ".yaml", ".yml") else _options(text)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise HpcMpError(str(path), f"is not a table of keys ({' '.join(str(error).split())[:200]})", "correct it") from None
    form = next((form for form in FORMS if any(key.startswith(form[1]) for key, _ in pairs)), None)
    if form is None:
        raise HpcMpError(str(path), "has no key of a known framework", "name one of DeepSpeed, Megatron-LM, NeMo or transformers")
    meant = [_meaning(key, value, form[3]) for key, value in pairs]
    made: dict[str, Any] = PLAIN | form[2]
    for _, _, settings in sorted(meant, key=lambda item: item[0]):
        made |= settings
    made = {key: item for key, item in made.items() if all(key not in IDLE[axis] or made.get(axis, 1) > 1 for axis in IDLE)}
    reshard = made.get("RESHARD", True)
    if made["zero"] == 3 and (reshard is False or (reshard == "auto" and made.get("pipeline", 1) > 1)):
        made["zero"] = 2
    config = {name: item for name, item in made.items() if name in NAMES or name == "model_type"}
    if stated := {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"} <= config.keys():
        rows = made.get("ROWS", 128) * made.get("tensor", 1)
        config["vocab_size"] = -(-config["vocab_size"] // rows) * rows
    answers = []
    for (key, value), (_, kind, settings) in zip(pairs, meant, strict=True):
        left = {name: made[name] for name in settings if name in made}
        ours = ", ".join(f"{KEYS.get(name, name)} = {toml_value(item)}" for name, item in left.items())
        fate = "counted as the model of --model" if left.keys() & config.keys() and not stated else \
            "taken" if left == settings else f"counted as {ours}"
        answers.append(Answer(key, value, kind or (fate if left else NOTHING), ours))
    others = {KEYS.get(name, name): item for name, item in made.items() if name not in config}
    return Foreign(form[0], tuple(answers), others, config if stated else None)


def _meaning(key: str, value: Any, auto: str) -> tuple[int, str, dict[str, Any]]:
    """Return the row of a key, its fate if it sets nothing, and what it sets. Raises HpcMpError for an invalid number."""
    name = INSIDE.sub("", key, 1).replace("-", "_")
    words = [str(word).lower() for word in (value if isinstance(value, list) else str(value).split())] or ["none"]
    rows = [(number, values, ours) for number, (pattern, values, ours) in enumerate(ROWS) if pattern.fullmatch(name)]
    if not rows and HARMLESS.match(elsewhere().names.get(last := name.rpartition(".")[2]) or KEYS.get(last, "")):
        rows = [(0, [""], "-")]
    switch = {"true"} if words[0].startswith("$") else set()  # a variable that a script does not set is empty
    fit = [row for row in rows if (row[1] == [""] and not {*words} <= OFF) or {*words, "*", *switch} & {*row[1]}][:len(words)]
    if rows and words == ["auto"] and not rows[0][2].startswith(("-", "as ")):
        return 0, auto, {}
    settings: dict[str, Any] = {}
    for setting in (setting for _, _, ours in fit if ours != "-" and not ours.startswith("as ") for setting in ours.split("+")):
        name, given, here = setting.partition("=")
        known, word = elsewhere().values.get(KEYS.get(name, ""), {}), here if given else " ".join(words)
        if (item := {"true": True, "false": False}.get(here) if given else known.get(word)) is None:
            item = int(word) if word.isdecimal() and len(word) < 10 else word if given or word in known.values() else None
        if item is None and known:
            return 0, UNKNOWN, {}
        if item is None:
            raise HpcMpError(f"{key} = {word}", "must be a whole number", "write the number in its place")
        settings[name] = item
    number, _, ours = fit[0] if fit else (0, [], "-" if rows and {*words} <= OFF else "?")
    return number, "" if settings else {"-": NOTHING, "?": UNKNOWN}.get(ours, f"counted {ours}"), settings


def _options(text: str) -> list[tuple[str, Any]]:
    """Return the options of the Python program that a script starts."""
    plain = re.sub(r"\$\((?!\()[^()]*\)|`[^`]*`", "$_", re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text)).replace("\\\n", " ")
    variables: dict[str, str] = {}

    def expanded(text: str) -> str:
        for _ in range(3):  # a default may hold a variable
            text = VARIABLE.sub(lambda name: variables.get(name[1] or name[2], name[0] if name[3] is None else name[3]), text)
        return re.sub("[\"'()]", "", text)

    for match in ASSIGNED.finditer(plain):
        inside = sum(1 if block[1] else -1 for block in BLOCK.finditer(plain, 0, match.start())) > 0
        value = f"--{match[1]}-in-a-condition" if inside else expanded(match[3])
        variables[match[1]] = f"{variables.get(match[1], '')} {value}" if match[2] or inside else value
    lines = (expanded(line).partition(".py ")[2] for line in ASSIGNED.sub("", plain).splitlines())
    program = re.split(r"\s[\d&]?[>|;&]", max(lines, key=len, default=""))[0]
    return [(name, value.strip() or True) for name, value in OPTION.findall(program)]


def layout_settings(foreign: Foreign, ranks: int, ranks_per_node: int, layers: int) -> dict[str, Any]:
    """Return the settings of a job on so many ranks, of a model with so many layers. Raises HpcMpError if the file states no
    batch, or if a number does not divide."""
    made: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.context": 1} | foreign.settings
    axes = {axis: made[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "context")}
    data, samples = max(1, ranks // prod(axes.values())), made.get("PIECE", made.get("SAMPLES", 0))
    batch = made.get("train.global_batch", samples * made.get("parallel.microbatches", 1) * data)
    if not batch:
        raise HpcMpError(f"the configuration of {foreign.framework}", "states no batch size", "add the batch sizes to the file")
    count = made.get("parallel.microbatches", max(1, batch // (data * samples)) if samples else 1)
    samples, replicas = samples or batch // (data * count), made.get("REPLICAS", -(-ranks // ranks_per_node))
    shards = data * axes["context"] // replicas if {"REPLICAS", "NODE"} & made.keys() else 0
    made |= {"parallel.shard_degree": shards} if shards else {}
    made |= {"train.global_batch": batch, "parallel.microbatches": count}
    for what, size, factors in (
            ("ranks", ranks, {"data": data} | axes),
            ("the global batch", batch, {"data": data, "microbatches": count, "microbatch size": samples}),
            ("data × context", data * axes["context"] if shards else 0, {"replicas": replicas, "shards": shards})):
        if size != prod(factors.values()):
            product = " × ".join(f"{name}({factor})" for name, factor in factors.items())
            raise HpcMpError(f"{what} = {size}", f"is not {product} = {prod(factors.values())}", "choose numbers that divide")
    if "LAYERS" in made:
        made["parallel.virtual_stages"] = -(-layers // (made["LAYERS"] * axes["pipeline"]))
    if made.get("parallel.virtual_stages", 1) > 1:
        made.setdefault("parallel.schedule", "interleaved_1f1b")
    if made.get("parallel.recompute") == "full" and made.get("GROUP", 1) > 1:
        made["parallel.recompute"] = f"every-{made['GROUP']}"
    offload = [name.lower() for name in ("OPTIMIZER", "PARAMETERS") if made.get(name, 4) <= made["parallel.zero"]]
    return {key: item for key, item in made.items() if "." in key} | ({"parallel.offload": offload} if offload else {})
