"""Initial values of the parameters: drawn from seed and name, or read as slices of a safetensors checkpoint.

Both depend only on a parameter's name and global index, so that every layout starts from the same model.
"""

import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box, stretches
from hpc_mp.layout.models import Family, ModelShape, Weight
from hpc_mp.layout.models.peft_files import WEIGHTS, experts_last, stored_names
from hpc_mp.layout.models.weight_files import StoredWeight, stored_in, stored_parts, weight_files
from hpc_mp.train.model.counter_random import key_of, normal, uniform
from hpc_mp.train.parallel.fill import CHUNK, Source

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # names in safetensors files
SHORT = 1 << 15  # bytes: a shorter gap between two parts of rows is read along, which is faster than many small reads
BUFFERS = 1000  # of one read; the kernel takes 1024
WIDEST = 8  # bytes of an element


def drawn(seed: int, layers: int, initializer_range: float, padding: dict[str, int]) -> Source:
    """Return a source of random values in fp32, which depend only on seed, weight name and global index of an element.

    They are normal with the deviation ``initializer_range``, or one of the weight's own. Projections that write into the residual
    stream are divided by sqrt(2 x layers) if the family's weights say so (GPT-2, as in transformers' ``_init_weights``). A of
    adapters is uniform up to 1 / sqrt(inputs), as in PEFT.

    Args:
        padding: embedding name -> its row of zeros.
    """
    constants = {"ones": 1.0, "zeros": 0.0}

    def source(weight: Weight, box: Box) -> Tensor:
        constant = constants.get(weight.init) if isinstance(weight.init, str) else weight.init
        if constant is not None:
            return torch.full([part.stop - part.start for part in box], constant)
        if weight.init == "uniform":
            return torch.from_numpy(uniform(key_of(seed, weight.name), weight.shape, box)).mul_(weight.shape[-1]**-0.5)
        scale = initializer_range / math.sqrt(2 * layers) if weight.init == "residual" else initializer_range
        scale = scale if weight.deviation is None else weight.deviation
        values = torch.from_numpy(normal(key_of(seed, weight.name), weight.shape, box)).mul_(scale)
        row = padding.get(weight.name, -1)
        if box[0].start <= row < box[0].stop:
            values[row - box[0].start] = 0.0
        return values

    return source


def read(directory: Path, family: Family) -> Source:
    """Return a source of values from a Hugging Face checkpoint, which rank 0 has checked. A rank reads only its own slices.

    The order of a weight's elements is the same in its shape and in its ``fused_shape``, in which it may be stored. Values are
    read into the same memory by each call of the source, and hold until the next one: none of it is lost between parameters.
    """
    files, weights_in, memory = weight_files(directory), cache(stored_in), torch.empty(CHUNK * WIDEST, dtype=torch.uint8)

    def source(weight: Weight, box: Box) -> Tensor:
        left, parts = memory, list[Tensor]()
        for at, name in stored_parts(weight, files, family):
            if all(part.start <= index < part.stop for index, part in zip(at, box, strict=False)):
                stored = replace(weights_in(files[name])[name], shape=weight.shape[len(at):])
                parts.append(part_of(stored, box[len(at):], left))
                left = left[-(-parts[-1].nbytes // WIDEST) * WIDEST:]
        whole = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        return whole.view([part.stop - part.start for part in box])

    return source


def read_adapters(directory: Path, family: Family, shape: ModelShape) -> Source:
    """Return a source of the factors of adapters from a directory in PEFT's format, which ``stored_adapters`` has checked."""
    names, held = stored_names(family, shape), stored_in(directory / WEIGHTS, "lora.pretrained")

    def source(weight: Weight, box: Box) -> Tensor:
        stored = held[names[weight.name]]
        if not experts_last(weight):
            return part_of(replace(stored, shape=weight.shape), box)
        return part_of(replace(stored, shape=(*weight.shape[1:], weight.shape[0])), (*box[1:], box[0])).movedim(-1, 0)

    return source


def part_of(stored: StoredWeight, box: Box, memory: Tensor | None = None) -> Tensor:
    """Return a part of a stored weight, read without the kernel's readahead, which would fetch parts of other ranks. Short gaps
    are read along, all into one buffer: memory is that of the part, however long its rows are in the file.

    Args:
        memory: bytes into which the part is read, if it fits.

    Raises:
        OSError: it cannot be read, or its file has become shorter.
    """
    kind, sizes = TYPES[stored.dtype], [part.stop - part.start for part in box]
    size, gap, end = math.prod(sizes) * kind.itemsize, memoryview(bytearray(SHORT)), -SHORT
    values = torch.empty(size, dtype=torch.uint8) if memory is None or memory.nbytes < size else memory[:size]
    left, reads = values.numpy().data, list[tuple[int, list[memoryview]]]()  # first byte, and where it and the next go
    for first, elements in stretches(stored.shape, box):
        begin, run = first * kind.itemsize, left[:elements * kind.itemsize]
        if begin - end < SHORT and len(reads[-1][1]) < BUFFERS:
            reads[-1][1].extend((gap[:begin - end], run))
        else:
            reads.append((begin, [run]))
        left, end = left[len(run):], begin + len(run)
    with open(stored.file, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for begin, buffers in reads:
            if os.preadv(file.fileno(), buffers, stored.begin + begin) < sum(map(len, buffers)):
                raise OSError(f"{stored.file} has become shorter")
    return values.view(kind).view(sizes)
