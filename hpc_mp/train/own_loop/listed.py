"""A list of layers as the subject of a loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import partition
from hpc_mp.layout.schedule_of import check_schedule
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.own_loop.saved_tensor import SavedTensor, computing
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.pipeline.stage import Batch, Carried

# key of the job file, its value without effect: a list of layers has no use for others
UNUSED = {"parallel.context": 1, "parallel.expert": 1, "parallel.sequence": False, "train.dropout": None,
          "train.router_balance": 0.0, "train.router_z": 0.0, "train.expert_capacity": None,
          "train.label_smoothing": 0.0, "train.z_loss": 0.0}


@dataclass(frozen=True)
class Listed:
    """A model of which nothing is known but its layers. Stages are balanced by their parameters."""

    listed: ListedModel
    fingerprint: str = ""
    module: nn.Module | None = None

    @property
    def table(self) -> Mapping[str, Any]:
        return {"config": {"model_type": "a list of layers"}}

    @property
    def sequence(self) -> int:
        return 1

    def tokens(self, batch: Batch) -> int:
        return 1

    def labels(self, batch: Batch) -> None:
        return None

    def adapted(self, batch: Batch) -> Batch:
        return batch

    def needed(self, batch: Batch, layout: Layout, stage: int) -> Sequence[str]:
        begin = sum(layout.layers[:stage])
        used = {name for layer in self.listed.layers[begin:begin + layout.layers[stage]] for name in layer.uses}
        return [name for name in batch if stage == layout.stages - 1 or name in used]

    def check(self, job: JobSpec) -> None:
        for key, idle in UNUSED.items():
            table, name = key.split(".")
            if (value := getattr(getattr(job, table), name)) != idle:
                raise HpcMpError(f"{key} = {value}", "has no effect on layers that somebody has written", "leave it out")
        if job.parallel.recompute == "selective":
            raise HpcMpError('parallel.recompute = "selective"', "is for the attention of Hugging Face's models", 'use "full"')
        layers, stages, method = len(self.listed.layers), job.stages, job.parallel.partition
        if stages > layers:
            raise HpcMpError(f"parallel.pipeline = {job.parallel.pipeline}", f"makes {stages} stages of {layers} layers",
                             f"use at most {layers} stages, or cut the model at more places")
        if method not in ("auto", "parameters") and not isinstance(method, tuple):
            raise HpcMpError(f"parallel.partition = {method!r}", "is for Hugging Face's models",
                             "pass the number of layers of every stage")
        if isinstance(method, tuple) and sum(method) != layers:
            raise HpcMpError(f"parallel.partition = {list(method)}", f"has {sum(method)} layers, but the model has {layers}",
                             "change the layers of a stage so that the sum is right")
        if job.parallel.tensor > 1 and not any(layer.cut for layer in self.listed.layers):
            raise HpcMpError(f"parallel.tensor = {job.parallel.tensor}", "has nothing to cut: no layer says what is cut in it",
                             'pass cut={"*.up": "column", "*.down": "row"}, or say it in each LayerSpec')
        check_schedule(undivided(job))

    def layers(self, job: JobSpec) -> tuple[int, ...]:
        if isinstance(job.parallel.partition, tuple):
            return job.parallel.partition
        sizes = [sum(prod(weight.shape) for weight in layer.weights) for layer in self.listed.meta]
        cut = partition(sizes, job.stages)
        return cut if 0 not in cut else partition([1] * len(sizes), job.stages)

    @property
    def identity(self) -> Mapping[str, Any]:
        modules = computing(self.module) if self.module is not None else {
            layer.spec.own(path): text for layer in self.listed.meta for path, text in computing(layer.module).items()}
        return {**modules, "the number of modules": len(modules)}

    def groups(self, layout: Layout) -> Mapping[str, Any]:
        return {"ties": list(self.listed.ties(layout).values())}

    def model(self, job: JobSpec, batch: Mapping[str, Carried]) -> ListedModel:
        return replace(self.listed, batch=batch, seed=job.train.seed)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: weight.shape for name, weight in self.listed.weights.items()}

    def completed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {saved.name: saved.taken(state) for saved in self.saved()} | self.untrained()

    def saved(self) -> Iterable[SavedTensor]:
        """Yield every parameter that is trained under each of its names in the module."""
        weights = self.listed.weights
        state: Mapping[str, Any] = weights if self.module is None else self.module.state_dict(keep_vars=True)
        trained = {id(state[name]): weight for name, weight in weights.items()}
        return (SavedTensor(name, trained[id(values)], trained[id(values)].shape)
                for name, values in state.items() if id(values) in trained)

    def untrained(self) -> dict[str, Tensor]:
        names = {saved.name for saved in self.saved()}
        state = {} if self.module is None else self.module.state_dict()
        return {name: values.clone() for name, values in state.items() if name not in names}

    def describe(self, directory: Path, dtype: torch.dtype) -> None:
        """Nothing but weights is known."""

    def first_values(self, job: JobSpec) -> Source:
        return self.model(job, {}).first_values()
