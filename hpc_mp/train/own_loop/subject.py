"""The subject of a loop: a Hugging Face model, or layers that somebody has written."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models.shape import config_of, text_part
from hpc_mp.train.model.cut_points import CutPoint, Layers, layers_of
from hpc_mp.train.model.layer_list import LayerSpec
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.model.vocabulary import LossFunction
from hpc_mp.train.own_loop.hugging_face import IN_MEMORY, HuggingFace
from hpc_mp.train.own_loop.keywords import Keywords, written
from hpc_mp.train.own_loop.listed import Listed
from hpc_mp.train.own_loop.saved_tensor import SavedTensor, fingerprint_of
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.pipeline.stage import Batch, Carried, StagedModel


class Subject(Protocol):
    """A model before it is divided. ``table``: the table ``[model]`` of a job file. ``sequence``: tokens of a sample for which
    stages are balanced."""

    @property
    def table(self) -> Mapping[str, Any]: ...
    @property
    def sequence(self) -> int: ...

    def tokens(self, batch: Batch) -> int:
        """Return the tokens of a sample. Raises HpcMpError if the batch is not one of this model."""

    def adapted(self, batch: Batch) -> Batch:
        """Return a batch under the names of the engine's stages."""

    def labels(self, batch: Batch) -> int | None:
        """Return the number of labels of an adapted batch that count; None: the forward counts them."""

    def needed(self, batch: Batch, layout: Layout, stage: int) -> Sequence[str]:
        """Return the tensors of an adapted batch that a stage needs."""

    def check(self, job: JobSpec) -> None:
        """Raise HpcMpError if the model cannot be divided as a job requires."""

    def layers(self, job: JobSpec) -> tuple[int, ...]:
        """Return the layers of every stage."""

    @property
    def fingerprint(self) -> str:
        """The values that a process has brought along, which must be the same on all ranks; empty: none."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Facts of the computation that shapes of weights do not show, by name, in JSON types. A checkpoint records them."""

    def groups(self, layout: Layout) -> Mapping[str, Any]:
        """Return what process groups depend on, as ``communicators.build`` takes it."""

    def model(self, job: JobSpec, batch: Mapping[str, Carried]) -> StagedModel:
        """Return the model for microbatches like this one."""

    def first_values(self, job: JobSpec) -> Source:
        """Return the values with which parameters begin."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every weight as its module has it, by name."""

    def completed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state that a module loads, given its trained parameters."""

    def saved(self) -> Iterable[SavedTensor]:
        """Yield the trained tensors of a saved model."""

    def untrained(self) -> dict[str, Tensor]:
        """Return the other tensors of a saved model: persistent buffers, and parameters that no layer uses."""

    def describe(self, directory: Path, dtype: torch.dtype) -> None:
        """Write what a model directory has besides weights. ``dtype``: of these."""


def subject_of(model: Any, keywords: Keywords) -> Subject:
    """Return the subject that a user has passed. Raises HpcMpError if it cannot be divided."""
    hugging_face = isinstance(model, PreTrainedModel | PreTrainedConfig | Mapping | str | Path)
    has_cut_points = isinstance(model, nn.Module) and any(isinstance(inner, CutPoint) for inner in model.modules())
    for name, used, users in (("cut", not hugging_face and isinstance(model, nn.Module), "modules that you have written"),
                              ("inputs", not hugging_face and has_cut_points, "modules with cut points"),
                              ("outputs", not hugging_face and not isinstance(model, nn.Module), "a list of LayerSpec")):
        if (value := getattr(keywords, name)) and not used:
            raise HpcMpError(f"{name} = {written(value)}", f"has no effect on this model: it is for {users}", "leave it out")
    loss = None if keywords.loss_fn is None else checked(keywords.loss_fn)
    if isinstance(model, PreTrainedModel):
        return HuggingFace.in_memory(model, _fields(model.config), loss)
    if isinstance(model, PreTrainedConfig):
        return HuggingFace.read(text_part(_fields(model)), loss, IN_MEMORY)
    if isinstance(model, Mapping):
        return HuggingFace.read(text_part(dict(model)), loss, None)
    if isinstance(model, str | Path):
        return HuggingFace.read(text_part(config_of(Path(model))), loss, str(model), Path(model).resolve())
    listed = isinstance(model, Sequence) and bool(model) and all(isinstance(layer, LayerSpec) for layer in model)
    if not listed and not isinstance(model, nn.Module):
        raise HpcMpError(f"model = {written(model)}", "cannot be divided between ranks",
                         "pass the directory of a Hugging Face model, its configuration, an nn.Module with cut points, an "
                         "nn.Sequential or a list of LayerSpec")
    if loss is None:
        own = "a list of LayerSpec" if listed else type(model).__name__
        raise HpcMpError("loss_fn", f"is required: {own} has no loss of its own",
                         "pass a function (outputs, batch) -> (sum, count)")
    if isinstance(model, nn.Module):
        parts = layers_of(model, keywords.inputs, keywords.cut)
        listed_model = ListedModel(parts.layers, _returned(loss, parts), 0, parts.outputs, defaults=parts.defaults)
        return Listed(listed_model, fingerprint_of(model.state_dict()), model)
    return Listed(ListedModel(tuple(model), loss, 0, keywords.outputs))


def checked(loss: LossFunction) -> LossFunction:
    """Return a loss whose results are what ranks can sum."""

    def objective(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        result = loss(outputs, batch)
        value = f"loss_fn: {written(result) if not isinstance(result, Tensor) else f'a tensor of shape {tuple(result.shape)}'}"
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise HpcMpError(value, "is not a pair", "return (sum, count): the summed loss, and the number to divide it by")
        total, count = result
        if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
            raise HpcMpError(value, "has no sum that is a tensor of one number", 'sum all losses: reduction="sum"')
        if torch.is_grad_enabled() and not total.requires_grad:
            raise HpcMpError(value, "has a sum without a gradient", "do not detach it, nor compute it under torch.no_grad")
        if not isinstance(count, Tensor | int | float) or (isinstance(count, Tensor) and count.dim()):
            raise HpcMpError(value, "has a count that is no number", "return a number, or a tensor of one number")
        return total, torch.as_tensor(count, device=total.device)

    return objective


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults."""
    return {"model_type": config.model_type} | {
        key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}


def _returned(loss: LossFunction, parts: Layers) -> LossFunction:
    """Return a loss that is called with the result of a module's forward."""

    def objective(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        return loss(parts.returned(outputs), batch)

    return objective
