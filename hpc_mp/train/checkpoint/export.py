"""Export of a run's checkpoint to a Hugging Face model directory that plain transformers loads.

Tensors are read, reshaped to Hugging Face's shapes and written one output file at a time, so memory holds one file's tensors.
Names already are Hugging Face's. Optimizer state is left out. Adapters are merged into the weights that the run began with.
"""

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_config, read_shape
from hpc_mp.job.tokenizer_files import read_object
from hpc_mp.layout.flat import Box
from hpc_mp.layout.models import ModelShape, Weight, family_of
from hpc_mp.layout.models.adapter_weights import keeps_values, trained_weights
from hpc_mp.layout.models.peft_files import CONFIG
from hpc_mp.rundir import RunDirectory, newest_complete, problem, sync, write_json
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.rundir.checkpoints import checkpoint_name, complete_steps, step_of
from hpc_mp.train.checkpoint.adapters import Merged
from hpc_mp.train.checkpoint.shard_file import FORMATS, Damaged, LocalPart, ShardReader
from hpc_mp.train.data.bpe import CLASS
from hpc_mp.train.data.cache import SUMS
from hpc_mp.train.data.tokenizer_agreement import agreeing_settings
from hpc_mp.train.model.transformers_modules import hugging_face_config, without_values
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.rank.first_values import own_values

FILE_BYTES = 5_000_000_000  # limit of weights per output file: huggingface_hub's default
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
GENERATION = "generation_config.json"

Skipped = tuple[tuple[Path, str], ...]
Filler = Callable[[Iterable[tuple["_Output", Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        step: the checkpoint's step.
        files: names of the weight files.
        parameters, bytes: totals of all weights, a tied weight counted once.
        tokenizer: the directory it was copied from; None if the run's tokenizer no longer exists.
        skipped: newer checkpoints that were not used, each with the reason.
    """

    output: Path
    checkpoint: Path
    step: int
    files: tuple[str, ...]
    parameters: int
    bytes: int
    dtype: str
    tokenizer: Path | None
    skipped: Skipped


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor of a model directory: its shape there, and the rectangle of a weight that it is made from."""

    weight: Weight
    box: Box
    shape: tuple[int, ...]


def export(run: RunDirectory, output: Path, *, step: int | None = None, dtype: str = "keep", force: bool = False,
           file_bytes: int = FILE_BYTES, progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write a checkpoint of ``run`` to the directory ``output``, completely or not at all.

    Args:
        step: the checkpoint's step; None takes the newest complete checkpoint.
        dtype: a key of ``DTYPES``, or "keep" for the checkpoint's own.
        force: replace an existing model directory.
        file_bytes: limit of weights per output file; a larger tensor gets its own file.
        progress: called with (bytes written, bytes in total).

    Raises:
        HpcMpError: the checkpoint does not exist, or ``output`` cannot be written or must not be replaced.
    """
    output = output.resolve()
    check_output(output, force)
    spec = load_job(run.job)
    checkpoint, skipped = choose(run, step)
    tokenizer = _tokenizer(run)
    config = _config(spec, tokenizer)
    settings = {} if tokenizer is None else agreeing_settings(
        tokenizer, read_config(spec), _text_there(spec), f"move {tokenizer} elsewhere to export without it, and load it there: "
        f"{CLASS}.from_pretrained takes it as it is", spec.data.form)
    model = read_shape(spec)
    reader, saved = reader_of(checkpoint, model)
    outputs, fill = _outputs(config, model), _filler(partial(own_values, spec, model), model, reader, saved)
    config.dtype = DTYPES.get(dtype, saved)
    if model.encoder:  # as releases of transformers before 5 need it
        config.tie_word_embeddings, config.decoder_start_token_id = model.tied, model.start
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(output.shape, dtype=config.dtype, device="meta") for name, output in outputs.items()},
        max_shard_size=file_bytes)
    total: int = split.metadata["total_size"]

    done = 0
    with publishing(output) as temporary:
        for file, names in split.filename_to_tensors.items():
            done += _convert(checkpoint, fill, {name: outputs[name] for name in names}, config.dtype, temporary / file)
            progress(done, total)
        if split.is_sharded:
            write_json(temporary / "model.safetensors.index.json",
                       {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        config.save_pretrained(temporary)
        _save_generation_config(spec, config, temporary)
        for file in split.filename_to_tensors:
            shutil.copymode(temporary / "config.json", temporary / file)  # safetensors makes files that only the owner can read
        for path in sorted(tokenizer.iterdir()) if tokenizer is not None else ():
            if path.name != SUMS:
                shutil.copyfile(path, temporary / path.name)
        if settings:
            loaded_by = temporary / "tokenizer_config.json"
            write_json(loaded_by, read_object(loaded_by) | settings)
    return Exported(
        output=output, checkpoint=checkpoint, step=step_of(checkpoint),
        files=tuple(split.filename_to_tensors), parameters=sum(prod(output.shape) for output in outputs.values()), bytes=total,
        dtype=str(config.dtype).removeprefix("torch."), tokenizer=tokenizer, skipped=skipped)


def choose(run: RunDirectory, step: int | None) -> tuple[Path, Skipped]:
    """Return the checkpoint of a step, or the newest complete one with the newer checkpoints that were skipped."""
    if step is not None:
        path = run.checkpoints / checkpoint_name(step)
        reason = problem(path) if path.is_dir() else "it is not there"
        if reason is not None:
            steps = [str(step_of(p)) for p in complete_steps(run.checkpoints)]
            raise HpcMpError(f"--step {step}", f"there is no complete checkpoint {path}: {reason}",
                             f"choose from the steps {', '.join(steps)}" if steps else "train the run first")
        return path, ()
    newest, skipped = newest_complete(run.checkpoints)
    if newest is None:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
        raise HpcMpError(f"run {run.path}", "has no complete checkpoint" + (f" ({reasons})" if reasons else ""),
                         "train it until a checkpoint is saved (checkpoint.every; the last step always is)")
    return newest, tuple(skipped)


def _tokenizer(run: RunDirectory) -> Path | None:
    """Return the directory of the run's tokenizer; it is also found if the run was moved together with its cache."""
    directory = Path(run.tokenizer.read_text(encoding="utf-8"))
    return next((path for path in (directory, run.cache / directory.name) if path.is_dir()), None)


def _text_there(spec: JobSpec) -> Sequence[Path]:
    """Return the run's text files, or none if they are no longer there."""
    try:
        return find_files(spec.data.files)
    except HpcMpError:
        return ()


def _config(spec: JobSpec, tokenizer: Path | None) -> PreTrainedConfig:
    """Return the model's configuration with its own dropout. Ids of special tokens that it does not name come from the
    tokenizer, because a family's defaults belong to another vocabulary; of a classifier also that of padding, behind which
    transformers looks for the last token of a row, unless the model counts positions behind its own."""
    fields, shape = read_config(spec), read_shape(spec)
    family = family_of(shape)
    if tokenizer is not None:
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        except Exception as error:  # of many classes, depending on how a file is damaged
            raise HpcMpError(f"tokenizer {tokenizer}", f"cannot be loaded ({error})",
                             "delete that directory to export without it") from None
        fields = {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id} | fields
        if spec.data.labels and not shape.first_position:
            padding = (loaded.pad_token_id, fields.get("pad_token_id"), loaded.eos_token_id)
            fields["pad_token_id"] = next((token for token in padding if token is not None), None)
    config = hugging_face_config(fields, family, dropout=None)
    config.architectures = [family.architecture]
    return config


def reader_of(checkpoint: Path, model: ModelShape) -> tuple[ShardReader, torch.dtype]:
    """Return a reader of a checkpoint, and the format of its tensors, the same for all masters. Raises HpcMpError if it lacks
    what is trained of the model."""
    index, family = read_indexes(checkpoint), family_of(model)
    for weight in trained_weights(family, model):
        held = index.tensors.get(weight.name)
        if held is None or held.shape != weight.shape:
            raise HpcMpError(f"checkpoint {checkpoint}", f"is not of the job's model: {weight.name} should have the shape "
                             f"{weight.shape} and has {held.shape if held else 'none'}",
                             "put the config.json of model.pretrained back as it was when the run began")
    return ShardReader(checkpoint, index), FORMATS[next(iter(index.tensors.values())).dtype]


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Raise HpcMpError if a checkpoint cannot be read in the block."""
    try:
        yield
    except (Damaged, OSError) as error:
        raise HpcMpError(f"checkpoint {checkpoint}", f"cannot be read any more ({error})",
                         "if the run goes on and has deleted it, export again") from None


def _outputs(config: PreTrainedConfig, model: ModelShape) -> dict[str, _Output]:
    """Return the tensors of the Hugging Face checkpoint, with the names and shapes that ``save_pretrained`` gives them."""
    family = family_of(model)
    whole = without_values(family, config)
    shapes = {name: values.shape for name, values in (*whole.named_parameters(), *whole.named_buffers())}
    outputs: dict[str, _Output] = {}
    for weight in family.all_weights(model):
        for at, part in weight.stored or (((), weight.name),):
            box = *(slice(i, i + 1) for i in at), *(slice(0, size) for size in weight.shape[len(at):])
            outputs[part] = _Output(weight, box, weight.shape[len(at):] if at else tuple(shapes[weight.name]))
    return outputs


def _filler(own: Callable[[], Source], model: ModelShape, reader: ShardReader, saved: torch.dtype) -> Filler:
    """Return what fills tensors: from the checkpoint, and what keeps its values from the run's first weights, with adapters
    merged. ``own``: returns these weights."""
    if not keeps_values(family_of(model), model):
        return lambda tensors: reader.read(LocalPart(output.weight.name, output.weight.shape, output.box, values)
                                           for output, values in tensors)
    merged = Merged(family_of(model), model, own(), reader, saved)

    def fill(tensors: Iterable[tuple[_Output, Tensor]]) -> None:
        for output, values in tensors:
            values.copy_(merged(output.weight, output.box))

    return fill


def _convert(checkpoint: Path, fill: Filler, outputs: dict[str, _Output], dtype: torch.dtype, path: Path) -> int:
    """Write tensors to one file, reshaped to Hugging Face's shapes. Return their bytes."""
    with reading(checkpoint):
        tensors = _filled(fill, outputs, dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _filled(fill: Filler, outputs: dict[str, _Output], dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: torch.empty([part.stop - part.start for part in output.box], dtype=dtype)
               for name, output in outputs.items()}
    fill((output, tensors[name]) for name, output in outputs.items())
    return {name: tensor.view(outputs[name].shape) for name, tensor in tensors.items()}


def model_tensors(config: PreTrainedConfig, model: ModelShape, reader: ShardReader, own: Callable[[], Source],
                  dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors that an export of a checkpoint has. ``own``: returns the run's first weights."""
    return _filled(_filler(own, model, reader, dtype), _outputs(config, model), dtype)


def _save_generation_config(spec: JobSpec, config: PreTrainedConfig, directory: Path) -> None:
    """Copy the generation config of the checkpoint that training began with, or write one made from the model's config."""
    source = Path(spec.model.pretrained or ".", GENERATION)
    if spec.model.pretrained is not None and source.exists():
        shutil.copyfile(source, directory / GENERATION)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(directory)


def check_output(output: Path, force: bool) -> None:
    """Check that a model directory may be written to ``output``; with ``force`` it may replace a model directory. Raises
    HpcMpError if something is there that must not be replaced."""
    value = f"--output {output}"
    try:
        entries = list(output.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise HpcMpError(value, "is a file, or lies below one", "name a directory") from None
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "name another directory") from None
    if entries and not force:
        raise HpcMpError(value, "is not empty", "name another directory, or add --force to replace a model there")
    if entries and (any(entry.is_dir() for entry in entries) or not any(
            (output / name).exists() for name in ("config.json", CONFIG))):
        raise HpcMpError(value, "is no model directory (a config.json, or that of adapters, and other files, no directories), "
                         "and --force replaces nothing else", "name another directory")


@contextmanager
def publishing(output: Path, value: str = "--output") -> Iterator[Path]:
    """Yield a temporary directory beside ``output`` that replaces it if the block succeeds; otherwise it is deleted. ``value``
    names the directory in messages. Raises HpcMpError if it cannot be written (full disk, exceeded quota, no permission …)."""
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    old = temporary.with_name(f"{temporary.name}.old")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if output.exists():
            output.rename(old)
        temporary.rename(output)
        sync(output.parent)
    except (OSError, SafetensorError) as error:
        if old.exists() and not output.exists():
            old.rename(output)
        reason = getattr(error, "strerror", None) or str(error)
        raise HpcMpError(f"{value} {output}", f"cannot be written ({reason})",
                         "name a directory that you may write to, on a file system with enough room") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
