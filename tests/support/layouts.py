"""Small real jobs for the exactness tests: text with partly ignored labels, tiny models, one process to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks, train
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.layout.models import family_of, read_config, read_shape
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.rundir import RunDirectory, create_run, newest_complete, read_lines, write_json
from hpc_mp.train.data import IGNORE, Samples, load_tokens
from hpc_mp.train.engine import initial
from hpc_mp.train.engine.stays_double import StaysDouble

# Sizes that nothing divides evenly: 5 layers, a vocabulary of 307, an intermediate size of 102; 8 heads over 4 key-value heads.
MODELS: dict[str, str] = {
    "gpt2": 'model_type = "gpt2", n_layer = 5, n_embd = 32, n_head = 8, n_inner = 102, vocab_size = 307, n_positions = 32, '
            "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0",
    "qwen2": 'model_type = "qwen2", num_hidden_layers = 5, hidden_size = 32, num_attention_heads = 8, num_key_value_heads = 4, '
             "intermediate_size = 102, vocab_size = 307, max_position_embeddings = 32",
    "llama": 'model_type = "llama", num_hidden_layers = 5, hidden_size = 32, num_attention_heads = 8, num_key_value_heads = 4, '
             "intermediate_size = 102, vocab_size = 307, max_position_embeddings = 32",
}
MODELS["llama-tied"] = MODELS["llama"] + ", tie_word_embeddings = true"
MODELS["gpt2-untied"] = MODELS["gpt2"] + ", tie_word_embeddings = false"
# What else a config may ask of the same code: biases, a head size of its own, a padding row, scaled rotary positions …
LLAMA = MODELS["llama"]
VARIANTS: dict[str, str] = {
    "llama with biases": LLAMA + ", attention_bias = true, mlp_bias = true",
    "llama with its own head size": LLAMA + ", head_dim = 6",
    "llama with a padding row": LLAMA + ", pad_token_id = 5",
    "llama with scaled positions": LLAMA + ', rope_parameters = { rope_type = "linear", factor = 2.0, rope_theta = 5000.0 }',
    "llama without groups": LLAMA.replace("num_key_value_heads = 4", "num_key_value_heads = 8"),
    "gpt2 scaled by layer": MODELS["gpt2"] + ", scale_attn_by_inverse_layer_idx = true",
    "gpt2 with relu": MODELS["gpt2"] + ', activation_function = "relu"',
}

JOB = """
[job]
name = "exact"
directory = "runs"
device = "cpu"
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
"""


@dataclass(frozen=True)
class Result:
    """What a run came to: loss and gradient norm of every step, parameters at the end (engine shapes)."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    parameters: dict[str, Tensor]

    def distance(self, other: Result) -> float:
        """The largest difference of any loss, norm or parameter."""
        assert self.parameters.keys() == other.parameters.keys()
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=True)]
        numbers = max(abs(a - b) for a, b in pairs)
        tensors = max(float((self.parameters[name] - other.parameters[name]).abs().max()) for name in self.parameters)
        return max(numbers, tensors)


def write_text(directory: Path) -> None:
    """Rows of prompts and completions: the prompts' tokens do not count in the loss, so microbatches count differently."""
    words = (Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text()).split()
    rows = []
    for start in range(0, len(words) - 40, 23):
        cut = start + 3 + start % 17
        rows.append({"prompt": " ".join(words[start:cut]), "completion": " " + " ".join(words[cut:start + 23])})
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_job(directory: Path, model: str = "gpt2", more: str = "") -> Path:
    """A job file with its text; the directory is made."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory)
    path = directory / "job.toml"
    path.write_text(JOB.format(model=MODELS[model]) + more)
    return path


def job(directory: Path, model: str, overrides: Sequence[str] = ()) -> JobSpec:
    path = directory / f"{model}.toml"
    path.write_text(JOB.format(model=(MODELS | VARIANTS)[model]))
    return load_job(path, overrides)


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, **more: object) -> list[str]:
    """Overrides of a job: the degrees, and further keys of ``[parallel]``."""
    settings = {"tensor": tensor, "pipeline": pipeline} | more
    return [f"job.ranks_per_node={tensor * pipeline * data}",
            *(f"parallel.{key}={value}" for key, value in settings.items())]


def start(spec: JobSpec) -> RunDirectory:
    """A run directory as ``launch`` writes it."""
    run = create_run(Path(spec.job.directory), spec.job.name)
    order = "cluster" if spec.parallel.order == "auto" else spec.parallel.order
    degrees = Degrees(spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree)
    run.job.write_text(dump_job(spec))
    write_json(run.placement, to_dict(place(degrees, order, spec.job.ranks_per_node)))
    return run


def run_engine(spec: JobSpec, before: Callable[[], None] = lambda: None, run: RunDirectory | None = None) -> Result:
    """Train on forked ranks; ``before`` is called in every rank first (to break something on purpose)."""
    run = run or start(spec)

    def rank() -> int:
        before()
        return train(run.job)

    codes = run_ranks(spec.ranks, rank)
    assert codes == [0] * spec.ranks, run.main_log.read_text()
    lines = read_lines(run.metrics)
    checkpoint, skipped = newest_complete(run.checkpoints)
    assert checkpoint is not None and not skipped
    return Result(tuple(line["loss"] for line in lines), tuple(line["grad_norm"] for line in lines), parameters(spec, checkpoint))


def parameters(spec: JobSpec, checkpoint: Path) -> dict[str, Tensor]:
    shape = read_shape(spec)
    weights = family_of(shape.model_type).stage_weights(shape, range(shape.layers), first=True, last=True)
    state = {w.name: torch.full(w.shape, float("nan"), dtype=torch.float64) for w in weights}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return state


def run_plain(spec: JobSpec, skipped: Collection[int] = ()) -> Result:
    """One process of plain transformers and torch.optim, on the same samples from the same first values.

    Args:
        skipped: steps (from 0) after whose backward nothing is updated.
    """
    return run_ranks(1, _plain, spec, skipped)[0]


def _plain(spec: JobSpec, skipped: Collection[int]) -> Result:
    torch.set_num_threads(1)
    shape, config = read_shape(spec), read_config(spec)
    family = family_of(shape.model_type)
    weights = {w.name: w for w in family.stage_weights(shape, range(shape.layers), first=True, last=True)}
    values = {key: value for key, value in config.items() if key != "model_type"}
    with StaysDouble():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **values)).double()
    padding = {f"{family.embedding}.weight": config["pad_token_id"]} if "pad_token_id" in config else {}
    source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, padding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source(weights[name], tuple(slice(0, size) for size in weights[name].shape))
            parameter.copy_(whole.reshape(parameter.shape))
    cache = Path(spec.job.directory) / ".cache"
    tokens = next(path for path in cache.glob("tokens-*") if (path / "meta.json").exists())
    samples = Samples(load_tokens(tokens), spec.data.sequence_length, spec.train.seed)
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
    losses, norms = [], []
    for step in range(settings.steps):
        batch = range(step * settings.global_batch, (step + 1) * settings.global_batch)
        ids, labels = map(torch.from_numpy, samples.batch(batch))
        with StaysDouble():
            logits = model(ids).logits
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = total / max(1, int((labels != IGNORE).sum()))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))))
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: p.detach().reshape(weights[name].shape) for name, p in model.named_parameters()}
    return Result(tuple(losses), tuple(norms), state)
