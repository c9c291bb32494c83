"""The job file: what is wrong with it is said in one paragraph, what is right with it survives being written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_job import JOB

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import main
from hpc_mp.job import JobSpec, dump_job, load_job, resolve

ROOT = Path(__file__).resolve().parents[2]

FILES = 'files = ["text.txt"]'
SIZES = JOB[JOB.index("num_attention_heads"):JOB.index("[train]")]  # from the model's to those of the layout
LAST = 'NCCL_DEBUG = "WARN" }\n'  # the end of the file: what follows it stands in [environment]

# what is wrong: (a part of JOB, what stands there instead, the value, the rule, the remedy of the message)
MISTAKES: dict[str, tuple[str, str, str, str, str]] = {
    # types
    "text for a count": ("steps = 10", 'steps = "ten"', "train.steps = 'ten'", "must be a whole number", "without quotes"),
    "boolean for a count": ("steps = 10", "steps = true", "train.steps = true", "must be a whole number", "steps = 1"),
    "fraction for a count": ("steps = 10", "steps = 10.5", "train.steps = 10.5", "must be a whole number", "without quotes"),
    "1e30 for a count": ("steps = 10", "steps = 1e30", "train.steps = 1e+30", "must be a whole number", "exponent"),
    "list for a count": ("steps = 10", "steps = [10]", "train.steps = [10]", "must be a whole number", "for example"),
    "table for a count": ("steps = 10", "steps = { a = 1 }", "train.steps:", "must be a whole number", "for example"),
    "text for a number": ("steps = 10", 'steps = 10\nlearning_rate = "1e-3"', "train.learning_rate = '1e-3'",
                          "must be a number", "without quotes"),
    "boolean for a number": ("steps = 10", "steps = 10\nclip = true", "train.clip = true", "must be a number", "clip = 0.1"),
    "number for text": ('name = "small"', "name = 5", "job.name = 5", "must be text", "in quotes"),
    "text for a list": (FILES, 'files = "text.txt"', "data.files = 'text.txt'", "must be a list", 'files = ["text.txt"]'),
    "number in a list of text": (FILES, "files = [3]", "data.files[0] = 3", "must be text", "in quotes"),
    "text for a list of lines": ('["true"]', '"true"', "slurm.setup = 'true'", "must be a list", 'setup = ["true"]'),
    "number for a variable": ('"WARN"', "4", "environment.set.NCCL_DEBUG = 4", "must be text", "in quotes"),
    "number for a section": ("[slurm]\nsetup", "slurm = 5\nsetup", "train.slurm = 5", "is not a key of [train]", "keys are"),
    "text for the model": ("config = {", 'config = "gpt2"\n#', "model.config = 'gpt2'", "must be a table", "in braces"),
    "a date": ("steps = 10", "steps = 2026-01-01", "train.steps = ", "is a date or a time", "in quotes"),
    "missing tokenizer": (FILES, FILES + '\ntokenizer = "nowhere"', "data.tokenizer = ",
                          "is not a directory with a tokenizer", "name a directory"),
    "NaN": ("steps = 10", "steps = 10\neps = nan", "train.eps = nan", "must be finite", "write a number"),
    "infinity": ("steps = 10", "steps = 10\nclip = inf", "train.clip = inf", "must be finite", "write a number"),
    "10**400": ("steps = 10", f"steps = 1{'0' * 400}", "train.steps = 100000", "does not fit into 64 bits", "smaller"),
    "a number of 24000 bits": ("steps = 10", f"steps = 0x{'f' * 6000}", "train.steps = (a whole number of 24000 bits)",
                               "does not fit into 64 bits", "smaller"),
    "a number of 5000 digits": ("steps = 10", f"steps = {'1' * 5000}", "job.toml", "thousands of digits", "smaller"),
    # keys
    "misspelt key": ("steps = 10", "stepps = 10", "train.stepps = 10", "is not a key of [train]", "did you mean 'steps'?"),
    "misspelt section": ("[parallel]", "[paralel]", "paralel:", "is not a key of a job file", "did you mean 'parallel'?"),
    "key of another section": ("steps = 10", "steps = 10\nnodes = 2", "train.nodes = 2", "is not a key of [train]",
                               "nodes belongs to [job]"),
    "unknown key": ("steps = 10", "steps = 10\nxyz = 2", "train.xyz = 2", "is not a key of [train]", "the keys are steps, "),
    "missing key": ("global_batch = 16\n", "", "train.global_batch", "is required", "add it to [train]"),
    "no length": ("steps = 10\n", "", "train:", "has neither steps nor epochs", "set steps to the number"),
    "two lengths": ("steps = 10", "steps = 10\nepochs = 2", "train:", "has both steps and epochs", "set steps to the number"),
    "no epochs": ("steps = 10", "epochs = 0", "train.epochs = 0", "must be more than 0", "write a larger number"),
    "missing section": ("[train]\nsteps = 10\nglobal_batch = 16\n", "", "train:", "is required", "add [train]"),
    "no model": ("config = {", "#", "model:", "has neither pretrained nor config", "set pretrained to the directory"),
    "two models": ("config = {", 'pretrained = "."\nconfig = {', "model:", "has both pretrained and config", "leave config out"),
    "no family": ('model_type = "llama", ', "", "model.config:", "does not name the model's family", 'model_type = "gpt2"'),
    "unknown family": ('"llama"', '"lama"', "model_type = 'lama'", "is not one of gpt2, llama", "did you mean 'llama'? Use"),
    "sliding window": ('"llama"', '"qwen2", use_sliding_window = true', "use_sliding_window = true", "is not supported yet",
                       "leave it out"),
    "misspelt key of the model": ("hidden_size", "hidden_sise", "model.config.hidden_sise:",
                                  "is not a key of a llama configuration", "did you mean 'hidden_size'?"),
    "unknown activation": ('"llama"', '"llama", hidden_act = "foo"', "hidden_act = 'foo'", "supported activation", "choose"),
    "unknown kind of positions": ('"llama"', '"llama", rope_parameters = { rope_type = "foo" }', "rope_type = 'foo'",
                                  "is not a supported kind", "choose one of default, linear"),
    "padding beyond the vocabulary": ('"llama"', '"llama", pad_token_id = 99999999', "pad_token_id = 99999999",
                                      "must be a whole number from -", "pad_token_id"),
    "more choices than experts": ('"llama"', '"mixtral", num_local_experts = 2, num_experts_per_tok = 3',
                                  "num_experts_per_tok(3)", "is more than its num_local_experts(2)", "fewer experts"),
    "router's loss": ('"llama"', '"mixtral", output_router_logits = true', "output_router_logits = true", "is not supported yet",
                      "set it to false"),
    "router's noise": ('"llama"', '"mixtral", router_jitter_noise = 0.1', "router_jitter_noise = 0.1", "is not supported yet",
                       "set it to 0"),
    "several mistakes": ("steps = 10", "stepps = 10\nclip = true", "train.stepps = 10", "is not a key of [train]",
                         "Also wrong: train.clip = true: must be a number"),
    # ranges
    "negative size": ("steps = 10", "steps = -3", "train.steps = -3", "must be at least 1", "steps = 1 or more"),
    "no nodes": ("nodes = 1", "nodes = 0", "job.nodes = 0", "must be at least 1", "nodes = 1 or more"),
    "more ranks than any machine": ("nodes = 1", "nodes = 1000000", "nodes(1000000) × ranks_per_node(8) = 8000000",
                                    "is more than 131072 ranks", "lower job.nodes"),
    "negative seed": ("steps = 10", "steps = 10\nseed = -1", "train.seed = -1", "must be at least 0", "seed = 0 or more"),
    "negative rate": ("steps = 10", "steps = 10\nlearning_rate = -0.1", "learning_rate = -0.1", "must be at least 0", "0 or"),
    "certain dropout": ("steps = 10", "steps = 10\ndropout = 1.0", "train.dropout = 1.0", "must be less than 1", "smaller"),
    "zero of 4": ("tensor = 2", "tensor = 2\nzero = 4", "parallel.zero = 4", "must be at most 3", "zero = 3 or less"),
    "one beta": ("steps = 10", "steps = 10\nbetas = [0.9]", "train.betas = [0.9]", "must be two numbers", "[0.9, 0.95]"),
    "large beta": ("steps = 10", "steps = 10\nbetas = [0.9, 1.0]", "betas = [0.9, 1.0]", "less than 1", "[0.9, 0.95]"),
    "endless microbatches": ("tensor = 2", "tensor = 2\nmicrobatches = 9999999", "parallel.microbatches = 9999999",
                             "must be at most 65536", "65536 or less"),
    "no files": (FILES, "files = []", "data.files = []", "names no file", 'files = ["corpus/*.txt"]'),
    "empty path": (FILES, 'files = [""]', "data.files[0] = ''", "must be a path", "as ls prints it"),
    "endless path": (FILES, f'files = ["{"a" * 300}"]', "data.files[0] = 'aaaa", "longer than 255 bytes", "as ls prints it"),
    "stranger's home": (FILES, 'files = ["~no-such-user/a.txt"]', "~no-such-user/a.txt", "home directory of an unknown user",
                        "write the full path"),
    "path out of the directory as name": ('"small"', '"../../etc"', "job.name = '../../etc'", "letters, digits", "run-1"),
    "control character in a name": ('"small"', r'"a\u001b[2Jb"', r"job.name = 'a\x1b[2Jb'", "letters, digits", "run-1"),
    "NUL in a path": (FILES, r'files = ["a\u0000b"]', r"data.files[0] = 'a\x00b'", "holds a NUL character", "leave it out"),
    "line break in an account": ("[slurm]", '[slurm]\naccount = "a\\nb"', r"slurm.account = 'a\nb'", "must be one line",
                                 "leave the key out"),
    "unknown device": ("nodes = 1", 'nodes = 1\ndevice = "tpu"', "job.device = 'tpu'", "'auto', 'cpu' or 'cuda'", "one of"),
    "no time": ("nodes = 1", 'nodes = 1\ntime_limit = "soon"', "job.time_limit = 'soon'", "as Slurm writes it", "02:00:00"),
    "no order": ("tensor = 2", 'tensor = 2\norder = "DP|T"', "parallel.order = 'DP|T'", "the letters D, P, T", '"DPT"'),
    "no partition": ("tensor = 2", "tensor = 2\npartition = [4, 0, 2]", "parallel.partition = [4, 0, 2]",
                     "0 only for the first and the last", "[4, 4]"),
    "no regular expression": ("tensor = 2", 'tensor = 2\npartition = "at:("', "parallel.partition = 'at:('",
                              "a regular expression", "[4, 4]"),
    "a measure that is not there": ("tensor = 2", 'tensor = 2\npartition = "even"', "parallel.partition = 'even'",
                                    "uniform, parameters", "[4, 4]"),
    "a profile of no use": ("tensor = 2", 'tensor = 2\npartition = "cost"\nprofile = "p.json"', "parallel.profile = ",
                            "has no effect", 'partition = "profile"'),
    "a weight of no use": ("tensor = 2", "tensor = 2\nmemory_weight = 0.5", "parallel.memory_weight = 0.5", "has no effect",
                           'partition = "profile"'),
    "a weight beyond one": ("tensor = 2", 'tensor = 2\npartition = "profile"\nmemory_weight = 1.5',
                            "parallel.memory_weight = 1.5", "must be at most 1", "or less"),
    "no variable": ("NCCL_DEBUG", '"A B"', "environment.set.'A B'", "must consist of letters", "that the shell accepts"),
    "no option": ("[slurm]", "[slurm]\nextra = { Mem = 1 }", "slurm.extra.Mem", "a long option of sbatch", "cpus-per-task"),
    "fraction for an option": ("[slurm]", "[slurm]\nextra = { mem = 1.5 }", "slurm.extra.mem = 1.5", "must be text", "mem ="),
    "deep tables": (LAST, LAST + "[a" + ".a" * 3000 + "]", "a.a.a.a…", "is nested deeper than 32 levels", "fewer levels"),
    "deep lists": ("steps = 10", f"steps = {'[' * 50}{']' * 50}", "train.steps[0][0]…", "deeper than 32 levels", "fewer levels"),
    "bottomless lists": ("steps = 10", f"steps = {'[' * 9999}{']' * 9999}", "job.toml", "is nested too deeply", "fewer levels"),
    # TOML
    "no TOML": ("steps = 10", "steps = = 10", "job.toml", "is not valid TOML", "correct that line"),
    "text without quotes": ('"small"', "small", "job.toml", "is not valid TOML (Invalid value (at line 2", "correct that line"),
    "section twice": ("[data]", "[job]\n[data]", "job.toml", "is not valid TOML (Cannot declare ('job',) twice", "correct that"),
    "key twice": ("steps = 10", "steps = 10\nsteps = 11", "job.toml", "a key is set twice", "correct that"),
    # arithmetic
    "degrees that do not divide": ("tensor = 2", "tensor = 3", "tensor(3) × pipeline(2) × context(1) = 6",
                                   "does not divide 8 ranks (nodes(1) × ranks_per_node(8) = 8)", "whose product divides 8"),
    "batch that does not divide": ("global_batch = 16", "global_batch = 15", "train.global_batch = 15",
                                   "is not a multiple of data(2) × microbatches(1) = 2", "use 14 or another multiple of 2"),
    "microbatches that do not divide": ("tensor = 2", "tensor = 2\nmicrobatches = 3", "train.global_batch = 16",
                                        "data(2) × microbatches(3) = 6", "use 12 or another"),
    "an mpirun for our own ranks": ("[slurm]", "[slurm]\nmpi = 'mpirun'", 'slurm.mpi = "mpirun"',
                                    "srun starts the ranks of hpc-mp's own engine", "pmix"),
    "shards that do not divide": ("tensor = 2", "tensor = 2\nshard_degree = 3", "parallel.shard_degree = 3",
                                  "does not divide the data degree 8 ranks / (tensor(2)", "use a divisor of 2"),
    "shards without ZeRO": ("tensor = 2", "tensor = 2\nzero = 0\nshard_degree = 2", "parallel.shard_degree = 2",
                            "has no effect with parallel.zero = 0", "set parallel.zero"),
    "sums of parts where gradients are whole": (
        "tensor = 2", 'tensor = 2\nzero = 1\nreduce = "microbatch"', 'parallel.reduce = "microbatch"',
        "has no effect with parallel.zero = 1", "set parallel.zero to 2 or 3"),
    "layers for too few stages": ("tensor = 2", "tensor = 2\npartition = [4]", "parallel.partition = [4]",
                                  "has 1 entry for 2 stages", 'partition = "auto"'),
    "an environment by name that is to be staged": (
        'setup = ["true"]\n[environment]\n', 'conda = "train"\n[environment]\nstage = true\n', "slurm.conda = 'train'",
        "is a name, but environment.stage packs a directory", "conda env list"),
    "tokens that context ranks cannot share": (
        "sequence_length = 32\n[parallel]\ntensor = 2", "sequence_length = 34\n[parallel]\ncontext = 2",
        "data.sequence_length = 34", "is not a multiple of 2 × context(2) = 4", "use 32 or another multiple of 4"),
    "a method without context": ("tensor = 2", 'tensor = 2\ncontext_method = "ulysses"', "parallel.context_method = 'ulysses'",
                                 "has no effect with parallel.context = 1", "set parallel.context"),
    "heads that context ranks cannot share": (
        SIZES, SIZES.replace("heads = 8", "heads = 4").replace(
            "tensor = 2\npipeline = 2", 'context = 8\ncontext_method = "ulysses"'),
        "parallel.context = 8", "does not divide heads(4) / tensor(1) = 4", 'context_method = "ring"'),
    "momentum without SGD": ("steps = 10", "steps = 10\nmomentum = 0.9", "train.momentum = 0.9", "has no effect", "use betas"),
    "evaluations of nothing": ("[slurm]", "[evaluate]\nevery = 5\n[slurm]", "evaluate.every = 5",
                               "has no effect without evaluate.files", "name the files"),
    "endless warm-up": ("steps = 10", "steps = 10\nwarmup_steps = 11", "train.warmup_steps = 11", "is more than train.steps = 10",
                        "lower warmup_steps"),
    "rank map of another size": ("tensor = 2", "tensor = 2\nrank_map = [0, 0]", "parallel.rank_map = [0, 0]",
                                 "does not put ranks_per_node(8) ranks on each of the nodes 0 to 0", "list every node"),
    "unknown rank map": ("tensor = 2", 'tensor = 2\nrank_map = "diagonal"', "parallel.rank_map = 'diagonal'",
                         'must be "auto", "block", "cyclic" or a list', "rank_map = [1, 1, 0, 0]"),
    "runs of another shape": ("[slurm]", '[sweep]\nruns = [{"job.nodes" = 2}]\n[slurm]', "sweep.runs: job.nodes",
                              "share [job], [slurm]", "train.seed"),
    "a grid without its name": ("[slurm]", '[sweep]\n"train.seed" = [1, 2]\n[slurm]',
                                "sweep.'train.seed'", "is not a key of [sweep]",
                                'below [sweep.grid], or in braces: grid = { "train.seed" = […] }'),
    "an array, as it was called": ("[slurm]", '[slurm]\narray = [{"train.seed" = 2}]', "slurm.array",
                                   "is sweep.runs here", "write runs = … below the line [sweep]"),
    # schedules
    "unknown schedule": ("tensor = 2", 'tensor = 2\nschedule = "1F1B"', "parallel.schedule = '1F1B'", "is not a schedule",
                         'write schedule = "1f1b"'),
    "a schedule that nobody knows": ("tensor = 2", 'tensor = 2\nschedule = "2f2b"', "parallel.schedule = '2f2b'",
                                     "is not a schedule", "use one of gpipe, simple, 1f1b,"),
    "stages per rank where there is one": ("tensor = 2", "tensor = 2\nvirtual_stages = 2", "parallel.virtual_stages = 2",
                                           "1f1b has one stage per rank", "use schedule interleaved_1f1b"),
    "stages per rank where there are two": ("tensor = 2", 'tensor = 2\nvirtual_stages = 3\nschedule = "zero_bubble_v"',
                                            "parallel.virtual_stages = 3", "zero_bubble_v has two stages per rank", "leave"),
    "microbatches that do not interleave": (
        "tensor = 2", 'tensor = 2\nmicrobatches = 1\nschedule = "interleaved_1f1b"', "parallel.microbatches = 1",
        "interleaved_1f1b needs a multiple of pipeline(2); 1 % 2 = 1", "use 2 microbatches"),
    "layers for too few virtual stages": (
        "tensor = 2", 'tensor = 2\npartition = [2, 2]\nschedule = "zero_bubble_v"', "parallel.partition = [2, 2]",
        "has 2 entries for pipeline(2) × 2 per rank = 4 stages", 'partition = "auto"'),
    "missing table": ("tensor = 2", 'tensor = 2\nschedule = "tables/mine.csv"', "tables/mine.csv",
                      "cannot be read (No such file or directory)", "name a file that can be read"),
    "expert": ("tensor = 2", "tensor = 2\nexpert = 3", "parallel.expert = 3", "does not divide data(", "use a divisor of"),
    "whole parameters elsewhere": (
        "tensor = 2", 'tensor = 2\nzero = 2\noffload = ["parameters"]', 'parallel.offload = ["parameters"]',
        "cannot offload parameters with parallel.zero = 2", "set parallel.zero = 3"),
    # fp16 and offload
    "a loss scale without fp16": ("steps = 10", "steps = 10\nloss_scale = { window = 10 }", "train.loss_scale",
                                  "has no effect with train.precision = 'fp32'", 'precision = "fp16"'),
    "a loss scale that begins too low": (
        "steps = 10", 'steps = 10\nprecision = "fp16"\nloss_scale = { initial = 2, minimum = 4 }',
        "train.loss_scale.minimum = 4", "is more than initial = 2", "lower minimum"),
    "unknown key of a loss scale": ("steps = 10", "steps = 10\nloss_scale = { windw = 10 }", "train.loss_scale.windw = 10",
                                    "is not a key of [train.loss_scale]", "window"),
    "a key of a loss scale elsewhere": ("steps = 10", "steps = 10\nhysteresis = 1", "train.hysteresis = 1",
                                        "is not a key of [train]", "hysteresis belongs to [train.loss_scale]"),
    "a scale of zero": ("steps = 10", "steps = 10\nloss_scale = { initial = 0 }", "train.loss_scale.initial = 0",
                        "must be more than 0", "larger number"),
    "unknown offload": ("tensor = 2", 'tensor = 2\noffload = ["optimiser"]', 'parallel.offload = ["optimiser"]',
                        'must be "none" or a list of "optimizer"', 'offload = ["optimizer"]'),
    "offloaded twice": ("tensor = 2", 'tensor = 2\noffload = ["optimizer", "optimizer"]', "parallel.offload = [", "at most once",
                        'offload = ["optimizer"]'),
    "a directory for nothing": ("tensor = 2", 'tensor = 2\noffload_directory = "/tmp"', "parallel.offload_directory = '/tmp'",
                                "has no effect without parallel.offload", 'offload = ["optimizer"]'),
    "nothing to offload": ("tensor = 2", "tensor = 2\noffload = []", "parallel.offload = []", 'must be "none" or a list of',
                           'offload = ["optimizer"]'),
    "a horizon of nothing": ("tensor = 2", "tensor = 2\noffload_horizon = 1", "parallel.offload_horizon = 1",
                             "has no effect unless activations are offloaded", 'set parallel.offload = ["activations"]'),
    "another recompute": ("tensor = 2", 'tensor = 2\nrecompute = "every-0"', "parallel.recompute = 'every-0'",
                          'must be "none", "selective", "full" or "every-"', 'recompute = "every-2"'),
    # the model
    "sequence beyond the positions": ("sequence_length = 32", "sequence_length = 65", "data.sequence_length = 65",
                                      "is longer than the model's 64 positions", "use at most 64"),
    "more stages than layers": ("tensor = 2\npipeline = 2", "pipeline = 8", "parallel.pipeline = 8",
                                "is more stages than the model's 4 layers, the embedding and the head", "use at most 6 stages"),
    "more virtual stages than layers": (
        "tensor = 2", 'tensor = 2\nvirtual_stages = 4\nschedule = "breadth_first"',
        "parallel.pipeline = 2 × 4 stages per rank (breadth_first) = 8", "is more stages than the model's 4 layers",
        "use at most 6 stages"),
    "a pattern that matches nothing": ("tensor = 2", 'tensor = 2\npartition = "at:layers.1"',
                                       "parallel.partition = 'at:layers.1'", "matches 0 modules, but 1 of the 2 stages begin",
                                       "by its whole name"),
    "a pattern that matches too much": (
        "tensor = 2", 'tensor = 2\npartition = "at:model.layers.[12]"', "parallel.partition = 'at:model.layers.[12]'",
        "matches 2 modules (model.layers.1, model.layers.2), but 1 of the 2 stages", "among model.layers.0 … model.layers.3"),
    "no profile": ("tensor = 2", 'tensor = 2\npartition = "profile"', "profile-small.json", "cannot be read (No such file",
                   "hpc-mp train JOB.toml --profile"),
    "odd heads": ("num_attention_heads = 8, num_key_value_heads = 4", "num_attention_heads = 1", "parallel.tensor = 2",
                  "does not divide the model's 1 attention heads", "heads are never split"),
    "other sum of layers": ("tensor = 2", "tensor = 2\npartition = [2, 3]", "parallel.partition = [2, 3]",
                            "has 5 layers, but the model has 4", "so that the sum is right"),
    "no such module": ("tensor = 2", 'tensor = 2\ntensor_modules = ["*.mpl"]', 'parallel.tensor_modules = ["*.mpl"]',
                       "matches no module that can be cut", "model.layers.*.mlp"),
    "no layers": ("num_hidden_layers = 4", "num_hidden_layers = 0", "the model's num_hidden_layers = 0",
                  "must be a whole number from 1 to 65536", "num_hidden_layers = 32"),
    "endless layers": ("num_hidden_layers = 4", "num_hidden_layers = 1000000000", "num_hidden_layers = 1000000000",
                       "must be a whole number from 1 to 65536", "num_hidden_layers = 32"),
    "text for heads": ("num_attention_heads = 8", 'num_attention_heads = "8"', "num_attention_heads = '8'",
                       "must be a whole number from 1", "num_attention_heads = 32"),
    "grouped heads that do not divide": ("num_key_value_heads = 4", "num_key_value_heads = 3",
                                         "num_attention_heads(8) / num_key_value_heads(3)", "must be a whole number", "a multiple"),
    "hidden size that does not divide": ("hidden_size = 64", "hidden_size = 65", "hidden_size(65) / num_attention_heads(8)",
                                         "must be a whole number", "a multiple of"),
    # what is not there
    "missing file": (FILES, 'files = ["nowhere/*.txt"]', "nowhere/*.txt", "matches no file", "check the path"),
    "missing checkpoint": ("config = {", 'pretrained = "nowhere"\n#', "model.pretrained = ", "is not a directory",
                           "use the directory"),
    "checkpoint without a config": ("config = {", 'pretrained = "."\n#', "model.pretrained = ",
                                    "its config.json cannot be read (No such file or directory)", "save_pretrained"),
    "missing origin": ("[slurm]", '[checkpoint]\nresume = "nowhere"\n[slurm]', "nowhere", "is not there", "0001"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a text to train on."""
    (tmp_path / "text.txt").write_text("text\n" * 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPC_MP_DEBUG", raising=False)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The real command line in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["hpc-mp", "launch", "job.toml", "--dry-run", "--on", "local", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), *capfd.readouterr()


def check_message(code: int, out: str, err: str, *parts: str) -> None:
    """Exit 2, nothing on stdout, and one paragraph that has the parts in their order and reads well."""
    assert (code, out) == (2, ""), err
    assert err.startswith("hpc-mp: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1, err
    rest = err.lower()  # a remedy begins with a capital in the message
    for part in map(str.lower, parts):
        assert part in rest, f"{part!r} not in {rest!r}"
        rest = rest.partition(part)[2]
    assert len(err) < 1000
    assert not re.search(r"\.\.$|\. \.|[Tt]raceback|pydantic|[Ii]nput should", err)


def test_the_job_is_right_before_it_is_spoilt(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "job.toml").write_text(JOB)
    code, _, err = command(monkeypatch, capfd)
    assert code == 0, err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_value_rule_and_remedy(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mistake: str
) -> None:
    old, new, *parts = MISTAKES[mistake]
    assert JOB.count(old) == 1
    (here / "job.toml").write_text(JOB.replace(old, new))
    check_message(*command(monkeypatch, capfd), *parts)


@pytest.mark.parametrize(("content", "rule"), [
    (None, "cannot be read (No such file or directory)"),
    ("directory", "cannot be read (Is a directory)"),
    (b"\xff\xfej\x00o\x00b\x00", "is not UTF-8 text"),
    (JOB.encode() + b"\x00", "is not valid TOML"),
    (b"\x7fELF\x01\x02", "is not valid TOML"),
    (b"", "is required"),
])
def test_a_file_that_is_no_job(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], content: bytes | str | None, rule: str
) -> None:
    if content == "directory":
        (here / "job.toml").mkdir()
    elif isinstance(content, bytes):
        (here / "job.toml").write_bytes(content)
    check_message(*command(monkeypatch, capfd), rule)


@pytest.mark.parametrize(("config", "rule"), [
    ("{", "its config.json is not JSON"),
    ("[" * 100_000, "its config.json is not JSON"),
    ("[]", "its config.json names no model_type"),
    ('{"model_type": 5}', "its config.json names no model_type"),
    ('{"model_type": "gpt2"}', "holds no *.safetensors file"),
])
def test_a_checkpoint_that_is_none(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], config: str, rule: str
) -> None:
    (here / "job.toml").write_text(JOB.replace("config = {", 'pretrained = "model"\n#'))
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(config)
    check_message(*command(monkeypatch, capfd), f"model.pretrained = {here / 'model'}", rule, "save")


@pytest.mark.parametrize(("override", "parts"), [
    ("train.steps", ("--set train.steps", "must have the form SECTION.KEY=VALUE", "--set train.steps=20")),
    ("=3", ("--set =3", "must have the form SECTION.KEY=VALUE", "write")),
    ("train..steps=3", ("--set train..steps=3", "must have the form SECTION.KEY=VALUE", "write")),
    ("steps=3", ("steps = 3", "is not a key of a job file", "steps belongs to [train]")),
    ("trian.steps=3", ("trian", "is not a key of a job file", "did you mean 'train'?")),
    ("train.steps.more=3", ("--set train.steps.more=3", "steps is a value, not a table", "name a key")),
    ("train.steps=", ("train.steps = ''", "must be a whole number", "write")),
    ("train.steps=many", ("train.steps = 'many'", "must be a whole number", "write")),
    ("train.steps=-1", ("train.steps = -1", "must be at least 1", "write")),
    ("train.steps=[[", ("train.steps = '[['", "must be a whole number", "write")),
    ("train.steps=" + "[" * 9999, ("train.steps = '[[[", "must be a whole number", "write")),
    ("train.steps=" + "1" * 5000, ("train.steps = '111", "must be a whole number", "write")),
    ("job.name=a\nnodes = 5", (r"job.name = 'a\nnodes = 5'", "letters", "write")),
    ("job.name=1\nnodes = 5", (r"job.name = '1\nnodes = 5'", "letters", "write")),
    ("train=5", ("train = 5", "must be a table", "below a line [train]")),
])
def test_an_override_that_is_wrong(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], override: str, parts: tuple[str, ...]
) -> None:
    (here / "job.toml").write_text(JOB)
    check_message(*command(monkeypatch, capfd, f"--set={override}"), *parts)


@pytest.mark.parametrize(("override", "key", "value"), [
    ("train.steps=20", "train.steps", 20),
    (" train . steps = 20", "train.steps", 20),
    ("job.name=other", "job.name", "other"),
    ('job.name="other"', "job.name", "other"),
    ("train.learning_rate=1e-3", "train.learning_rate", 1e-3),
    ("parallel.partition=[1, 3]", "parallel.partition", (1, 3)),
    ("slurm.partition=a=b", "slurm.partition", "a=b"),
    ("environment.set.A=x y", "environment.set", {"NCCL_DEBUG": "WARN", "A": "x y"}),
    ('environment.set={A="1"}', "environment.set", {"A": "1"}),
    ("checkpoint.every=5", "checkpoint.every", 5),
])
def test_an_override_takes_its_place(here: Path, override: str, key: str, value: object) -> None:
    (here / "job.toml").write_text(JOB)
    section, name = key.split(".")
    assert getattr(getattr(load_job(here / "job.toml", [override]), section), name) == value


def test_the_last_override_wins_and_the_mistake_is_the_last_ones(here: Path) -> None:
    (here / "job.toml").write_text(JOB)
    assert load_job(here / "job.toml", ["train.steps=2", "train.steps=3"]).train.steps == 3
    with pytest.raises(HpcMpError, match=r"train\.steps = 0"):
        load_job(here / "job.toml", ["train.steps=2", "train.steps=0"])


def test_the_process_ends_with_2_and_a_traceback_only_for_developers(here: Path) -> None:
    (here / "job.toml").write_text(JOB.replace("steps = 10", "steps = 0"))
    arguments = [sys.executable, "-m", "hpc_mp", "launch", str(here / "job.toml"), "--dry-run", "--on", "local"]
    for debug, traceback in (("0", False), ("1", True)):
        done = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"HPC_MP_DEBUG": debug}, capture_output=True, text=True,
                              timeout=60)
        assert ("Traceback" in done.stderr) == traceback
        assert "train.steps = 0" in done.stderr
        assert traceback or done.returncode == 2


@pytest.mark.parametrize("slurm", ['conda = "/opt/env"', 'conda = "e"\npython = "/opt/python"', 'conda = "e"\nvenv = "/opt/v"'])
def test_an_environment_whose_place_is_known_may_be_staged(here: Path, slurm: str) -> None:
    (here / "job.toml").write_text(JOB.replace('setup = ["true"]\n[environment]\n', f"{slurm}\n[environment]\nstage = true\n"))
    assert load_job(here / "job.toml").environment.stage


def test_a_byte_order_mark_is_no_mistake(here: Path) -> None:
    (here / "job.toml").write_text(JOB, encoding="utf-8-sig")
    assert load_job(here / "job.toml").job.name == "small"


# --- paths and defaults --------------------------------------------------------------------------------------------


def test_paths_are_seen_from_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "job.toml").write_text(JOB.replace(FILES, 'files = ["../a.txt", "/b.txt", "~/c.txt"]'))
    monkeypatch.setenv("HOME", "/home-of-a-test")
    spec = load_job(Path("sub/job.toml"))
    assert spec.data.files == (f"{here}/sub/../a.txt", "/b.txt", "/home-of-a-test/c.txt")
    assert spec.job.directory == f"{here}/sub/runs"


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 4))
def test_the_default_microbatches_are_the_most_that_divide(per_replica: int, pipeline: int, data: int) -> None:
    spec = resolve({
        "job": {"ranks_per_node": pipeline * data}, "model": {"config": {"model_type": "gpt2"}},
        "data": {"files": ["a"], "sequence_length": 1}, "parallel": {"pipeline": pipeline},
        "train": {"steps": 1, "global_batch": per_replica * data},
    }, Path("/"))
    divisors = [m for m in range(1, per_replica + 1) if per_replica % m == 0 and m <= 4 * pipeline]
    assert spec.microbatches == (max(divisors) if pipeline > 1 else 1)
    assert spec.microbatches * spec.microbatch_size * data == spec.train.global_batch


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(("ranks", "batch", "microbatches"), [(1, 2, 2), (8, 1, 1)])
def test_a_job_written_in_python_can_be_shown_before_its_arithmetic_is_checked(
        pipeline: int, ranks: int, batch: int, microbatches: int) -> None:
    spec = JobSpec.model_validate({
        "job": {"ranks_per_node": ranks}, "model": {"config": {"model_type": "gpt2"}},
        "data": {"files": ["a"], "sequence_length": 1}, "parallel": {"pipeline": pipeline},
        "train": {"steps": 1, "global_batch": batch},
    })
    assert f"microbatches = {microbatches if pipeline > 1 else 1}" in dump_job(spec)


def test_a_large_batch_takes_no_time(here: Path) -> None:
    (here / "job.toml").write_text(JOB)
    assert load_job(here / "job.toml", [f"train.global_batch={2**62}"]).microbatches == 8


@pytest.mark.parametrize("value", ["1", "two words", '"1"', "1.5"])
def test_variables_of_the_command_line_need_no_quotes(here: Path, value: str) -> None:
    """A shell takes them away."""
    (here / "job.toml").write_text(JOB)
    spec = load_job(here / "job.toml", [f"environment.set.X={value}"])
    assert spec.environment.set["X"] == value.strip('"')
