"""The reference of a verification: Hugging Face's own model and torch.optim in one process.

Each document is a sequence of its own, so that there are no masks but those that the model makes. Of ours are only the samples,
the first values, and the elements that dropout drops, which are a hash of the place in the sample.
"""

import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import cycle, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_config
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.optimizers import has_no_decay
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model.encoder_decoder import DROPOUTS, POSITIONS
from hpc_mp.train.parallel.dropout import DropoutClock, Moment, call_names, keep
from hpc_mp.train.verify.adapters import attach
from hpc_mp.train.verify.observed import INPUT, Observed, Output, drawn, hidden_of, watched, whole
from hpc_mp.train.verify.samples import DrawnSamples


class Plain(StaysDouble):
    """Hugging Face's model for the documents of samples, in fp64. As a mode of torch it replaces the random numbers of dropout.

    Attributes:
        stored: the parameters and buffers that a checkpoint has, by name.
        trained: the parameters that are trained, by their names in the engine.
    """

    def __init__(self, spec: JobSpec, shape: ModelShape) -> None:
        super().__init__()
        self.spec, self.family, self.clock = spec, family_of(shape), DropoutClock(spec.train.seed)
        self.classes = shape.classes
        self.sites: list[str] = []  # names of the modules that run and drop something
        self.sample, self.places, self.length = 0, slice(0), spec.data.sequence_length
        self.observed = Observed()
        source = drawn(spec.train.seed)
        self.model = self._built()
        if self.family.decoder is not None and not shape.tied:
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        weights = {weight.name: weight for weight in self.family.all_weights(shape)}
        with torch.no_grad():
            self.stored = {name: values for name, values in (*self.model.named_parameters(), *self.model.named_buffers())
                           if name in weights}
            for name, values in self.stored.items():
                values.copy_(source(weights[name], whole(weights[name].shape)).reshape(values.shape))
        self.trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self._watch()
        if shape.adapters is not None:
            self.trained = attach(self.model, shape, source, self.drop)

    def _built(self) -> PreTrainedModel:
        config = read_config(self.spec)
        values = {key: value for key, value in config.items() if key != "model_type"}
        if self.spec.train.dropout is not None:
            values |= dict.fromkeys(self.family.dropouts, self.spec.train.dropout)
        with self:
            hugging_face = AutoConfig.for_model(config["model_type"], **values)
            hugging_face._experts_implementation = "eager"  # the other implementations of transformers do not support fp64
            attention = "sdpa" if getattr(hugging_face, "alibi", False) else "eager"  # Falcon's own code adds the biases twice
            language_model = AutoModelForCausalLM if self.family.decoder is None else AutoModelForSeq2SeqLM
            kind = AutoModelForSequenceClassification if self.classes else language_model
            model = kind.from_config(hugging_face, attn_implementation=attention).double().train()
        if self.classes:
            model.config.pad_token_id = None  # drawn tokens are no padding
        return cast(PreTrainedModel, model)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is nn.functional.dropout and self.sites:
            values = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
            return self.drop(values["input"], values.get("p", 0.5) if values.get("training", True) else 0.0, self.sites[-1])
        return super().__torch_function__(function, types, args, kwargs)

    def drop(self, x: Tensor, probability: float, site: str) -> Tensor:
        """Return a tensor with the elements dropped that the engine drops: (1, tokens, …), weights of attention, or (1, …) of the
        first token."""
        if probability == 0.0:
            return x
        if x.dim() == 2 and not self.classes:
            return self.drop(x.unsqueeze(0), probability, site).squeeze(0)
        if x.dim() == 2:
            index = torch.arange(x.shape[1])
        elif self.family.decoder is not None:  # of its samples no place is left out
            index = torch.arange(x[0].numel()).view(x.shape[1:])
        elif x.dim() == 4:  # (1, heads, tokens, tokens)
            index = torch.arange(x.shape[1] * self.length**2).view(-1, self.length, self.length)[:, self.places, self.places]
        else:
            index = torch.arange(self.length * x.shape[2:].numel()).view(self.length, *x.shape[2:])[self.places]
        stays = keep(self.clock.site_keys(zlib.crc32(site.encode()), x.device), index.to(torch.int32), probability)
        return torch.where(stays, x / (1.0 - probability), 0.0)

    def _watch(self) -> None:
        """Note the outputs of modules, and which module drops."""
        attentions: dict[str, tuple[str, ...]] = {
            f"{self.family.blocks}.{layer}.{self.family.attention}": (f"attention.{layer}",)
            for layer in range(self.model.config.num_hidden_layers)}
        inner, twice = self.family.attention_dropout, self.family.twice
        attentions |= {f"{path}.{inner}": site for path, site in attentions.items()} if inner is not None else {}
        attentions |= {twice: tuple(call_names(twice, 2))} if twice else {}
        if self.family.decoder is not None:
            attentions = {name: (name,) for name, _ in self.model.named_modules() if self.family.has_heads(name)}
            attentions |= {f"{stack}.{DROPOUTS[0]}": tuple(f"{stack}.{name}" for name in DROPOUTS) for stack in POSITIONS}
        for name, module in self.model.named_modules():
            module.register_forward_hook(partial(self._ended, name))
            if name in attentions or isinstance(module, nn.Dropout):
                sites = cycle(attentions.get(name, (name,)))
                module.register_forward_pre_hook(lambda _, args, sites=sites: self.sites.append(next(sites)))
                module.register_forward_hook(lambda *_: self.sites.pop() and None)
        for name, module in watched(self.family, self.model):
            module.register_forward_hook(lambda _, args, output, name=name: self._note(name, output))
        first = self.model.get_submodule(f"{self.family.blocks}.0")
        first.register_forward_pre_hook(lambda _, args, more: self._note(
            f"{INPUT}{self.family.blocks}.0", (*args, *more.values())), with_kwargs=True)

    def _ended(self, name: str, *_: Any) -> None:
        if name not in self.observed.order:
            self.observed.order.append(name)

    def _note(self, name: str, output: Any) -> None:
        hidden = hidden_of(output)
        if name.startswith(INPUT):
            self._ended(name)
        if hidden is not None and self.clock.moment.step == 0:
            whole = self.family.decoder is not None
            places = torch.arange(hidden.shape[1] if whole else self.length)[slice(None) if whole else self.places].numpy()
            self.observed.outputs.setdefault(name, []).append(Output((self.sample,), places, hidden.detach().numpy().copy()))

    def loss(self, samples: DrawnSamples, position: int) -> Tensor:
        """Return the loss of a sample, summed over its labels."""
        ids, labels = map(torch.from_numpy, samples.at(position))
        cuts, total = (samples.prompt, *samples.cuts(position), self.length), torch.zeros((), dtype=torch.float64)
        train = self.spec.train
        self.sample = position
        for begin, end in pairwise(cuts):
            self.places = slice(begin, end)
            own = labels[self.places]
            if self.classes and not len(own := own[own != IGNORE]):
                continue
            with self:
                logits = self.model(**self._inputs(samples, position, ids[None]), use_cache=False).logits.flatten(0, -2)
                total = total + nn.functional.cross_entropy(logits, own, ignore_index=IGNORE, reduction="sum",
                                                            label_smoothing=train.label_smoothing)
                total = total + train.z_loss * torch.logsumexp(logits, -1)[own != IGNORE].square().sum()
        return total

    def _inputs(self, samples: DrawnSamples, position: int, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model's forward."""
        if not (prompt := samples.prompt):
            return {"input_ids": ids[:, self.places]}
        ends = torch.from_numpy(samples.documents([position]))[:, 1:]
        return {"input_ids": ids[:, :prompt], "attention_mask": torch.arange(prompt) < ends, "decoder_input_ids": ids[:, prompt:]}

    def train(self, samples: DrawnSamples) -> Observed:
        """Train the steps of the job."""
        settings, shapes = self.spec.train, {name: parameter.shape for name, parameter in self.trained.items()}
        optimizer = self._optimizer()
        for step in range(settings.steps):
            batch = range(step * settings.global_batch, (step + 1) * settings.global_batch)
            labels, loss = samples.label_count(batch), 0.0
            for position in batch:
                self.clock.set(Moment(step, (position,)))
                part = self.loss(samples, position) / labels
                part.backward()
                loss += part.item()
            self.observed.losses.append(loss)
            if step == 0:
                self.observed.gradients = [(name, whole(shapes[name]), _gradient(parameter))
                                           for name, parameter in self.trained.items()]
            norm = nn.utils.clip_grad_norm_(self.trained.values(), settings.clip or float("inf"))
            self.observed.norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        return self.observed

    def _optimizer(self) -> torch.optim.Optimizer:
        settings = self.spec.train
        groups = []
        for name, parameter in self.trained.items():
            spared = has_no_decay(name, parameter.shape, settings.no_decay)
            factor = next((factor for pattern, factor in settings.lr_factors.items() if fnmatchcase(name, pattern)), 1.0)
            groups.append({"params": [parameter], "lr": settings.learning_rate * factor,
                           "weight_decay": 0.0 if spared else settings.weight_decay})
        if settings.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, foreach=False)
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, foreach=False)


def _gradient(parameter: nn.Parameter) -> Any:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).numpy().copy()

