"""The verification of a job: its shrunk model on its shrunk layout, against Hugging Face's own model in one process, in fp64.

One process imports torch and transformers, and forks the ranks and the reference from it.

    python -m hpc_mp.train.verify.verify < job.toml > verified.json
"""

import json
import logging
import os
import pickle
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import adapters_of, check_job, read_shape, stage_cut
from hpc_mp.job.shrunk import layout_words, shrunk, with_model
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.rundir.verified import FORMAT, REFUSED, Verified
from hpc_mp.train.checkpoint.adapters import peft_tensors
from hpc_mp.train.checkpoint.export import model_tensors
from hpc_mp.train.checkpoint.shard_file import ShardReader
from hpc_mp.train.rank.assemble import model_of
from hpc_mp.train.rank.main import import_model_code
from hpc_mp.train.verify.adapters import as_peft
from hpc_mp.train.verify.compare import Comparison, compared
from hpc_mp.train.verify.observed import Observed, drawn
from hpc_mp.train.verify.plain import Plain
from hpc_mp.train.verify.rank import LOCAL, run_rank
from hpc_mp.train.verify.samples import DrawnSamples
from hpc_mp.train.verify.small_model import UNVERIFIED, small_model

STORED, CHECKPOINT = "stored", "checkpoint"  # folders of a verification
ANOTHER = f"use another layout or model, or {UNVERIFIED}"


def verify(spec: JobSpec) -> Verified:
    """Verify a job. Raises HpcMpError if the job is wrong, its model cannot be shrunk, or a number differs."""
    began, shape = time.perf_counter(), read_shape(spec)
    check_job(spec, shape)
    result, small = comparison(spec, shape)
    if (difference := result.first) is not None:
        raise HpcMpError(
            f"model_type = {shape.model_type!r} on {layout_words(spec)}",
            f"{difference.name}: {difference.what} differs by {difference.size:.1e} from that in transformers "
            f"{transformers.__version__}, as a small model in fp64 on {layout_words(small)} shows", ANOTHER)
    return Verified(shape.model_type, layout_words(spec), layout_words(small), small.ranks, small.train.steps, **result.counts,
                    difference=result.largest, seconds=time.perf_counter() - began,
                    versions={"torch": torch.__version__, "transformers": transformers.__version__})


def comparison(spec: JobSpec, shape: ModelShape) -> tuple[Comparison, JobSpec]:
    """Compute a shrunk job, and Hugging Face's model beside it. Return the comparison, and the shrunk job.

    Raises:
        HpcMpError: as ``verify``, or a process failed.
    """
    torch.set_num_threads(1)  # nothing here starts threads, which would not survive a fork
    import_model_code(family_of(shape))
    small = shrunk(spec, shape)
    config, model = small_model(spec, shape, small)
    small = with_model(small, config, model, stage_cut(spec, shape).layers)
    small_shape = replace(model, adapters=adapters_of(small.lora, family_of(model), model), prompt=small.data.prompt_length or 0)
    with TemporaryDirectory(prefix="hpc-mp-verify-") as name, socket.create_server((LOCAL, 0), backlog=small.ranks) as listener:
        folder = Path(name)
        ranks = [partial(run_rank, rank, small, small_shape, listener, folder / CHECKPOINT) for rank in range(small.ranks)]
        plain, *observed = _forked([partial(_plain, small, small_shape, folder / STORED), *ranks], folder, spec)
        stored = {name: values for file in (folder / STORED).glob("*.safetensors") for name, values in load_file(file).items()}
        exported = _exported(small, small_shape, folder / CHECKPOINT)
    return compared(small_shape, plain, observed, *({name: values.numpy() for name, values in tensors.items()}
                                                    for tensors in (stored, exported))), small


def _plain(small: JobSpec, shape: ModelShape, folder: Path) -> Observed:
    """Train Hugging Face's model, and store it as its library does, or its adapters as PEFT does."""
    plain = Plain(small, shape)
    observed = plain.train(DrawnSamples(small, shape))
    folder.mkdir()
    if shape.adapters is None:
        plain.model.save_pretrained(folder, state_dict=plain.stored)
    else:
        save_file({name: values.contiguous() for name, values in as_peft(shape, plain.trained).items()},
                  folder / "adapters.safetensors")
    return observed


def _exported(small: JobSpec, shape: ModelShape, checkpoint: Path) -> dict[str, Tensor]:
    reader = ShardReader(checkpoint, read_indexes(checkpoint))
    if shape.adapters is not None:
        return dict(peft_tensors(family_of(shape), shape, reader, torch.float64))
    return model_tensors(model_of(small, shape).config, shape, reader, partial(drawn, small.train.seed), torch.float64)


def _forked(calls: Sequence[Callable[[], Any]], folder: Path, spec: JobSpec) -> list[Any]:
    """Return the results of calls that are made at once, each in a process of its own. Raises HpcMpError if one fails."""
    try:
        start_processes(_called, (calls, folder), len(calls), start_method="fork")
    except (ProcessRaisedException, ProcessExitedException) as error:
        if os.environ.get("HPC_MP_DEBUG") == "1":
            raise
        raise HpcMpError(f"model.config on {layout_words(spec)}", f"cannot be computed on a small scale: "
                         f"{str(error).strip().splitlines()[-1]}", ANOTHER) from None
    return [pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(len(calls))]


def _called(number: int, calls: Sequence[Callable[[], Any]], folder: Path) -> None:
    (folder / f"{number}.pickle").write_bytes(pickle.dumps(calls[number]()))


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        sys.stdout.write(FORMAT.dump_json(verify(resolve(tomllib.loads(sys.stdin.read()), Path.cwd()))).decode())
    except HpcMpError as error:
        sys.stdout.write(json.dumps([error.value, error.rule, error.remedy]))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
