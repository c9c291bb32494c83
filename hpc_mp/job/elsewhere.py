"""The names that other trainers use for keys and values of a job file, and their equivalents here.

The names come from Hugging Face's Trainer and TRL, DeepSpeed, Megatron-LM, torchtitan, torchrun, Lightning and sbatch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

# ours: the names that others use. Ours is a key, or a few words that describe the equivalent.
NAMES: dict[str, str] = {
    "job.name": "job_name run_name experiment_name",
    "job.nodes": "nnodes num_nodes n_nodes node_count number_of_nodes num_machines",
    "job.ranks_per_node": "gpus_per_node nproc_per_node ntasks_per_node tasks_per_node num_gpus num_gpus_per_node "
                          "n_gpus_per_node gpus ngpus num_processes procs_per_node devices local_world_size ranks",
    "job.time_limit": "time walltime wall_time timelimit timeout max_time",
    "job.directory": "output_dir output_directory out_dir save_dir run_dir runs_dir work_dir workdir dump_folder",
    "job.device": "accelerator use_cpu no_cuda use_cuda",
    "model.pretrained": "model_name_or_path model_name model_path pretrained_model_name_or_path checkpoint_path base_model "
                        "hf_model pretrained_path from_pretrained init_from load_from",
    "model.config": "config_name model_config architecture model_args",
    "data.files": "dataset data_path train_file train_files train_data dataset_path dataset_name data_files data_dir dataset_dir "
                  "train_data_path datasets corpus path paths file train_dataset",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_dir tokenizer_model vocab_file",
    "data.sequence_length": "seq_len seq_length seqlen max_seq_length max_seq_len max_length sequence_len block_size "
                            "context_length context_len max_sequence_length model_max_length cutoff_len ctx_len n_ctx",
    "parallel.tensor": "tensor_parallel tp tp_size tp_degree tensor_parallel_size tensor_model_parallel_size "
                       "tensor_parallel_degree model_parallel_size mp_size",
    "parallel.pipeline": "pipeline_parallel pp pp_size pp_degree pipeline_parallel_size pipeline_model_parallel_size "
                         "pipeline_parallel_degree num_stages",
    "parallel.context": "context_parallel cp cp_size cp_degree context_parallel_size context_parallel_degree ulysses_degree "
                        "ring_degree",
    "parallel.expert": "expert_parallel ep ep_size ep_degree expert_parallel_size expert_model_parallel_size "
                       "expert_parallel_degree",
    "parallel.sequence": "sequence_parallel sp enable_sequence_parallel",
    "parallel.virtual_stages": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage vpp virtual_pipeline "
                               "interleave",
    "parallel.schedule": "pipeline_schedule pipeline_parallel_schedule pp_schedule",
    "parallel.zero": "zero_stage zero_optimization deepspeed_stage zero_level fsdp sharding_strategy "
                     "use_distributed_optimizer",
    "parallel.shard_degree": "data_parallel_shard_degree dp_shard hsdp_shard_size",
    "parallel.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations "
                          "recompute_granularity checkpoint_activations use_gradient_checkpointing enable_gradient_checkpointing",
    "parallel.offload": "offload_optimizer offload_param cpu_offload optimizer_offload offload_optimizer_device",
    "train.steps": "max_steps num_steps train_steps total_steps training_steps n_steps num_train_steps max_train_steps "
                   "train_iters iters max_iters iterations num_iterations num_training_steps",
    "train.epochs": "num_train_epochs num_epochs n_epochs epoch max_epochs train_epochs nepochs",
    "train.global_batch": "batch_size global_batch_size train_batch_size total_batch_size bs batch gbs effective_batch_size",
    "train.learning_rate": "lr max_lr base_lr peak_lr initial_lr init_lr learning_rate_init",
    "train.lr_schedule": "lr_scheduler lr_scheduler_type scheduler lr_decay_style lr_decay scheduler_type learning_rate_schedule",
    "train.warmup_steps": "warmup lr_warmup_steps num_warmup_steps lr_warmup_iters warmup_iters warmup_num_steps",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "train.eps": "adam_epsilon adam_eps epsilon",
    "train.optimizer": "optim optimizer_name optimizer_type",
    "train.weight_decay": "wd decay weight_decay_rate l2",
    "train.clip": "max_grad_norm gradient_clipping clip_grad grad_clip gradient_clip gradient_clip_val clip_grad_norm max_norm "
                  "grad_norm_clip",
    "train.dropout": "hidden_dropout attention_dropout dropout_rate dropout_p",
    "train.seed": "random_seed data_seed manual_seed",
    "train.compile": "torch_compile use_torch_compile jit_compile",
    "train.precision": "dtype torch_dtype mixed_precision training_dtype param_dtype compute_dtype autocast amp",
    "evaluate.files": "validation_file validation_files eval_file eval_files valid_files valid_data eval_dataset validation_data "
                      "test_file eval_data held_out",
    "evaluate.every": "eval_steps eval_interval eval_every evaluation_steps val_interval val_check_interval eval_iters",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval ckpt_interval checkpoint_every save_freq "
                        "checkpoint_steps",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints keep_checkpoints keep_last_n",
    "checkpoint.resume": "resume_from_checkpoint resume_from load_checkpoint load resume_path restore",
    "sweep.grid": "sweep_parameters hyperparameters hparams search_space param_space",
    "sweep.runs": "array array_values multirun trials experiments",
    "sweep.simultaneous": "array_parallelism slurm_array_parallelism max_concurrent max_concurrent_trials max_parallel "
                          "concurrency throttle n_jobs array_task_throttle",
    "slurm.account": "project billing_account slurm_account",
    "slurm.partition": "queue slurm_partition partitions",
    "slurm.extra": "sbatch_args sbatch slurm_args extra_args options",
    "slurm.container": "image container_image singularity_image docker_image",
    "slurm.modules": "module",
    "slurm.conda": "conda_env",
    "slurm.setup": "pre_commands setup_commands commands",
    "environment.set": "env env_vars environment_variables envs variables",
}

# Options of sbatch, which belong in slurm.extra.
OPTIONS = frozenset({
    "cpus_per_task", "mem", "mem_per_cpu", "mem_per_gpu", "exclude", "nodelist", "mail_user", "mail_type", "gres",
    "gpus_per_task", "cpus_per_gpu", "gpu_bind", "cpu_bind", "mem_bind", "exclusive", "licenses", "nice", "comment",
    "begin", "deadline", "wckey", "core_spec", "time_min", "tmp", "hint", "distribution"})

# The same, for tables in which a name means a different key than elsewhere.
WITHIN: dict[str, dict[str, str]] = {
    "program": {
        **dict.fromkeys(("env", "env_vars", "environment_variables", "envs", "variables"), "program.environment"),
        **dict.fromkeys(("cmd", "script", "entrypoint", "args", "argv"), "program.command"),
        **dict.fromkeys(("cwd", "chdir", "workdir", "work_dir", "working_directory"), "program.directory"),
    },
}

# Keys without an equivalent: the alternative.
WORDS: dict[str, str] = {
    **dict.fromkeys(("packing", "sample_packing", "pack", "reset_position_ids", "reset_attention_mask"),
                    'samples are always packed: data.documents = "separate" keeps documents apart in them, "joined" does not'),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size", "per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch",
         "train_micro_batch_size_per_gpu", "device_batch_size", "local_batch_size", "mbs", "per_device_batch_size",
         "batch_size_per_gpu"),
        "here train.global_batch is the number of sequences per step, and parallel.microbatches the number of pieces of a "
        "replica's share: set global_batch to microbatch size × microbatches × data degree"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accum",
         "accumulation_steps", "grad_accumulation_steps", "num_microbatches"),
        "here parallel.microbatches is the number of pieces of a replica's share of train.global_batch, whose gradients add up: "
        "set parallel.microbatches, or leave it out"),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_fraction", "lr_warmup_fraction"), "set train.warmup_steps to that share of train.steps"),
    **dict.fromkeys(
        ("data_parallel", "dp", "dp_size", "dp_degree", "data_parallel_size", "data_parallel_degree", "dp_replicate"),
        "the data degree follows from the ranks: job.nodes × job.ranks_per_node / (tensor × pipeline × context)"),
    **dict.fromkeys(("world_size", "num_ranks", "total_gpus"), "ranks are job.nodes × job.ranks_per_node"),
    **dict.fromkeys(("bfloat16", "bf16", "use_bf16"), 'write precision = "bf16" in [train]'),
    **dict.fromkeys(("fp16", "float16", "half", "use_fp16"), 'write precision = "fp16" in [train]'),
    **dict.fromkeys(("fp32", "float32", "tf32"), 'write precision = "fp32" in [train], which is the default'),
    **dict.fromkeys(("fp64", "float64"), 'write precision = "fp64" in [train]'),
    **dict.fromkeys(("fp8", "float8", "load_in_8bit", "load_in_4bit", "quantization"),
                    'not supported: precision in [train] is "bf16", "fp16", "fp32" or "fp64"'),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "ds_config", "fsdp_config", "megatron", "megatron_lm", "accelerate"),
                    "hpc-mp has its own engine: use tensor, pipeline, zero and offload in [parallel], and precision in [train]; "
                    "leave it out"),
    **dict.fromkeys(("lora", "lora_r", "lora_rank", "lora_alpha", "peft", "use_lora", "qlora", "lora_config"),
                    "not supported: all parameters are trained; leave it out"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_every", "log_steps", "log_every_n_steps", "report_to", "wandb",
                     "tensorboard"),
                    "every step is in metrics.jsonl and the report of a run; leave it out"),
    **dict.fromkeys(("text_column", "text_field", "dataset_text_field", "text_key", "input_key", "prompt_key"),
                    'the keys of rows are "text", or "prompt" and "completion"; leave it out'),
    **dict.fromkeys(("chat_template",), "rows are used as they are: apply the template when you write them"),
    **dict.fromkeys(("shuffle",), "samples are always shuffled, with train.seed; leave it out"),
    **dict.fromkeys(("min_lr", "min_lr_ratio", "lr_end", "min_learning_rate"),
                    'not supported: train.lr_schedule "linear" and "cosine" fall to zero; leave it out'),
    **dict.fromkeys(("num_workers", "dataloader_num_workers", "pin_memory"),
                    "tokens are read from one mapped file; leave it out"),
    **dict.fromkeys(("flash_attention", "attn_implementation", "use_flash_attn", "flash_attn", "use_flash_attention_2"),
                    "torch's fused attention is used if possible; leave it out"),
    **dict.fromkeys(("master_addr", "master_port", "rdzv_endpoint", "rdzv_backend"), "ranks find each other; leave it out"),
}

OURS: Mapping[str, str] = {name: ours for ours, names in NAMES.items() for name in names.split()}

# A key and the values that others use for it: the equivalents here.
VALUES: dict[str, dict[str, Any]] = {
    "train.precision": {
        **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf16-mixed", "bf16-true", "bfloat"), "bf16"),
        **dict.fromkeys(("float16", "half", "torch.float16", "16-mixed", "16", "fp16-mixed"), "fp16"),
        **dict.fromkeys(("float32", "float", "torch.float32", "single", "32", "32-true", "full", "no", "tf32"), "fp32"),
        **dict.fromkeys(("float64", "double", "torch.float64", "64", "64-true"), "fp64"),
        **dict.fromkeys(("mixed", "amp", "auto"), "bf16")},
    "train.optimizer": dict.fromkeys(
        ("adam", "adamw_torch", "adamw_hf", "adamw_torch_fused", "fused_adam", "fusedadam", "torch.optim.adamw"), "adamw"),
    "train.lr_schedule": {
        **dict.fromkeys(("cosine_with_warmup", "cosine_annealing", "cosineannealinglr", "warmup_cosine", "cosine_with_min_lr",
                         "cosine_decay", "warmupcosinelr"), "cosine"),
        **dict.fromkeys(("constant_with_warmup", "none", "warmup_constant", "warmuplr", "const"), "constant"),
        **dict.fromkeys(("linear_with_warmup", "linear_decay", "warmupdecaylr", "warmup_linear"), "linear")},
    "job.device": {**dict.fromkeys(("gpu", "gpus", "nvidia", "cuda:0", "rocm", "amd", "hip"), "cuda"), "cpus": "cpu"},
    "data.documents": {**dict.fromkeys(("packed", "packing", "concat", "concatenated", "join", "pack", "true"), "joined"),
                       **dict.fromkeys(("separated", "masked", "split", "isolated", "block_diagonal", "false"), "separate")},
    "parallel.recompute": {**dict.fromkeys(("true", "all", "block", "blocks", "full_block", "uniform"), "full"),
                           **dict.fromkeys(("false", "off"), "none"), **dict.fromkeys(("attention", "core_attn"), "selective")},
    "parallel.schedule": {"interleaved": "interleaved_1f1b", "interleaved1f1b": "interleaved_1f1b", "zb": "zero_bubble",
                          "zb1p": "zero_bubble", "zerobubble": "zero_bubble", "interleavedzerobubble": "zero_bubble",
                          "zbv": "zero_bubble_v", "zbvzerobubble": "zero_bubble_v", "1f1b": "1f1b", "gpipe": "gpipe",
                          "bfs": "breadth_first", "loopedbfs": "breadth_first", "afab": "gpipe"},
    "parallel.zero": {f"{name}{stage}": stage for stage in range(4)
                      for name in ("stage", "stage_", "stage ", "zero", "zero-", "zero_")}
                     | {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "true": 1, "false": 0},
    "parallel.context_method": {"ring_attention": "ring", "deepspeed": "ulysses", "all_to_all": "ulysses", "a2a": "ulysses",
                                "p2p": "ring"},
    "parallel.offload": {"cpu": ["optimizer"], "nvme": ["optimizer"], "true": ["optimizer"], "optimizer": ["optimizer"],
                         "parameters": ["parameters"], "activations": ["activations"], "false": "none"},
    "slurm.mpi": {"pmi-2": "pmi2", "openmpi": "pmix"},
}


def key_here(name: str, section: str, keys: Iterable[str], value: Any = None) -> tuple[str, str] | None:
    """Return the rule and the remedy for a key of other trainers; None for a key that is unknown there too.

    Args:
        section: the table that contains the key; "" for none.
        keys: the keys of that table.
        value: the given value.
    """
    plain = name.lower().replace("-", "_").removeprefix("__")
    place = f"[{section}]" if section else "a job file"
    if (advice := WORDS.get(plain)) is not None:
        return f"is not a key of {place}", advice
    if plain in OPTIONS:
        written = json.dumps(value, ensure_ascii=False) if value is not None else "…"
        return "is an option of sbatch, not a key", f"write extra = {{ {plain.replace('_', '-')} = {written} }} in [slurm]"
    ours = f"{section}.{plain}" if section and plain in keys else WITHIN.get(section, OURS).get(plain, OURS.get(plain))
    if ours is None:
        return None
    table, _, key = ours.rpartition(".")
    if ours == "data.files" and isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not os.path.lexists(value):
        return ("is a dataset of the Hugging Face Hub, but data.files must be files that all nodes see",
                f'write its rows into a file with load_dataset("{value}", split="train").to_json("train.jsonl"), and set '
                'files = ["train.jsonl"] in [data]')
    return f"is {ours} here", f"write {key} = … " + ("in its place" if table == section else f"below the line [{table}]")


def value_here(key: str, value: Any) -> str | None:
    """Return ``key = value`` as written here, for a value that other trainers accept; None if it is unknown there too."""
    ours = VALUES.get(key, {}).get(str(value).lower())
    return None if ours is None else f"{key.rpartition('.')[2]} = {json.dumps(ours)}"
