"""A Hugging Face model as the subject of a loop."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import check_division, stage_cut
from hpc_mp.layout.flat import Box
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Family, ModelShape, Weight, family_of, kv_copies
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.layout.models.weight_files import check_weights
from hpc_mp.rundir.origin import model_fields
from hpc_mp.train.checkpoint.export import GENERATION
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config, without_values
from hpc_mp.train.model.vocabulary import IGNORED, LossFunction
from hpc_mp.train.own_loop.keywords import written
from hpc_mp.train.own_loop.saved_tensor import SavedTensor, fingerprint_of
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.pipeline.stage import Batch, Carried

IN_MEMORY = "the configuration"
NOMINAL = 4096  # tokens: attention's share of a layer's work, by which stages are balanced, grows with them
NAMES = {"token_type_ids": "token_types"}  # of Hugging Face -> of an embedding's index
INPUT, LABELS, MASK = "input_ids", "labels", "attention_mask"


@dataclass(frozen=True)
class HuggingFace:
    """A model of a family that the engine knows."""

    config: Mapping[str, Any]
    family: Family
    shape: ModelShape
    directory: Path | None  # of its checkpoint; None: values are drawn, or those of ``state``
    state: Mapping[str, Tensor] | None
    loss: LossFunction | None  # a function of the logits and the batch; None: the cross entropy of the labels

    @classmethod
    def read(cls, config: Mapping[str, Any], loss: LossFunction | None, origin: str | None,
             directory: Path | None = None, state: Mapping[str, Tensor] | None = None) -> "HuggingFace":
        """Return a model by its configuration. Raises HpcMpError for an unknown family, field or size. ``origin``: name of the
        configuration that transformers has made; None: a user has written it."""
        if not isinstance(config.get("model_type"), str):
            raise HpcMpError(f"model = {written(dict(config))}", "does not name the model's family",
                             'add for example "model_type": "llama"')
        shape = model_shape(dict(config), origin)
        if shape.encoder:
            raise HpcMpError(f"model_type = {shape.model_type!r}", "has an encoder: a loop of your own has tokens of one kind",
                             "train it with a job file and `hpc-mp launch`")
        return cls(config, family_of(shape), shape, directory, state, loss)

    @classmethod
    def in_memory(cls, model: PreTrainedModel, config: Mapping[str, Any], loss: LossFunction | None) -> "HuggingFace":
        """Return a model with its own values. Raises HpcMpError if it is another one than its configuration says."""
        subject = cls.read(config, loss, IN_MEMORY, state=model.state_dict())
        own, value = type(model).__name__, f"model of type {type(model).__name__}"
        if own != subject.family.architecture or type(model).__module__.partition(".")[0] != "transformers":
            raise HpcMpError(value, f"is not {subject.family.architecture}", "pass that model, or write your own as layers")
        shapes = dict(subject.shapes())
        head = f"{subject.family.head}.weight"
        parameters = dict(model.named_parameters())
        if shapes.keys() != parameters.keys() or any(parameters[name].shape != shape for name, shape in shapes.items()):
            names = sorted(shapes.keys() ^ parameters.keys()) or [
                name for name in shapes if parameters[name].shape != shapes[name]]
            tied = f": {head} is not the embedding" if names == [head] else ""
            raise HpcMpError(value, f"has other parameters than its configuration says ({', '.join(names[:3])}){tied}",
                             "change the configuration, or write your own model as layers")
        if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
            raise HpcMpError(value, f"has parameters that are not to be trained ({frozen[0]}), but all are",
                             "call model.requires_grad_(True)")
        if meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
            raise HpcMpError(value, f"has no values ({meta[0]} is on the meta device)", "pass its configuration, or a directory")
        skeleton = dict(subject.meta().named_modules())
        for path, module in model.named_modules():
            expected = skeleton.get(path, nn.Identity())
            if type(module) is not type(expected) or module.extra_repr() != expected.extra_repr():
                raise HpcMpError(f"{path} = {_module_text(module)}", f"is {_module_text(expected)} by the configuration of {own}",
                                 "change the configuration, or write your own model as layers")
        if any("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            raise HpcMpError(value, "has hooks or a forward of an instance, which would not be called",
                             "remove them, or write your own model as layers")
        return subject

    @property
    def table(self) -> Mapping[str, Any]:
        return {"config": dict(self.config)} if self.directory is None else {"pretrained": str(self.directory)}

    @property
    def sequence(self) -> int:
        return min(NOMINAL, self.shape.positions)

    @property
    def fingerprint(self) -> str:
        return "" if self.state is None else fingerprint_of(self.state)

    @property
    def identity(self) -> Mapping[str, Any]:
        return model_fields(hugging_face_config(self.config, self.family, dropout=None).to_dict(), self.family.dropouts)

    def tokens(self, batch: Batch) -> int:
        required = [INPUT] if self.loss else [INPUT, LABELS]
        if missing := [name for name in required if name not in batch]:
            raise HpcMpError(f"a batch of {', '.join(batch)}", f"has no {' and no '.join(missing)}",
                             "pass input_ids and labels: those of each position, shifted already, -100 where none counts")
        usual = {INPUT, LABELS, MASK, *(name for name, index in NAMES.items() if index in self.family.lookups.values())}
        extra = [name for name in batch if name not in usual]
        if extra and self.loss is None:
            raise HpcMpError(f"a batch with {', '.join(extra)}", f"has tensors that {self.family.model_type} does not use",
                             "leave them out")
        ids = batch[INPUT]
        if ids.dim() != 2 or ids.is_floating_point():
            raise HpcMpError(f"input_ids of shape {tuple(ids.shape)}, {ids.dtype}", "must be whole numbers (samples, tokens)",
                             "pass the ids of a tokenizer")
        if not ids.shape[1]:
            raise HpcMpError(f"input_ids of shape {tuple(ids.shape)}", "has no tokens", "leave empty samples out")
        self._check_words(INPUT, ids, "use the model's own tokenizer")
        if self.loss is None:
            labels = batch[LABELS]
            if labels.shape != ids.shape or labels.is_floating_point():
                raise HpcMpError(f"labels of shape {tuple(labels.shape)}, {labels.dtype}",
                                 f"are not those of input_ids {tuple(ids.shape)}", "pass a whole number for each position")
            self._check_words(LABELS, labels[labels != IGNORED], "use -100 where no label counts")
        self._check_mask(batch)
        return ids.shape[1]

    def _check_words(self, name: str, words: Tensor, remedy: str) -> None:
        """Check that words are the model's. Those that lie on a GPU are not looked at: the host would wait."""
        if words.device.type != "cpu" or words.numel() == 0:
            return
        least, largest = int(words.min()), int(words.max())
        if least < 0 or largest >= self.shape.vocabulary:
            raise HpcMpError(f"{name} from {least} to {largest}",
                             f"are not in the model's vocabulary, 0 to {self.shape.vocabulary - 1}", remedy)

    def _check_mask(self, batch: Batch) -> None:
        """Check that a mask hides the end of samples alone, and nothing that counts."""
        if (mask := batch.get(MASK)) is None:
            return
        if mask.shape != batch[INPUT].shape:
            raise HpcMpError(f"attention_mask of shape {tuple(mask.shape)}",
                             f"is not that of input_ids {tuple(batch[INPUT].shape)}", "pass 1 for each token, 0 for padding")
        visible = mask.bool()
        if bool((visible[:, 1:] & ~visible[:, :-1]).any()):
            raise HpcMpError("attention_mask", "hides tokens before others that it shows",
                             "pad on the right (tokenizer.padding_side = \"right\")")
        if self.loss is None and bool(((batch[LABELS] != IGNORED) & ~visible).any()):
            raise HpcMpError("labels", "count at positions that attention_mask hides", "set them to -100 there")

    def labels(self, batch: Batch) -> int | None:
        return None if self.loss else int((batch[LABELS] != IGNORED).sum())

    def adapted(self, batch: Batch) -> Batch:
        """A mask matters where attention sees what follows: the end of a sample is a document of its own there."""
        adapted = {NAMES.get(name, name): tensor for name, tensor in batch.items()} | {"ids": batch[INPUT].long()}
        if self.shape.bidirectional and MASK in batch:
            visible = batch[MASK].bool().sum(1)
            adapted["documents"] = torch.stack((torch.zeros_like(visible), visible), 1)
        if self.loss is None:
            adapted[LABELS] = batch[LABELS].long()
        return adapted

    def needed(self, batch: Batch, layout: Layout, stage: int) -> Sequence[str]:
        first = ["ids", *self.family.lookups.values()] if stage == 0 else []
        last = [*batch] if self.loss else [LABELS]
        names = {*first, *(last if stage == layout.stages - 1 else []), "documents"}
        return [name for name in batch if name in names]

    def check(self, job: JobSpec) -> None:
        check_division(job, self.shape)
        if fixed := next((weight.name for weight in self.family.all_weights(self.shape) if not weight.trained), None):
            raise HpcMpError(f"a {self.shape.model_type} model", f"has {fixed}, which is never trained: a loop of your own saves "
                             "only what is", "train it with a job file and `hpc-mp launch`")
        if self.loss is not None and job.parallel.context > 1:
            raise HpcMpError(f"parallel.context = {job.parallel.context}", "gives each rank only some of the tokens for loss_fn",
                             "set parallel.context = 1, or leave loss_fn out")
        if self.loss is not None and (job.train.router_balance or job.train.router_z):
            raise HpcMpError("train.router_balance, train.router_z", "cannot join a loss whose labels are counted by loss_fn",
                             "leave one of them out")
        for key in ("label_smoothing", "z_loss"):
            if self.loss is not None and (value := getattr(job.train, key)):
                raise HpcMpError(f"train.{key} = {value:g}", "has no effect on a loss of your own", "leave it or loss_fn out")
        if self.directory is not None:
            check_weights(self.directory, self.config, self.family, self.shape)

    def layers(self, job: JobSpec) -> tuple[int, ...]:
        return stage_cut(job, self.shape).layers

    def groups(self, layout: Layout) -> Mapping[str, Any]:
        return {"kv_copies": kv_copies(self.shape, layout.degrees.tensor)}

    def model(self, job: JobSpec, batch: Mapping[str, Carried]) -> TransformersModel:
        config = hugging_face_config(self.config, self.family, job.train.dropout, job.parallel.recompute)
        return TransformersModel(config, self.family, self.shape, self.loss)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: parameter.shape for name, parameter in self.meta().named_parameters()}

    def meta(self) -> nn.Module:
        """Return the model that the configuration makes, without values."""
        return without_values(self.family, hugging_face_config(self.config, self.family, dropout=None))

    def completed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)

    def untrained(self) -> dict[str, Tensor]:
        return {}

    def saved(self) -> Iterable[SavedTensor]:
        shapes = self.shapes()
        for weight in self.family.all_weights(self.shape):
            for at, name in weight.stored or (((), weight.name),):
                yield SavedTensor(name, weight, weight.shape[len(at):] if at else shapes[weight.name], at)

    def describe(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the configuration, and copy what the model began with: its tokenizer and its settings of generation."""
        config = hugging_face_config(self.config, self.family, dropout=None)
        config.architectures, config.dtype = [self.family.architecture], dtype
        config.save_pretrained(directory)
        others = sorted(self.directory.iterdir()) if self.directory is not None else ()
        for path in others:
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not (
                    (directory / path.name).exists() or path.name.endswith(".index.json")):
                shutil.copyfile(path, directory / path.name)
        if not (directory / GENERATION).exists():
            GenerationConfig.from_model_config(config).save_pretrained(directory)

    def first_values(self, job: JobSpec) -> Source:
        if self.directory is not None:
            return initial.read(self.directory, self.family)
        if self.state is None:
            return initial.drawn(job.train.seed, self.shape.layers, self.shape.initializer_range, self.model(job, {}).padding)
        state = self.state

        def source(weight: Weight, box: Box) -> Tensor:
            values = state[weight.name].detach()
            return values.reshape(weight.shape)[box].to("cpu", torch.float64 if values.dtype == torch.float64 else torch.float32)

        return source


def _module_text(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
