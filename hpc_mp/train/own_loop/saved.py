"""The model in whole tensors: in memory, or as a directory that others load."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json
from hpc_mp.layout.models.weight_files import INDEX
from hpc_mp.rundir import problem, write_json
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.checkpoint.checkpoint import parts_to_write
from hpc_mp.train.checkpoint.export import DTYPES, FILE_BYTES, publishing
from hpc_mp.train.checkpoint.shard_file import Damaged
from hpc_mp.train.own_loop.subject import Subject
from hpc_mp.train.own_loop.world import World
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import new_group
from hpc_mp.train.rank import facts
from hpc_mp.train.step.engine import Engine

# Files of a saved model, with its tokenizer.
OF_A_MODEL = ("config.json", "generation_config.json", "*.safetensors", INDEX, "tokenizer*", "special_tokens_map.json",
              "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*")


def model_state(engine: Engine, subject: Subject, world: World) -> dict[str, Tensor]:
    """Return every parameter as the model's module has it, on rank 0; {} elsewhere. All ranks call this."""
    shapes = subject.shapes()
    weights = list(dict.fromkeys(saved.weight.name for saved in subject.saved()))
    state = {name: values.view(shapes[name]) for name, values in Gathering(engine, world).of(weights).items()}
    return subject.completed(state) if world.who.rank == 0 else {}


def write_model(output: Path, engine: Engine, subject: Subject, world: World, dtype: str) -> None:
    """Write a model directory on rank 0, completely or not at all. Its memory holds one file. All ranks call this. ``dtype``: a
    key of ``DTYPES``, or "keep" for that of the parameters. Raises HpcMpError on every rank, if rank 0 cannot write."""
    if dtype not in ("keep", *DTYPES):
        raise HpcMpError(f"dtype = {dtype!r}", f"is not one of keep, {', '.join(DTYPES)}", "choose one of these")
    tensors = {saved.name: saved for saved in subject.saved()}
    number_format = DTYPES.get(dtype, engine.data.slabs.dtype)
    trained = {name: torch.empty(saved.shape, dtype=number_format, device="meta") for name, saved in tensors.items()}
    untrained = subject.untrained()
    split = split_torch_state_dict_into_shards(trained | untrained, max_shard_size=FILE_BYTES)
    gathering, error = Gathering(engine, world), None

    def files() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for file, names in split.filename_to_tensors.items():
            whole = gathering.of(list(dict.fromkeys(tensors[name].weight.name for name in names if name in tensors)))
            yield file, {name: tensors[name].taken(whole).to(number_format) if name in tensors else untrained[name]
                         for name in names if world.who.rank == 0}

    remaining = files()
    if world.who.rank == 0:
        try:
            _check_replaceable(output)
            with publishing(output.resolve(), "save") as temporary:
                for file, content in remaining:
                    save_file(content, temporary / file, metadata={"format": "pt"})
                if split.is_sharded:
                    write_json(temporary / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
                subject.describe(temporary, number_format)
        except HpcMpError as failed:
            error = [failed.value, failed.rule, failed.remedy]
    for _ in remaining:  # the other ranks send what is left, whatever has become of the files
        pass
    if (error := facts.broadcast(error, world.host)) is not None:
        raise HpcMpError(*error)


def _check_replaceable(output: Path) -> None:
    """Raise HpcMpError if something else than a model is there."""
    entries = list(output.iterdir()) if output.is_dir() else []
    others = [entry.name for entry in entries if entry.is_dir() or not any(map(entry.match, OF_A_MODEL))]
    if output.is_file() or others:
        raise HpcMpError(f"save {output}", f"is there and {f'holds {others[0]}' if others else 'is a file'}; nothing else is "
                         "replaced than the files of a model", "name another directory")


def write_checkpoint(directory: Path, engine: Engine, subject: Subject, progress: Mapping[str, int], world: World) -> None:
    """Write a checkpoint, completely or not at all. All ranks call this. Raises HpcMpError if a rank cannot write."""
    scale = engine.scale.tolist() if engine.settings.layout.precision == "fp16" else []
    occupied = directory.exists() and not read_indexes(directory).files if world.who.rank == 0 else None
    if facts.broadcast(occupied, world.host):
        raise HpcMpError(f"checkpoint {directory}", "is there and is no checkpoint; nothing else is replaced",
                         "name another directory")
    try:
        counters = {**progress, "loss_scale": scale, "model": subject.identity}
        checkpoint.Writing(directory.resolve(), progress["step"], counters, engine.groups).write_all(engine.held())
    except checkpoint.SaveFailed as failed:
        raise HpcMpError(f"checkpoint {directory}", f"cannot be written ({failed})",
                         "name a directory that all ranks may write to, on a file system that they share") from None


def read_checkpoint(directory: Path, engine: Engine, subject: Subject, world: World) -> dict[str, int]:
    """Fill the engine from a checkpoint of any layout. Return the progress. All ranks call this. Raises HpcMpError if the
    checkpoint is incomplete, damaged, or of another model; nothing has changed unless it is damaged."""
    value = f"checkpoint {directory}"
    reason = facts.broadcast(_mismatch(directory, engine, subject) if world.who.rank == 0 else None, world.host)
    if reason is not None:
        raise HpcMpError(value, reason, "name a checkpoint of this model")
    counters = facts.broadcast(read_json(directory / COUNTERS) if world.who.rank == 0 else None, world.host)
    counters.pop("model", None)
    try:
        checkpoint.load(directory, engine.held(), world.host)
    except Damaged as damage:
        raise HpcMpError(value, f"is damaged ({damage})", "resume from another one") from None
    scale = counters.pop("loss_scale")
    engine.restored(counters["step"] - counters["skipped"], scale if engine.settings.layout.precision == "fp16" else ())
    return dict(counters)


def _mismatch(directory: Path, engine: Engine, subject: Subject) -> str | None:
    """Return the reason why a checkpoint cannot be loaded; None if it can."""
    if not directory.is_dir():
        return "does not exist"
    if (reason := problem(directory, hashes=False)) is not None:
        return f"cannot be loaded: {reason}"
    stored = {name: tensor.shape for name, tensor in read_indexes(directory).tensors.items()}
    shapes = {saved.weight.name: saved.weight.shape for saved in subject.saved()}
    keys = {"": "model"} | {f"optimizer.{slot}.": "optimizer" for slot in engine.optimizer.slots}
    for prefix, what in keys.items():
        for name, shape in shapes.items():
            if stored.get(prefix + name) != shape:
                return f"is of another {what}: {prefix + name} is {stored.get(prefix + name, 'not there')}, and should be {shape}"
    others = stored.keys() - {prefix + name for prefix in keys for name in shapes}
    if others:
        return f"is of another model or optimizer: it has {sorted(others)[0]}"
    trained, identity = read_json(directory / COUNTERS).get("model", {}), subject.identity
    return next((f"is of another model: {name or 'it'} is {trained[name]}, and should be {value}"
                 for name, value in identity.items() if trained.get(name, value) != value), None)


class Gathering:
    """Whole weights on rank 0, from the parts of all ranks."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.links = {rank: new_group([0, rank], backend=gloo.GLOO) for rank in range(1, world.who.world)}
        self.world, self.dtype = world, engine.data.slabs.dtype
        self.parts = [part for part in parts_to_write(engine.held()) if not part.name.startswith("optimizer.")]
        self.everyone = facts.gather([(part.name, part.shape, [(side.start, side.stop) for side in part.box])
                                      for part in self.parts], world.host)

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these weights on rank 0; {} elsewhere. All ranks call this."""
        whole: dict[str, Tensor] = {}
        for rank, described in enumerate(self.everyone):
            for number, (name, shape, box) in enumerate(described):
                if name not in names or self.world.who.rank not in (0, rank):
                    continue
                if self.world.who.rank:
                    dist.send(self.parts[number].values.cpu().contiguous(), 0, group=self.links[rank])
                    continue
                if name not in whole:
                    whole[name] = torch.empty(shape, dtype=self.dtype)
                target = whole[name][tuple(slice(*ends) for ends in box)]
                values = torch.empty(target.shape, dtype=self.dtype) if rank else self.parts[number].values
                if rank:
                    dist.recv(values, rank, group=self.links[rank])
                target.copy_(values)
        return whole
