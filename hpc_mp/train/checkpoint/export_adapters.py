"""Export of the adapters of a run's checkpoint to a directory that PEFT loads."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import render_json
from hpc_mp.job import load_job
from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import family_of
from hpc_mp.layout.models.peft_files import CONFIG, WEIGHTS, config_document
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.checkpoints import step_of
from hpc_mp.train.checkpoint.adapters import peft_tensors
from hpc_mp.train.checkpoint.export import DTYPES, Exported, check_output, choose, publishing, reader_of, reading


def export_adapters(run: RunDirectory, output: Path, *, step: int | None = None, dtype: str = "keep", force: bool = False,
                    progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write the adapters of a checkpoint of ``run`` to the directory ``output``, completely or not at all. Arguments and errors
    are those of ``export``; a run without adapters is refused."""
    output = output.resolve()
    check_output(output, force)
    spec = load_job(run.job)
    model = read_shape(spec)
    if model.adapters is None:
        raise HpcMpError(f"--adapters of run {run.path}", "has no adapters: it trains all weights of its model",
                         "leave --adapters out")
    checkpoint, skipped = choose(run, step)
    reader, saved = reader_of(checkpoint, model)
    family, chosen = family_of(model), DTYPES.get(dtype, saved)
    with reading(checkpoint):
        tensors = peft_tensors(family, model, reader, chosen)
    total = sum(tensor.nbytes for tensor in tensors.values())
    with publishing(output) as temporary:
        (temporary / CONFIG).write_text(render_json(config_document(family, model, spec.model.pretrained)), encoding="utf-8")
        save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)  # safetensors makes files that only the owner can read
        progress(total, total)
    return Exported(output=output, checkpoint=checkpoint, step=step_of(checkpoint), files=(WEIGHTS,),
                    parameters=sum(tensor.numel() for tensor in tensors.values()), bytes=total,
                    dtype=str(chosen).removeprefix("torch."), tokenizer=None, skipped=skipped)
