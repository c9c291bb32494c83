"""The reference of exactness: one process of plain transformers and torch.optim on the samples of a job."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from engines import quiet
from layouts import Result, parameters
from peft_models import from_peft, with_peft
from ranks import run_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_config, read_shape
from hpc_mp.layout.models import family_of
from hpc_mp.train.data import IGNORE, Samples, TokenSet, prepare_held_out, prepare_job
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model import initial
from hpc_mp.train.rank.trainer import evaluation_is_due


def run_plain(spec: JobSpec, skipped: Collection[int] = (), documents: Sequence[int] = ()) -> Result:
    """Return the result of ``plain`` in a process of its own."""
    return run_ranks(1, plain, spec, skipped, documents)[0]


def training_of(spec: JobSpec) -> str:
    """Return all that the result of ``plain`` depends on: the tables of a job, and the text with its tokenizer."""
    tokenizer = sorted(Path(spec.data.tokenizer).iterdir()) if spec.data.tokenizer else []
    texts = [*find_files(spec.data.files), *(find_files(spec.evaluate.files) if spec.evaluate.files else [])]
    contents = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in [*texts, *tokenizer])).hexdigest()
    return f"{spec.model!r} {spec.data!r} {spec.train!r} {spec.lora!r} {spec.evaluate!r} {contents}"


def plain_model(spec: JobSpec, checkpoint: Path) -> PreTrainedModel:
    """Return plain transformers' model with the parameters of a checkpoint and the job's expert capacity."""
    model, state = _built(spec), parameters(spec, checkpoint)
    _limit(model, spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name].reshape(parameter.shape))
    return model


def held_out_loss(model: PreTrainedModel, tokens: TokenSet, length: int) -> tuple[float, int]:
    """Return the mean loss over all labels that count, and their number. Rows are computed one at a time. The last one is filled,
    which changes no token before."""
    counted = tokens.loss()
    assert counted is not None, "some labels must not count"
    ids, counts = torch.from_numpy(tokens.tokens().astype("int64")), torch.from_numpy(counted.astype("bool"))
    total, labels = torch.zeros((), dtype=torch.float64), 0
    short = -(len(ids) - 1) % length
    assert short and len(ids) > 24 * length, "a last row that is short, more rows than a step has"
    ids, counts = torch.nn.functional.pad(ids, (0, short)), torch.nn.functional.pad(counts, (0, short))
    for row in range(0, len(ids) - 1, length):
        window = slice(row, row + length + 1)
        with StaysDouble(), torch.no_grad():
            logits = model(ids[window][None, :-1]).logits[0]
        wanted = torch.where(counts[window][1:], ids[window][1:], IGNORE)
        total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
        labels += int((wanted != IGNORE).sum())
    return float(total) / labels, labels


def _built(spec: JobSpec) -> PreTrainedModel:
    config = read_config(spec)
    values = {key: value for key, value in config.items() if key != "model_type"}
    with StaysDouble():
        hugging_face = AutoConfig.for_model(config["model_type"], **values)
        hugging_face._experts_implementation = "eager"  # the other implementations of transformers do not support fp64
        return AutoModelForCausalLM.from_config(hugging_face).double()


def _loaded(spec: JobSpec) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(spec.model.pretrained)
    config._experts_implementation = "eager"
    with StaysDouble():
        model = AutoModelForCausalLM.from_pretrained(spec.model.pretrained, config=config, dtype=torch.float64).train()
        return _language_model(model) if hasattr(model.model, "language_model") else model


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


def _separated(firsts: Sequence[int], length: int, documents: Sequence[int],
               window: int | None) -> tuple[dict[str, Tensor], Tensor]:
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


def _factor(name: str, factors: Mapping[str, float]) -> float:
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


def _language_model(whole: PreTrainedModel) -> PreTrainedModel:
    """Return the language model of one that also sees."""
    model = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=torch.float32).double()
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.lm_head.load_state_dict(whole.lm_head.state_dict())
    return model.train()


def plain(spec: JobSpec, skipped: Collection[int] = (), documents: Sequence[int] = ()) -> Result:
    """Train one process of plain transformers and torch.optim on the same samples, from the same initial values.

    Args:
        skipped: steps (from 0) without an update after the backward.
        documents: the number of tokens of each document of the text, if documents are separate.
    """
    torch.set_num_threads(1)
    shape = read_shape(spec)
    family = family_of(shape)
    weights = {w.name: w for w in family.all_weights(shape)}
    model = _built(spec) if spec.model.pretrained is None else _loaded(spec)
    row = getattr(model.get_input_embeddings(), "padding_idx", None)
    padding = {} if row is None else {f"{family.embedding}.weight": row}
    source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, padding)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if spec.model.pretrained is None else ():
            whole = source(weights[name], tuple(slice(0, size) for size in weights[name].shape))
            parameter.copy_(whole.reshape(parameter.shape))
    trained = dict(model.named_parameters())
    if shape.adapters is not None:
        model, trained = with_peft(model, shape, spec, source)
    cache = Path(spec.job.directory) / ".cache"
    training = prepare_job(spec, shape.vocabulary, cache, quiet)
    held_out = prepare_held_out(spec, shape.vocabulary, cache, quiet, training)
    samples = Samples(training, spec.data.sequence_length, spec.train.seed)
    assert samples.masked, "some labels must not count"
    settings = spec.train
    groups = [{"params": [parameter], "lr": settings.learning_rate * _factor(name, settings.lr_factors),
               "weight_decay": 0.0 if parameter.dim() == 1 or name.endswith("bias") else settings.weight_decay}
              for name, parameter in trained.items()]
    makers = {"adamw": lambda groups: torch.optim.AdamW(
                  groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, foreach=False),
              "sgd": lambda groups: torch.optim.SGD(
                  groups, lr=settings.learning_rate, momentum=settings.momentum, foreach=False),
              "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=settings.learning_rate, foreach=False),
              "muon": lambda groups: torch.optim.Muon(
                  groups, lr=settings.learning_rate, momentum=settings.muon_momentum, adjust_lr_fn="match_rms_adamw")}
    matrices = [name.startswith(f"{family.blocks}.") and parameter.dim() == 2 for name, parameter in trained.items()]
    kinds = [settings.optimizer if matrix or settings.optimizer != "muon" else "adamw" for matrix in matrices]
    optimizers: list[torch.optim.Optimizer] = [
        makers[kind]([group for group, own in zip(groups, kinds, strict=True) if own == kind]) for kind in sorted({*kinds})]
    schedulers = [] if settings.lr_schedule == "constant" else [get_scheduler(
        settings.lr_schedule, optimizer, settings.warmup_steps, settings.steps,
        settings.lr_schedule_options.model_dump(exclude_none=True)) for optimizer in optimizers]
    losses: list[float | None] = []
    norms: list[float | None] = []
    dropped: list[float | None] = []
    routers: list[float] = []
    evaluations: list[tuple[int, float, int]] = []
    choices: list[tuple[Tensor, Tensor]] = []  # of the routers: logits, and the chosen experts
    for router in (module for name, module in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))):
        router.register_forward_hook(lambda _, inputs, output: choices.append((output[0], output[2])))
    taken = _limit(model, spec)
    for step in range(settings.steps):
        batch = range(step * settings.global_batch, (step + 1) * settings.global_batch)
        ids, labels = map(torch.from_numpy, samples.batch(batch))
        given: dict[str, Tensor] = {}
        if documents:
            firsts = list(map(samples.first_token, batch))
            given, own = _separated(firsts, spec.data.sequence_length, documents, shape.window_of(0))
            labels = labels.where(own, IGNORE)
        with StaysDouble():
            logits = model(ids, use_cache=False, **given).logits
        added, choices = _router_losses(spec, choices), []
        routers.append(float(added))
        dropped.append(1 - float(torch.cat(taken).mean()) if taken else None)
        taken.clear()
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum",
                                                  label_smoothing=settings.label_smoothing)
        total = total + settings.z_loss * torch.logsumexp(logits, -1)[labels != IGNORE].square().sum()
        counted = int((labels != IGNORE).sum())
        if counted == 0:  # no labels: the engine does not change the parameters
            losses.append(None)
            norms.append(None)
            continue
        loss = total / counted
        (loss + added).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))))
        if step not in skipped:
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        model.zero_grad()
        losses.append(loss.item())
        if held_out is not None and evaluation_is_due(spec, step + 1):
            evaluations.append((step + 1, *held_out_loss(model, held_out, spec.data.sequence_length)))
            choices.clear()
            taken.clear()
    if shape.adapters is not None:
        state = from_peft(shape, trained)
    else:
        state = {name: p.detach().reshape(weights[name].shape) for name, p in trained.items()
                 if p.requires_grad and weights[name].trained}
    return Result(tuple(losses), tuple(norms), state, tuple(dropped), tuple(routers), tuple(evaluations))
