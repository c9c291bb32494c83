"""The weights of a checkpoint beside those that keep their values: adapters are merged into these, or stored in PEFT's format."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box
from hpc_mp.layout.models import Family, ModelShape, Weight
from hpc_mp.layout.models.adapter_weights import adapted_weights, trained_weights
from hpc_mp.layout.models.peft_files import experts_last, stored_names, stored_shape
from hpc_mp.train.checkpoint.shard_file import LocalPart, ShardReader
from hpc_mp.train.parallel.fill import Source


class Merged:
    """A source of a model's weights: what was trained, and first values with adapters merged into them: W + scale × B A. ``own``:
    first values, W. ``dtype``: in which they are added."""

    def __init__(self, family: Family, shape: ModelShape, own: Source, reader: ShardReader, dtype: torch.dtype) -> None:
        self.own, self.reader, self.dtype = own, reader, dtype
        self.transposed, self.scale = family.transposed, 0.0 if shape.adapters is None else shape.adapters.scale
        self.trained = {weight.name for weight in trained_weights(family, shape)}
        self.factors = {weight.name: (down, up) for weight, down, up in adapted_weights(family, shape).values()}

    def __call__(self, weight: Weight, box: Box) -> Tensor:
        if weight.name in self.trained:
            return self._read(weight, box)
        values = self.own(weight, box).to(self.dtype)
        if weight.name not in self.factors:
            return values
        down, up = (self._factor(factor, box) for factor in self.factors[weight.name])
        outputs = up.shape[1:-1] if weight.experts else up.shape[:-1]
        first = up.flatten(1, -2) if weight.experts else up.flatten(0, -2)
        product = (first @ down).unflatten(-2, outputs)
        if weight.experts:
            return values + self.scale * product[:, *box[1:]]
        return values + self.scale * (product.movedim(-1, 0) if self.transposed else product)[box]

    def _factor(self, factor: Weight, box: Box) -> Tensor:
        """Return a factor; of experts those in the first dimension of ``box``."""
        return self._read(factor, (*box[:1], *(slice(0, size) for size in factor.shape[1:])) if factor.experts else tuple(
            slice(0, size) for size in factor.shape))

    def _read(self, weight: Weight, box: Box) -> Tensor:
        """Return a part of what was trained."""
        values = torch.empty([side.stop - side.start for side in box], dtype=self.dtype)
        self.reader.read([LocalPart(weight.name, weight.shape, box, values)])
        return values


def peft_tensors(family: Family, shape: ModelShape, reader: ShardReader, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return the tensors of ``adapter_model.safetensors``."""
    factors, names = trained_weights(family, shape), stored_names(family, shape)
    values = {factor.name: torch.empty(factor.shape, dtype=dtype) for factor in factors}
    reader.read(LocalPart(factor.name, factor.shape, tuple(slice(0, size) for size in factor.shape), values[factor.name])
                for factor in factors)
    return {names[factor.name]: (values[factor.name].movedim(0, -1) if experts_last(factor) else values[factor.name])
            .reshape(stored_shape(factor)).contiguous() for factor in factors}
