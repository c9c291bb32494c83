"""The weights of a Hugging Face checkpoint: the files that contain them, and the check that they fit the model. No torch.

Only the headers of the safetensors files are read, a few kilobytes each: fast enough for a login node.
"""

import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.family import Family, StoredPart, Weight
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.models.tensor import matches

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "BF16", "F16")
MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors library itself
# Buffers that older releases of transformers saved beside the weights; they are recreated from the configuration.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")
SAVE = "save it again with save_pretrained"
COPY = "copy or download the whole checkpoint again"
# Names of a language model -> the same where it is a part of a model that also sees or hears, in older and newer checkpoints.
TEXT = "language_model."
TEXT_PLACES = (("model.", f"model.{TEXT}"), ("model.", f"{TEXT}model."), ("lm_head.", f"{TEXT}lm_head."))
POINTER = b"version "  # beginning of the text in place of a file that Git LFS has not fetched


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The place of a weight in a file: ``dtype`` in safetensors' notation, its bytes from ``begin`` up to ``end`` of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(directory: Path) -> dict[str, Path]:
    """Return the file of each weight, as transformers finds it: ``model.safetensors``, else the files of the index. Raises
    HpcMpError if neither exists, or it cannot be read."""
    single, index = directory / SINGLE, directory / INDEX
    if single.exists():
        return dict.fromkeys(stored_in(single), single)
    if not index.exists() and (parts := sorted(directory.glob("model-*-of-*.safetensors"))):
        raise HpcMpError(f"model.pretrained = {directory}", f"is an incomplete copy: {parts[0].name} lacks {INDEX}", COPY)
    if not index.exists():
        raise HpcMpError(f"model.pretrained = {directory}", f"holds neither {SINGLE} nor {INDEX}", SAVE)
    try:
        mapping: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / Path(file).name for name, file in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HpcMpError(f"model.pretrained = {directory}", f"its {INDEX} cannot be read ({error})", SAVE) from None


def stored_weights(directory: Path) -> dict[str, StoredWeight]:
    """Return every weight of a checkpoint, from its files' headers. Raises HpcMpError if a file is unreadable or lacks a
    weight."""
    files = weight_files(directory)
    names = {file.name for file in files.values()}
    if missing := sorted(name for name in names if not (directory / name).exists()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise HpcMpError(f"model.pretrained = {directory}",
                         f"is an incomplete copy: of the {len(names)} files in its {INDEX}, {missing[0]}{more} "
                         f"{'are' if more else 'is'} missing", COPY)
    headers = {file: stored_in(file) for file in set(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise HpcMpError(f"model.pretrained = {directory}", f"{file.name} lacks {name}, which its {INDEX} lists there", SAVE)
    return {name: headers[file][name] for name, file in files.items()}


def check_weights(directory: Path, config: Mapping[str, Any], family: Family, shape: ModelShape) -> set[str]:
    """Check that the checkpoint has every weight of the model, in the right shape and as plain numbers, and nothing else. Return
    what is ``lacking``. Raises HpcMpError if another weight is missing, or one is superfluous, of another shape, or not stored as
    plain numbers."""
    value = f"model.pretrained = {directory}"
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise HpcMpError(value, f"is quantized ({method}): its numbers are meaningless without their scales",
                         "use the original checkpoint, or save it again dequantized")
    held = stored_weights(directory)
    without = lacking(held, family, shape)
    weights = [weight for weight in family.all_weights(shape) if weight.name not in without]
    parts = {weight.name: stored_parts(weight, held, family) for weight in weights}
    for weight, at, name in ((expected, *part) for expected in weights for part in parts[expected.name]):
        if name not in held:
            raise HpcMpError(value, f"holds no weight named {name}", "use the checkpoint of a language model of this family")
        dimensions = weight.shape[len(at):]
        if held[name].shape != dimensions and (at or held[name].shape != weight.fused_shape):
            raise HpcMpError(f"{held[name].file}: {name}",
                             f"has the shape {held[name].shape}, but the model's configuration requires {dimensions}",
                             "name as many classes in data.labels" if matches(weight.name, family.fresh) else
                             "use a config.json that matches these weights")
        if held[name].dtype not in FLOATING:
            raise HpcMpError(f"{held[name].file}: {name}",
                             f"is stored as {held[name].dtype}, which is not a plain floating-point format",
                             "use the checkpoint before it was quantized")
    used = {name for places in parts.values() for _, name in places}
    extra = sorted(name for name in held.keys() - used if not BUFFERS.search(name) and not matches(name, family.beside))
    if any(TEXT in name for name in used):
        extra = [name for name in extra if TEXT in name or name.startswith(family.head)]
    if shape.tied and (head := find(f"{family.head}.weight", extra, family)):
        (_, embedding), = parts[f"{family.embedding}.weight"]
        if not _same(held[head], held[embedding]):
            raise HpcMpError(f"{held[head].file}: {head}",
                             "is stored and differs from the embedding, but tie_word_embeddings is true",
                             "set tie_word_embeddings to false in its config.json")
        extra.remove(head)
    if extra:
        raise HpcMpError(value, f"holds {extra[0]}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else "") +
                         f", which no part of a {family.model_type} model uses", "use the checkpoint of the plain model")
    return without


def lacking(held: Container[str], family: Family, shape: ModelShape) -> set[str]:
    """Return the names of the weights that a checkpoint lacks and need not have."""
    return {weight.name for weight in family.all_weights(shape)
            if matches(weight.name, family.fresh) and find(weight.name, held, family) is None}


def find(name: str, held: Container[str], family: Family) -> str | None:
    """Return a weight's name in a checkpoint, which may have an older one or a larger model; None if it is missing."""
    names = [name, *(re.sub(pattern, older, name) for pattern, older in family.older_names.items()),
             *(place + name.removeprefix(prefix) for prefix, place in TEXT_PLACES if name.startswith(prefix))]
    return next((candidate for candidate in names if candidate in held), None)


def stored_parts(weight: Weight, held: Container[str], family: Family) -> tuple[StoredPart, ...]:
    """Return a weight's parts in a checkpoint: under its own name, else as its family's checkpoints split it. A name that is
    not held is a missing weight."""
    parts = weight.stored if weight.stored and not find(weight.name, held, family) else (((), weight.name),)
    return tuple((at, find(name, held, family) or name) for at, name in parts)


def stored_in(path: Path, key: str = "model.pretrained") -> dict[str, StoredWeight]:
    """Return the weights of one file. Raises HpcMpError for a file that is unreadable or incomplete. ``key``: the key of the job
    file that names it."""
    try:
        with path.open("rb") as file:
            size, first = os.fstat(file.fileno()).st_size, file.read(8)
            if first == POINTER or size < len(POINTER):
                raise _incomplete(key, path, "a Git LFS pointer" if first == POINTER else f"only {size} bytes")
            length = int.from_bytes(first, "little")
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            text = file.read(length)
        if len(text) < length:
            raise _incomplete(key, path, f"only {len(text)} of the {length} bytes of its header")
        document = json.loads(text)
        held = {name: StoredWeight(path, entry["dtype"], tuple(entry["shape"]),
                                   *(8 + length + offset for offset in entry["data_offsets"]))
                for name, entry in document.items() if name != "__metadata__"}
        if size < (end := max((weight.end for weight in held.values()), default=0)):
            raise _incomplete(key, path, f"only {size:,} of its {end:,} bytes")
        return held
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HpcMpError(f"{key}: {path}", f"is not a safetensors file ({error})", SAVE) from None


def _incomplete(key: str, path: Path, why: str) -> HpcMpError:
    return HpcMpError(f"{key}: {path}", f"is an incomplete copy ({why})", COPY)


def _same(one: StoredWeight, other: StoredWeight) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        a == b for a, b in zip(_content(one), _content(other), strict=True))


def _content(weight: StoredWeight) -> Iterator[bytes]:
    """Yield a weight's bytes, a megabyte at a time."""
    with weight.file.open("rb") as file:
        file.seek(weight.begin)
        for begin in range(weight.begin, weight.end, 1 << 20):
            yield file.read(min(1 << 20, weight.end - begin))
