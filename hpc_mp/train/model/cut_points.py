"""Layers of a module: the children of an ``nn.Sequential``, or the parts of a forward between markers.

The forward is traced by torch.fx, which enters only modules with a marker inside; all others are taken as they are. What a traced
forward does without tensors happens once, so it must not depend on values, on the mode or on chance.
"""

import copy
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import Parameter, signature
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, fx, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.model.layer_list import Cut, LayerSpec, refuse, unchanged_buffers

SIZES = ("shape", "dtype", "device", "ndim")  # attributes of a tensor that are no tensors
SIZED = ("size", "dim", "numel")  # the same of methods


class CutPoint(nn.Module):
    """A place at which a stage may begin: ``x = self.cut(x)``. It returns what it gets, and may be used several times."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Layers:
    """The parts of a module."""

    layers: tuple[LayerSpec, ...]
    outputs: tuple[str, ...]  # names of the tensors that its forward returns
    returned: Callable[[Mapping[str, Tensor]], Any]  # makes what its forward returns of the tensors by name
    defaults: tuple[str, ...] = ()  # arguments of its forward that keep their default values


def layers_of(module: nn.Module, inputs: Collection[str] = (), cut: Mapping[str, Cut] | None = None) -> Layers:
    """Return the layers of a module. Parameters keep the names that they have in it.

    Args:
        inputs: names of the batch's tensors: an argument of the module's forward with a default value is taken from the batch
            only if it is among them. Arguments without one always come from the batch.
        cut: pattern of linear modules' names -> what tensor ranks cut of them, as in ``LayerSpec``.

    Raises:
        HpcMpError: it has no place at which it can be cut, or cannot be traced between two of them.
    """
    if any(isinstance(inner, CutPoint) for inner in module.modules()):
        return _parts(module, inputs, cut or {})
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module):
        names = [*module._modules]
        parts = [(LayerSpec(name, partial(copy.deepcopy, child), (used,), (name,)), child)
                 for name, child, used in zip(names, module, ("input", *names), strict=False)]
        return Layers(_whole(module, parts, cut or {}), (names[-1],), operator.itemgetter(names[-1]))
    raise HpcMpError(type(module).__name__, "has no place at which it can be cut",
                     "put `x = self.cut(x)` with `self.cut = CutPoint()` between its parts, or write it as a list of LayerSpec")


class _Tracer(fx.Tracer):
    """Records a forward. ``inputs``: the arguments that it gets."""

    def __init__(self, inputs: Sequence[str]) -> None:
        super().__init__()
        self.inputs, self.contexts = inputs, _contexts()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self.contexts:
            raise ValueError("torch.no_grad and torch.autocast are not recorded")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return isinstance(module, CutPoint) or not any(isinstance(inner, CutPoint) for inner in module.modules())

    def create_args_for_root(self, forward: Callable[..., Any], *_: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Leave arguments that are no inputs at their default values."""
        inputs = {name: self.create_proxy("placeholder", name, (), {}) for name in self.inputs}

        def called(module: nn.Module) -> Any:
            return forward(module, **inputs)

        return called, [self.root]


def _contexts() -> tuple[bool, bool]:
    """Return whether gradients are made, and whether torch chooses formats."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _parts(module: nn.Module, inputs: Collection[str], cut: Mapping[str, Cut]) -> Layers:
    arguments = {name: argument.default is not Parameter.empty for name, argument in signature(module.forward).parameters.items()
                 if argument.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    defaults = tuple(name for name, has_default in arguments.items() if has_default and name not in inputs)
    root, graph = _traced(module, [name for name in arguments if name not in defaults])
    places = _places(module, graph)
    names = {node: f"part{places[node]}.{node.name}" for node in places} | {
        node: str(node.target) for node in graph.nodes if node.op == "placeholder"}
    returned, nodes = graph.output_node().args[0], list[fx.Node]()
    fx.node.map_arg(returned, nodes.append)
    if not nodes or any(node not in names for node in nodes):
        raise HpcMpError(f"{type(module).__name__}.forward", f"returns {returned}", "let it return tensors that it computes")
    parts = [_part(root, number, [node for node in places if places[node] == number], names)
             for number in sorted({*places.values()})]
    return Layers(_whole(module, parts, cut), tuple(dict.fromkeys(names[node] for node in nodes)),
                  lambda tensors: fx.node.map_arg(returned, lambda node: tensors[names[node]]), defaults)


def _traced(module: nn.Module, inputs: Sequence[str]) -> tuple[nn.Module, fx.Graph]:
    """Record the forward. Returns a module with all that the record names, and the record."""
    where, modes = f"{type(module).__name__}.forward", {inner: inner.training for inner in module.modules()}
    chance, graphs = torch.get_rng_state(), []
    try:
        with unchanged_buffers(module, f"{where}: it"):
            for training in (False, True):
                root = copy.copy(module.train(training))  # tracing gives it attributes
                graphs.append(_Tracer(inputs).trace(root))
    except (TypeError, ValueError, RuntimeError, NameError) as error:
        raise HpcMpError(f"{where}{_line(error)}", f"cannot be cut here: {error}",
                         "move it into a module of its own, between two cut points") from error
    finally:
        for inner, training in modes.items():
            inner.training = training
    if not torch.equal(chance, torch.get_rng_state()):
        raise HpcMpError(f"{where}: it draws random numbers between its cut points", "and would draw them once for all steps",
                         "use nn.Dropout, or draw them in a module of its own")
    if str(graphs[0]) != str(graphs[1]):
        raise HpcMpError(f"{where}: it computes something else in training than in an evaluation",
                         "and stages compute one of the two", "move what depends on self.training into a module of its own")
    return root, graphs[1]


def _line(error: BaseException) -> str:
    """Return the file and line of the user's code at which tracing has failed."""
    lines = [f" ({frame.f_code.co_filename}:{number})" for frame, number in walk_tb(error.__traceback__)
             if not frame.f_code.co_filename.startswith((os.path.dirname(torch.__file__), __file__))]
    return lines[-1] if lines else ""


def _places(module: nn.Module, graph: fx.Graph) -> dict[fx.Node, int]:
    """Remove the markers. Returns the part of each computation; parameters, sizes and what is made of sizes alone have none: they
    are taken where they are used."""
    number, places, sizes = 0, dict[fx.Node, int](), set[fx.Node]()
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "call_module" and isinstance(module.get_submodule(node.target), CutPoint):
            if node.args != tuple(inputs) or len(inputs) != 1:
                raise HpcMpError(f"CutPoint {node.target}", "takes one tensor", "call it for each of several tensors")
            number += 1
            node.replace_all_uses_with(inputs[0])
            graph.erase_node(node)
        elif _is_size(node) or (node.op in ("call_function", "call_method") and inputs and sizes.issuperset(inputs)):
            sizes.add(node)
        elif node.op.startswith("call_"):
            item = node.target is operator.getitem and isinstance(node.args[1], int | str)
            places[node] = places.get(inputs[0], number) if item else number
    order = {at: new for new, at in enumerate(sorted({*places.values()}))}
    return {node: order[at] for node, at in places.items()}


def _is_size(node: fx.Node) -> bool:
    """Tell whether a node is a size, a format or a device of a tensor."""
    attribute = node.op == "call_function" and node.target is getattr and node.args[1] in SIZES
    return attribute or (node.op == "call_method" and node.target in SIZED)


def _part(root: nn.Module, number: int, nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> tuple[LayerSpec, nn.Module]:
    """Return a part as a layer, and its module, whose paths are those of the whole."""
    inner, copies, uses = fx.Graph(), dict[fx.Node, fx.Node](), []

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in names:
                uses.append(names[node])
                copies[node] = inner.placeholder(node.name)
            else:
                copies[node] = inner.node_copy(node, copied)
        return copies[node]

    for node in nodes:
        copies[node] = inner.node_copy(node, copied)
    gives = [node for node in nodes if not {*node.users} <= {*nodes}] or nodes[-1:]
    results = tuple(copies[node] for node in gives)
    inner.output(results if len(results) > 1 else results[0])
    module = fx.GraphModule(root, inner)
    make = partial(copy.deepcopy, module)
    return LayerSpec(f"part{number}", make, tuple(uses), tuple(names[node] for node in gives), prefix=""), module


def _whole(whole: nn.Module, parts: Sequence[tuple[LayerSpec, nn.Module]], cut: Mapping[str, Cut]) -> tuple[LayerSpec, ...]:
    """Return the layers with what is cut and tied in them. A parameter has the first of its names in the whole module, and other
    uses are tied to it."""
    inside = [(spec, module, dict(module.named_parameters(remove_duplicate=False))) for spec, module in parts]
    used = {spec.own(path) for spec, _, parameters in inside for path in parameters}
    names: dict[int, str] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name in used:
            names.setdefault(id(parameter), name)
    owned, layers, unused = set[str](), [], set(cut)
    for spec, module, parameters in inside:
        tied = {path: name for path, parameter in parameters.items()
                if spec.own(path) != (name := names[id(parameter)]) or name in owned}
        owned |= {spec.own(path) for path in parameters}
        matches = {path: pattern for path, _ in module.named_modules() for pattern in cut if fnmatchcase(spec.own(path), pattern)}
        unused -= {*matches.values()}
        layers.append(replace(spec, tied=tied, cut={path: cut[pattern] for path, pattern in matches.items()}))
    refuse(sorted(unused), "cut = ", "matches no module of it", "write names as in named_modules()")
    return tuple(layers)
