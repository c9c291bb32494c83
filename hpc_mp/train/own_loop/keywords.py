"""The keywords of ``hpc_mp.parallel``: names for keys of a job file, whose types, checks and defaults they have.

So a division means the same in a loop as in a job file, and is refused for the same reasons. Messages name the keyword.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.job import JobSpec
from hpc_mp.job.load import resolve
from hpc_mp.layout.learning_rate import SCHEDULES, UNENDING, options_of
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS
from hpc_mp.train.step.settings import Rate

KEYS: Mapping[str, str] = {  # keyword -> key of the job file
    "tp_size": "parallel.tensor", "pp_size": "parallel.pipeline", "cp_size": "parallel.context", "ep_size": "parallel.expert",
    "dp_shard_size": "parallel.shard_degree", "sequence_parallel": "parallel.sequence",
    **{name: f"parallel.{name}" for name in (
        "tensor_modules", "context_method", "zero", "reduce", "order", "schedule", "virtual_stages", "microbatches", "partition",
        "recompute", "offload", "offload_directory", "offload_horizon")},
    **{name: f"train.{name}" for name in (
        "precision", "loss_scale", "clip", "compile", "dropout", "seed", "router_balance", "router_z", "label_smoothing",
        "z_loss", "expert_capacity")},
    "device": "job.device",
}
OPTIMIZER: Mapping[str, str] = {  # key of the keyword ``optimizer`` -> key of the job file
    "name": "train.optimizer", "lr": "train.learning_rate",
    **{name: f"train.{name}" for name in ("lr_factors", "lr_schedule", "lr_schedule_options", "steps", "warmup_steps", "betas",
                                          "eps", "momentum", "weight_decay", "no_decay", "exp_avg_dtype")},
}
OWN = ("optimizer", "loss_fn", "outputs", "inputs", "cut", "batches", "example")
DEFAULTS: Mapping[str, Any] = {"microbatches": 1}
WORDS: Mapping[str, str] = {  # what else messages about a job file name -> the name in a loop
    "data.sequence_length": "tokens of a sample", "sequence_length": "tokens of a sample", "model.config": "model",
    "train.global_batch": "samples of a batch", "global_batch": "samples of a batch",
    "model.pretrained": "model", "a job file": "hpc_mp.parallel",
}
PYTHON: Mapping[str, str] = {  # pattern of a message about a job file -> the words in a loop
    r"(?<== )true\b": "True", r"(?<== )false\b": "False", r"(?<== )null\b": "None", r"must be a table\b": "must be a dict",
    r"write its keys below a line \[(\w+)\]": r"write \1={…}", r"(?<=is not a key of )\[(\w+)\]": r"\1",
    r" \(nodes\(1\) × ranks_per_node\((\d+)\) = \1\)": "",
}
LONGEST = 80  # characters of a value in a message
ALIKE = 0.4  # a short name is much of a long one
ENDLESS = 2**40  # steps of a loop whose learning rate does not depend on their number


@dataclass(frozen=True, slots=True)
class Keywords:
    """Keywords that have been checked."""

    settings: Mapping[str, Mapping[str, Any]]  # keys of the job file by table
    rate: Rate | None  # the learning rate of each step, from 0; None: the optimizer's settings determine it
    loss_fn: Callable[..., Any] | None  # (outputs, batch) -> (sum, count); None: the model's own loss
    outputs: tuple[str, ...]  # names of the tensors that loss_fn gets of a list of layers; empty: those of the last one
    inputs: tuple[str, ...]  # arguments of a module's forward with default values that the batch has
    cut: Mapping[str, Any]  # pattern of the names of linear modules -> "column" or "row"
    replica: bool  # True if a batch is the part of this rank's replica, and not the global batch
    example: Mapping[str, Any] | None  # a batch whose shapes are checked at once; None: the first batch is


def read_keywords(keywords: Mapping[str, Any]) -> Keywords:
    """Check names and kinds of keywords. Raises HpcMpError."""
    for name in keywords:
        if name not in KEYS and name not in OWN:
            names = [*KEYS, *OWN]
            raise HpcMpError(f"hpc_mp.parallel({name}=…)", "has no such keyword",
                             did_you_mean(name, names, f"it has {', '.join(names)}", ALIKE))
    keywords = {name: value for name, value in keywords.items() if value is not None}
    optimizer = keywords.get("optimizer", {})
    if not isinstance(optimizer, Mapping):
        raise HpcMpError(f"optimizer = {written(optimizer)}", "must be a dict",
                         'write for example optimizer={"name": "adamw", "lr": 3e-4}')
    for name in optimizer:
        if name not in OPTIMIZER:
            raise HpcMpError(f"optimizer = {{{name!r}: …}}", "has no such key",
                             did_you_mean(name, OPTIMIZER, f"it has {', '.join(OPTIMIZER)}"))
    if (schedule := optimizer.get("lr_schedule", "constant")) in SCHEDULES.keys() - {*UNENDING} and "steps" not in optimizer:
        raise HpcMpError(f"""optimizer["lr_schedule"] = {schedule!r}""",
                         f"falls {'' if options_of(schedule) else 'to zero '}at a step that is not given",
                         "add steps, the number of steps of the whole training")
    for condition, idle, reason in (
            (callable(optimizer.get("lr")), ("lr_schedule", "lr_schedule_options", "warmup_steps", "steps"),
             ": lr is a function of the step"),
            (optimizer.get("name") == "sgd", ("betas", "eps"), " with sgd")):
        if condition and (names := [f'optimizer["{name}"]' for name in idle if name in optimizer]):
            raise HpcMpError(", ".join(names), f"{'has' if len(names) == 1 else 'have'} no effect{reason}",
                             f"leave {'it' if len(names) == 1 else 'them'} out")
    if optimizer.get("name") in WHOLE_WEIGHTS:
        raise HpcMpError(f"""optimizer["name"] = {optimizer['name']!r}""", "is for trainings with a job file",
                         'use "adamw" or "sgd"')
    if keywords.get("partition") == "profile":
        raise HpcMpError("partition = 'profile'", "needs a profile that `hpc-mp train --profile` has measured of a job file",
                         "pass the number of layers of every stage, or leave it out")
    batches = keywords.get("batches", "global")
    if batches not in ("global", "replica"):
        raise HpcMpError(f"batches = {batches!r}", "must be 'global' or 'replica'",
                         "leave it out if every rank passes the whole batch")
    loss_fn, outputs = keywords.get("loss_fn"), keywords.get("outputs", ())
    if loss_fn is not None and not callable(loss_fn):
        raise HpcMpError(f"loss_fn = {written(loss_fn)}", "must be a function", "pass (outputs, batch) -> (sum, count)")
    for name in ("outputs", "inputs"):
        names = keywords.get(name, ())
        if not isinstance(names, list | tuple) or not all(isinstance(word, str) for word in names):
            raise HpcMpError(f"{name} = {written(names)}", "must be a tuple of names",
                             f'write for example {name}=("scores", "extra")')
    cut = keywords.get("cut", {})
    if not isinstance(cut, Mapping) or any(how not in ("column", "row") for how in cut.values()):
        raise HpcMpError(f"cut = {written(cut)}", "must be a dict from patterns of names to 'column' or 'row'",
                         'write for example cut={"*.up": "column", "*.down": "row"}')
    rate = optimizer.get("lr") if callable(optimizer.get("lr")) else None
    values = {KEYS[name]: value for name, value in {**DEFAULTS, **keywords}.items() if name in KEYS}
    values |= {OPTIMIZER[name]: value for name, value in optimizer.items() if not (name == "lr" and rate)}
    settings: dict[str, dict[str, Any]] = {"parallel": {}, "train": {"steps": ENDLESS}, "job": {}}
    for key, value in values.items():
        table, _, name = key.partition(".")
        settings[table][name] = value
    return Keywords(settings, rate, loss_fn, tuple(outputs), tuple(keywords.get("inputs", ())), cut, batches == "replica",
                    keywords.get("example"))


def product(keywords: Keywords, *names: str) -> int:
    """Return the product of keys of ``[parallel]``. What is no size counts as 1: the job is refused for it."""
    values = (keywords.settings["parallel"].get(name, 1) for name in names)
    return prod(value for value in values if isinstance(value, int) and value > 0)


def job_of(keywords: Keywords, model: Mapping[str, Any], world: int, samples: int, sequence: int) -> JobSpec:
    """Return the job that a loop is. Raises HpcMpError if its keywords do not fit each other, the ranks or the batch. ``model``:
    the table ``[model]``. ``samples``: of a microbatch; ``sequence``: tokens of each."""
    settings, replicas = keywords.settings, max(1, world // product(keywords, "tensor", "pipeline", "context"))
    batch = samples * replicas * product(keywords, "microbatches")
    return resolve({
        "job": {**settings["job"], "ranks_per_node": world}, "model": dict(model),
        "data": {"files": ["-"], "sequence_length": sequence}, "parallel": dict(settings["parallel"]),
        "train": {**settings["train"], "global_batch": batch}}, Path.cwd())


def in_words_of_a_loop(error: HpcMpError) -> HpcMpError:
    """Return an error about a job file with the names of the keywords, and with Python's words for values."""
    names = {key: name for name, key in KEYS.items()} | {**WORDS}
    names |= {key: f'optimizer["{name}"]' for name, key in OPTIMIZER.items()}
    bare = {key.partition(".")[2]: name for key, name in names.items() if key not in WORDS}
    whole = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?![\w])" for key in sorted(names, key=len, reverse=True)))
    degree = re.compile(rf"(?<![\w.])({'|'.join(bare)})(?=\(\d| = | to \d| out\b)")

    def changed(text: str) -> str:
        text = degree.sub(lambda match: bare[match[1]], whole.sub(lambda match: names[match[0]], text))
        for pattern, python in PYTHON.items():
            text = re.sub(pattern, python, text)
        return text

    return HpcMpError(changed(error.value), changed(error.rule), changed(error.remedy),
                      tuple(map(in_words_of_a_loop, error.several)))


def written(value: Any) -> str:
    """Return a value as Python writes it, on one short line."""
    return shorten(repr(value), LONGEST, placeholder=" …")
