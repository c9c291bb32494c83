"""Small real jobs for the exactness tests: text with partly ignored labels, tiny models, and a one-process reference."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks, train
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.layout.models import family_of, read_config, read_shape
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.rundir import RunDirectory, create_run, newest_complete, read_lines, write_json
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.train.checkpoint.shard_file import LocalPart, ShardReader
from hpc_mp.train.data import IGNORE, Samples
from hpc_mp.train.data.tokens import find_prepared
from hpc_mp.train.engine import initial
from hpc_mp.train.engine.precision import StaysDouble

# Sizes without even divisors: 5 layers, a vocabulary of 307, an intermediate size of 102; 8 heads over 4 key-value heads.
MODELS: dict[str, str] = {
    "gpt2": 'model_type = "gpt2", n_layer = 5, n_embd = 32, n_head = 8, n_inner = 102, vocab_size = 307, n_positions = 32, '
            "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0",
    "qwen2": 'model_type = "qwen2", num_hidden_layers = 5, hidden_size = 32, num_attention_heads = 8, num_key_value_heads = 4, '
             "intermediate_size = 102, vocab_size = 307, max_position_embeddings = 32",
    "llama": 'model_type = "llama", num_hidden_layers = 5, hidden_size = 32, num_attention_heads = 8, num_key_value_heads = 4, '
             "intermediate_size = 102, vocab_size = 307, max_position_embeddings = 32",
}
MODELS["gptj"] = ('model_type = "gptj", n_layer = 5, n_embd = 64, n_head = 8, n_inner = 102, vocab_size = 307, n_positions = 32, '
                  "rotary_dim = 6")
MODELS["mixtral"] = MODELS["llama"].replace("llama", "mixtral") + (
    ", num_local_experts = 5, num_experts_per_tok = 2, sliding_window = 7")  # of 24 tokens
MODELS["llama-tied"] = MODELS["llama"] + ", tie_word_embeddings = true"
MODELS["gpt2-untied"] = MODELS["gpt2"] + ", tie_word_embeddings = false"
# Other options of configs for the same code: biases, a separate head size, a padding row, scaled rotary positions …
LLAMA = MODELS["llama"]
VARIANTS: dict[str, str] = {
    "llama with biases": LLAMA + ", attention_bias = true, mlp_bias = true",
    "llama with its own head size": LLAMA + ", head_dim = 6",
    "llama with a padding row": LLAMA + ", pad_token_id = 5",
    "llama with scaled positions": LLAMA + ', rope_parameters = { rope_type = "linear", factor = 2.0, rope_theta = 5000.0 }',
    "llama without groups": LLAMA.replace("num_key_value_heads = 4", "num_key_value_heads = 8"),
    "llama with two key-value heads": LLAMA.replace("num_key_value_heads = 4", "num_key_value_heads = 2"),
    "llama with one key-value head": LLAMA.replace("num_key_value_heads = 4", "num_key_value_heads = 1"),
    "gptj, tied": MODELS["gptj"] + ", tie_word_embeddings = true",
    "gptj with positions on whole heads": MODELS["gptj"].replace("rotary_dim = 6", "rotary_dim = 8"),
    "mixtral, tied": MODELS["mixtral"] + ", tie_word_embeddings = true",
    "mixtral without groups or window": MODELS["mixtral"].replace("num_key_value_heads = 4", "num_key_value_heads = 8").replace(
        ", sliding_window = 7", ""),
    "mixtral with one choice of many experts": MODELS["mixtral"].replace("num_local_experts = 5, num_experts_per_tok = 2",
                                                                         "num_local_experts = 40, num_experts_per_tok = 1"),
    "gpt2 scaled by layer": MODELS["gpt2"] + ", scale_attn_by_inverse_layer_idx = true",
    # Frequencies that transformers chooses by the largest position: of 24 positions, ranks and documents have fewer than 20.
    **{f"{model} with {kind}": f"{MODELS[model].replace('sliding_window = 7', 'head_dim = 4')}, "
                               f"rope_parameters = {{ {scaling}, rope_theta = 5000.0 }}"
       for model in ("llama", "qwen2", "mixtral") for kind, scaling in {
           "longrope": 'rope_type = "longrope", factor = 4.0, original_max_position_embeddings = 20, '
                       "short_factor = [1.0, 1.1], long_factor = [2.0, 3.5]",
           "dynamic": 'rope_type = "dynamic", factor = 4.0',
           "yarn": 'rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 8'}.items()},
    "gpt2 with relu": MODELS["gpt2"] + ', activation_function = "relu"',
}

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # the device of the engine; plain transformers always uses the CPU
JOB = """
[job]
name = "exact"
directory = "runs"
device = "{device}"
[model]
config = {{ {model} }}
[data]
files = ["text.jsonl"]
sequence_length = 24
[train]
steps = 3
global_batch = 24
precision = "fp64"
optimizer = "adamw"
eps = 1e-2
learning_rate = 1e-2
weight_decay = 0.1
clip = 0.5
seed = 7
""".replace("{device}", DEVICE)


@dataclass(frozen=True)
class Result:
    """The result of a run: loss and gradient norm of every step (None in a step without labels), final parameters (engine
    shapes), and the share of expert choices dropped in every step (None without a capacity)."""

    losses: tuple[Any, ...]
    norms: tuple[Any, ...]
    parameters: dict[str, Tensor]
    dropped: tuple[Any, ...]

    def distance(self, other: Result) -> float:
        """Return the largest difference of any loss, norm or parameter."""
        assert self.parameters.keys() == other.parameters.keys()
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=True)]
        assert all((a is None) == (b is None) for a, b in pairs)
        numbers = max((abs(a - b) for a, b in pairs if a is not None), default=0.0)
        tensors = max(float((self.parameters[name] - other.parameters[name]).abs().max()) for name in self.parameters)
        return max(numbers, tensors)


def write_text(directory: Path) -> None:
    """Write rows of prompts and completions. Prompt tokens do not count in the loss, so counts differ between microbatches."""
    words = (Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text()).split()
    rows = []
    for start in range(0, len(words) - 40, 23):
        cut = start + 3 + start % 17
        rows.append({"prompt": " ".join(words[start:cut]), "completion": " " + " ".join(words[cut:start + 23])})
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_job(directory: Path, model: str = "gpt2", more: str = "") -> Path:
    """Write a job file and its text; the directory is created."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory)
    path = directory / "job.toml"
    path.write_text(JOB.format(model=MODELS[model]) + more)
    return path


def job(directory: Path, model: str, overrides: Sequence[str] = ()) -> JobSpec:
    path = directory / f"{model}.toml"
    path.write_text(JOB.format(model=(MODELS | VARIANTS)[model]))
    return load_job(path, overrides)


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, context: int = 1, **more: object) -> list[str]:
    """Return overrides of a job: the degrees, and further keys of ``[parallel]``."""
    settings = {"tensor": tensor, "pipeline": pipeline, "context": context} | more
    return [f"job.ranks_per_node={tensor * pipeline * data * context}",
            *(f"parallel.{key}={value}" for key, value in settings.items())]


def start(spec: JobSpec) -> RunDirectory:
    """Create a run directory as ``launch`` writes it."""
    run = create_run(Path(spec.job.directory), spec.job.name)
    order = "cluster" if spec.parallel.order == "auto" else spec.parallel.order
    degrees = Degrees(spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree, spec.parallel.context, spec.parallel.expert)
    run.job.write_text(dump_job(spec))
    write_json(run.placement, to_dict(place(degrees, order, spec.job.ranks_per_node)))
    return run


def run_engine(spec: JobSpec, before: Callable[[], None] = lambda: None, run: RunDirectory | None = None) -> Result:
    """Train on forked ranks; ``before`` is called in every rank first (to break something on purpose)."""
    run = run or start(spec)

    def rank() -> int:
        before()
        return train(run.job)

    codes = run_ranks(spec.ranks, rank, timeout=600.0)
    assert codes == [0] * spec.ranks, run.main_log.read_text()
    lines = read_lines(run.metrics)
    checkpoint, skipped = newest_complete(run.checkpoints)
    assert checkpoint is not None and not skipped
    return Result(tuple(line["loss"] for line in lines), tuple(line["grad_norm"] for line in lines), parameters(spec, checkpoint),
                  tuple(line["dropped_share"] for line in lines))


def relaunch(run: RunDirectory, directory: Path, model: str, overrides: Sequence[str]) -> Result:
    """Write the files that ``launch --resume`` writes before it restarts the ranks, and return the result of the run."""
    spec = job(directory, model, overrides)
    degrees = Degrees(spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree, expert=spec.parallel.expert)
    run.job.write_text(dump_job(spec))
    write_json(run.placement, to_dict(place(degrees, "cluster", spec.job.ranks_per_node)))
    return run_engine(spec, run=run)


def parameters(spec: JobSpec, checkpoint: Path) -> dict[str, Tensor]:
    shape = read_shape(spec)
    weights = family_of(shape.model_type).all_weights(shape)
    state = {w.name: torch.full(w.shape, float("nan"), dtype=torch.float64) for w in weights}
    whole = [LocalPart(w.name, w.shape, tuple(slice(0, size) for size in w.shape), state[w.name]) for w in weights]
    ShardReader(checkpoint, read_indexes(checkpoint)).read(whole)
    return state


def run_plain(spec: JobSpec, skipped: Collection[int] = (), documents: Sequence[int] = ()) -> Result:
    """Train one process of plain transformers and torch.optim on the same samples, from the same initial values.

    Args:
        skipped: steps (from 0) without an update after the backward.
        documents: the number of tokens of each document of the text, if documents are separate.
    """
    return run_ranks(1, _plain, spec, skipped, documents)[0]


def plain_model(spec: JobSpec, checkpoint: Path) -> PreTrainedModel:
    """Return plain transformers' model with the parameters of a checkpoint and the job's expert capacity."""
    model, state = _built(spec), parameters(spec, checkpoint)
    _limit(model, spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name].reshape(parameter.shape))
    return model


def _built(spec: JobSpec) -> PreTrainedModel:
    config = read_config(spec)
    values = {key: value for key, value in config.items() if key != "model_type"}
    with StaysDouble():
        hugging_face = AutoConfig.for_model(config["model_type"], **values)
        hugging_face._experts_implementation = "eager"  # the other implementations of transformers do not support fp64
        return AutoModelForCausalLM.from_config(hugging_face).double()


def _limit(model: PreTrainedModel, spec: JobSpec) -> list[Tensor]:
    """Limit the choices of each sample per expert to the job's capacity; choices beyond it get no weight. The returned list is
    filled later: for each layer computed, a mask of the choices that were taken, counted one by one."""
    found: list[Tensor] = []
    if spec.train.expert_capacity is None:
        return found
    shape, length = read_shape(spec), spec.data.sequence_length
    most = math.ceil(spec.train.expert_capacity * length * shape.experts_per_token / shape.experts)

    def limited(_: torch.nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = given
        taken: Counter[tuple[int, int]] = Counter()
        weighed = torch.zeros_like(weights)
        for token, experts in enumerate(index.tolist()):
            for choice, expert in enumerate(experts):
                taken[token // length, expert] += 1
                weighed[token, choice] = taken[token // length, expert] <= most
        found.append(weighed)
        return hidden, index, weights * weighed

    for experts in (module for name, module in model.named_modules() if name.endswith(".mlp.experts")):
        experts.register_forward_pre_hook(limited)
    return found


def _router_losses(spec: JobSpec, choices: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the routers' addition to the loss of a global batch, computed per layer and sample by the papers' formulas."""
    total, length = torch.zeros((), dtype=torch.float64), spec.data.sequence_length
    for logits, chosen in choices:
        for of_sample, taken in zip(logits.split(length), chosen.split(length), strict=True):
            experts = logits.shape[1]
            load = torch.stack([(taken == expert).sum() for expert in range(experts)]).double() * experts / taken.numel()
            probability = torch.softmax(of_sample, 1).mean(0)
            z = torch.log(torch.exp(of_sample).sum(1)).square().mean()
            total = total + spec.train.router_balance * (load * probability).sum() + spec.train.router_z * z
    return total / spec.train.global_batch


def _separated(
    firsts: Sequence[int], length: int, documents: Sequence[int], window: int | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return, for samples that begin with these tokens, position_ids and a 4D mask for transformers' models, and a mask of the
    labels that belong to their token's own document."""
    of_token = torch.tensor([number for number, tokens in enumerate(documents) for _ in range(tokens)])
    rows = torch.stack([of_token[first:first + length + 1] for first in firsts])
    inputs, places = rows[:, :-1], torch.arange(length)
    back = places.unsqueeze(1) - places
    seen = (inputs.unsqueeze(2) == inputs.unsqueeze(1)) & (back >= 0) & (back < (window or length))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    positions = torch.tensor([[sum(document == row[k] for k in range(place)) for place, document in enumerate(row)]
                              for row in inputs.tolist()])
    return {"position_ids": positions, "attention_mask": mask.unsqueeze(1)}, inputs == rows[:, 1:]


def _plain(spec: JobSpec, skipped: Collection[int], documents: Sequence[int]) -> Result:
    torch.set_num_threads(1)
    shape, config = read_shape(spec), read_config(spec)
    family = family_of(shape.model_type)
    weights = {w.name: w for w in family.all_weights(shape)}
    model = _built(spec)
    padding = {f"{family.embedding}.weight": config["pad_token_id"]} if "pad_token_id" in config else {}
    source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, padding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source(weights[name], tuple(slice(0, size) for size in weights[name].shape))
            parameter.copy_(whole.reshape(parameter.shape))
    tokens = find_prepared(spec, shape.vocabulary, Path(spec.job.directory) / ".cache")
    assert tokens is not None, "the ranks have prepared them"
    samples = Samples(tokens, spec.data.sequence_length, spec.train.seed)
    assert samples.masked, "some labels must not count"
    settings = spec.train
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]  # biases and norms do not decay
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if settings.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, foreach=False)
    losses: list[float | None] = []
    norms: list[float | None] = []
    dropped: list[float | None] = []
    choices: list[tuple[Tensor, Tensor]] = []  # of the routers: logits, and the chosen experts
    for router in (module for name, module in model.named_modules() if name.endswith(".mlp.gate")):
        router.register_forward_hook(lambda _, inputs, output: choices.append((output[0], output[2])))
    taken = _limit(model, spec)
    for step in range(settings.steps):
        batch = range(step * settings.global_batch, (step + 1) * settings.global_batch)
        ids, labels = map(torch.from_numpy, samples.batch(batch))
        given: dict[str, Tensor] = {}
        if documents:
            given, own = _separated(list(map(samples.first_token, batch)), spec.data.sequence_length, documents, shape.window)
            labels = labels.where(own, IGNORE)
        with StaysDouble():
            logits = model(ids, **given).logits
        added, choices = _router_losses(spec, choices), []
        dropped.append(1 - float(torch.cat(taken).mean()) if taken else None)
        taken.clear()
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        counted = int((labels != IGNORE).sum())
        if counted == 0:  # no labels: the engine does not change the parameters
            losses.append(None)
            norms.append(None)
            continue
        loss = total / counted
        (loss + added).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))))
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: p.detach().reshape(weights[name].shape) for name, p in model.named_parameters()}
    return Result(tuple(losses), tuple(norms), state, tuple(dropped))
