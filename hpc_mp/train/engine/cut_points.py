"""Layers of a module that somebody has written: the children of an ``nn.Sequential``, or the parts of one forward between markers.

The forward is traced by torch.fx, which enters only modules with a marker inside; all others are taken as they are. A forward that
branches on values between two markers cannot be cut.
"""

import copy
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.engine.layer_list import LayerSpec


class CutPoint(nn.Module):
    """A place at which a stage may begin: ``x = self.cut(x)``. It returns what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Layers:
    """What a module consists of. ``outputs``: the names of what its forward returns."""

    layers: tuple[LayerSpec, ...]
    outputs: tuple[str, ...]


def layers_of(module: nn.Module) -> Layers:
    """Return the layers of a module. Names of tensors of the batch are those of its forward's arguments.

    Raises:
        HpcMpError: it has no place at which it can be cut, or cannot be traced between two of them.
    """
    if any(isinstance(inner, CutPoint) for inner in module.modules()):
        return _parts(module)
    if isinstance(module, nn.Sequential):
        names = [f"layer{number}" for number in range(len(module))]
        uses = [("input",), *((name,) for name in names[:-1])]
        return Layers(_specs((name, child, used, (name,)) for name, child, used in zip(names, module, uses, strict=True)),
                      (names[-1],))
    raise HpcMpError(type(module).__name__, "has no place at which it can be cut",
                     "put `x = self.cut(x)` with `self.cut = CutPoint()` between its parts, or write it as a list of LayerSpec")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return isinstance(module, CutPoint) or not any(isinstance(inner, CutPoint) for inner in module.modules())


def _parts(module: nn.Module) -> Layers:
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
    except (fx.proxy.TraceError, TypeError, ValueError) as error:
        raise HpcMpError(f"{type(module).__name__}.forward{_line(module, error)}", f"cannot be cut here: {error}",
                         "move what depends on values into a module of its own, between two cut points") from error
    part, parts = 0, {}
    for node in graph.nodes:
        part += node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), CutPoint)
        parts[node] = part
    whole = split_module(fx.GraphModule(module, graph), module, lambda node: parts[node])
    names: dict[fx.Node, str] = {}
    layers: list[tuple[str, nn.Module, tuple[str, ...], tuple[str, ...]]] = []
    outputs: tuple[str, ...] = ()
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op == "call_function" and node.target is operator.getitem:
            names[node] = f"{names[node.args[0]]}_{node.args[1]}"
        elif node.op == "call_module":
            names[node] = name = f"part{len(layers)}"
            several = sorted(user.args[1] for user in node.users if user.target is operator.getitem)
            gives = tuple(f"{name}_{number}" for number in several) or (name,)
            layers.append((name, whole.get_submodule(str(node.target)), tuple(names[given] for given in node.args), gives))
        elif node.op == "output":
            returned = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            outputs = tuple(names[given] for given in returned)
    return Layers(_specs(layers), outputs)


def _line(module: nn.Module, error: BaseException) -> str:
    """Return the file and line of the module's code at which tracing has failed."""
    code, trace, found = type(module).forward.__code__, error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code is code:
            found = f" ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _specs(parts: Iterable[tuple[str, nn.Module, tuple[str, ...], tuple[str, ...]]]) -> tuple[LayerSpec, ...]:
    """Return the layers; a parameter that an earlier one has too is tied to it."""
    owners: dict[int, str] = {}
    specs = []
    for name, module, uses, gives in parts:
        tied = {}
        for inner, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in owners:
                tied[inner] = owners[id(parameter)]
            owners.setdefault(id(parameter), f"{name}.{inner}")
        make: Callable[[], nn.Module] = partial(copy.deepcopy, module)
        specs.append(LayerSpec(name, make, uses, gives, tied=tied))
    return tuple(specs)
