"""The record of a model's forward on the meta device, without values: the order of its layers, what they get, how they attend,
which experts they choose, and what would differ between layouts."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 13  # of the sample that is read: no other size of a model
ALIBI = "alibi"  # the argument of layers with biases for distances: (samples × heads, 1, tokens)
OWN_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids", ALIBI)  # of layers, which the engine gives them
SINKS = "s_aux"  # the argument of an attention function: a score for each head


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention function: its module, and what it gets besides queries, keys and values."""

    module: nn.Module
    settings: Mapping[str, Any]
    tensors: tuple[str, ...]
    masked: bool


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of experts. ``choices``: experts of a token; 0 if they are not told tokens, choices and weights."""

    module: nn.Module
    choices: int


class ForwardTrace:
    """The record.

    Attributes:
        order: numbers of the layers that were called.
        faults: reasons why layers cannot be on several stages.
        tuples: True if layers return tuples.
        attentions, experts: calls of attention functions, and of experts, by layer.
        routers: modules beside experts that return logits, weights and choices.
        before, behind: modules beside the layers that were called before and behind them.
        added_masks: True if every layer gets a mask of scores that holds for all heads, (1, 1, tokens, tokens), or has biases for
            distances too.
        placed: arguments of layers that were made for the positions of tokens, besides rotary tables.
        counted: True if a layer counts the tokens that it gets.
        drawn: operations that drew random numbers, each once; ``dropped``: those of them that drop elements.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.faults: list[str] = []
        self.tuples = self.counted = False
        self.added_masks = True
        self.attentions: dict[int, list[AttentionCall]] = {}
        self.experts: dict[int, ExpertsCall] = {}
        self.routers: set[nn.Module] = set()
        self.before: list[nn.Module] = []
        self.behind: list[nn.Module] = []
        self.placed: dict[str, None] = {}
        self.drawn: dict[str, None] = {}
        self._last: Tensor | None = None
        self._rotary: list[Tensor] = []
        self._inside = False

    @property
    def dropped(self) -> list[str]:
        return [name for name in self.drawn if "dropout" in name or "bernoulli" in name]

    @contextmanager
    def of(self, base: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        """Note what layers get and return, and what is called beside them. Modules of dropout, which the engine replaces, draw
        nothing."""
        hooks = [hook for number, layer in enumerate(layers) for hook in (
            layer.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True),
            layer.register_forward_hook(self._end))]
        for number, parent in ((number, module) for number, layer in enumerate(layers) for module in layer.modules()):
            for experts in filter(is_experts, parent.children()):
                hooks += [experts.register_forward_pre_hook(partial(self._choose, number)),
                          experts.register_forward_hook(self._chosen),
                          *(other.register_forward_hook(self._route) for other in parent.children() if other is not experts)]
        beside = [module for child in base.children() if child is not layers
                  for module in (child if isinstance(child, nn.ModuleList) else (child,))]
        hooks += [module.register_forward_pre_hook(self._beside) for module in beside]
        hooks += [module.register_forward_hook(self._turn) for module in beside if is_rotary(module)]
        dropouts = {module: module.p for module in base.modules() if isinstance(module, nn.Dropout)}
        for module in dropouts:
            module.p = 0.0
        with _Operations(self):
            yield
        for hook in hooks:
            hook.remove()
        for module, probability in dropouts.items():
            module.p = probability

    def note(self, operation: Any, args: Sequence[Any]) -> None:
        """Note an operation of torch."""
        if torch.Tag.nondeterministic_seeded in operation.tags:
            self.drawn[operation.__name__] = None
        self.counted |= self._inside and operation.__name__.startswith("arange") and TOKENS in args

    def _begin(self, number: int, layer: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        names = [*inspect.signature(type(layer).forward).parameters][1:]
        arguments = dict(zip(names, args, strict=False)) | settings
        hidden = args[0] if args else settings.get("hidden_states")
        others = {name: value for name, value in arguments.items() if value is not hidden}
        mask = arguments.get("attention_mask")
        self.added_masks &= isinstance(mask, Tensor) and mask.is_floating_point() and mask.shape[2:] == (TOKENS, TOKENS) and (
            mask.shape[:2] == (1, 1) or isinstance(arguments.get(ALIBI), Tensor))
        if self._last is not None and hidden is not self._last:
            self.faults.append(f"changes hidden states between the layers {number - 1} and {number}")
        if any(tensor.requires_grad for tensor in tensors_in([*others.values()])):
            self.faults.append(f"gives layer {number} more than the hidden states of the layer before")
        for name, value in others.items():
            tensors = [] if name in OWN_ARGUMENTS else [tensor for tensor in tensors_in(value) if TOKENS in tensor.shape]
            if any(all(tensor is not table for table in self._rotary) for tensor in tensors):
                self.placed[name] = None
        self.order.append(number)
        self._inside = True

    def _beside(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls = self.behind if self.order else self.before
        if module not in calls:
            calls.append(module)

    def _turn(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._rotary += tensors_in(output)

    def _end(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tuples |= not isinstance(output, Tensor)
        self._last = output if isinstance(output, Tensor) else output[0]
        self._inside = False

    def _choose(self, number: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        matrices = [value for value in args if isinstance(value, Tensor) and value.dim() == 2]
        formats = [value.is_floating_point() for value in matrices]
        self.experts[number] = ExpertsCall(experts, matrices[1].shape[1] if formats == [True, False, True] else 0)
        self._inside = False  # their implementation may count tokens

    def _route(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3 and all(isinstance(value, Tensor) for value in output):
            logits, weights, chosen = output
            if logits.dim() == 2 and weights.shape == chosen.shape and not chosen.is_floating_point():
                self.routers.add(router)

    def _chosen(self, experts: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside = True

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
               **settings: Any) -> tuple[Tensor, None]:
        """Take the call of an attention. Return something of the right shape."""
        used = {name: setting for name, setting in settings.items() if setting is not None}
        tensors = tuple(name for name, setting in used.items() if isinstance(setting, Tensor) and name != "position_ids")
        call = AttentionCall(module, used, tensors, attention_mask is not None)
        self.attentions.setdefault(self.order[-1] if self.order else 0, []).append(call)
        used_values = (query.sum() + key.sum() + sum(used[name].sum() for name in tensors)) * 0
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2) + used_values, None


class _Operations(TorchDispatchMode):
    """Notes every operation in a trace."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.trace.note(operation, args)
        return operation(*args, **(kwargs or {}))


def is_rotary(module: nn.Module) -> bool:
    """Return True for a module that makes rotary tables."""
    return "rotary" in type(module).__name__.lower()


def is_experts(module: nn.Module) -> bool:
    """Return True for a module of experts whose implementation transformers chooses."""
    return hasattr(module, "is_concatenated")


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors inside of lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in([*values.values()])
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
