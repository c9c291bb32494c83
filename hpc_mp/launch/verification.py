"""Verification of a job's model on its layout before its first start, and by ``hpc-mp verify``.

It takes a process with torch and some seconds, so what it finds is kept: by the model's configuration, the layout, the libraries
and this package, in ``$XDG_CACHE_HOME/hpc-mp/verified`` (``~/.cache`` by default).
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import TRAIN, installed
from hpc_mp.base.files import write_text
from hpc_mp.job import JobSpec, dump_job
from hpc_mp.job.layout import read_config, read_shape, stage_cut
from hpc_mp.job.shrunk import shrunk
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.summary import table
from hpc_mp.rundir.verified import FORMAT, REFUSED, Verified

PROGRAM = "hpc_mp.train.verify.verify"
OFF = "HPC_MP_VERIFY"  # a variable that is "0" where launches do not verify
COMPUTES = ("layout", "train")  # rooms whose code a verification depends on


def verified(spec: JobSpec) -> Verified:
    """Return the record of a job's verification, made now if none is kept. Raises HpcMpError if the job differs from Hugging
    Face's own model, or cannot be verified."""
    if (record := known(spec)) is not None:
        return record
    command = [sys.executable, "-P", "-m", PROGRAM]
    done = subprocess.run(command, input=_text(spec), capture_output=True, text=True, check=False)
    if done.returncode == REFUSED:
        raise HpcMpError(*json.loads(done.stdout))
    if done.returncode:
        raise HpcMpError("the model", f"cannot be verified: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}",
                         f"set {OFF}=0 to launch it unverified")
    record = FORMAT.validate_json(done.stdout)
    place = place_of(spec)
    with suppress(OSError):  # a full or read-only home costs the next launch some seconds
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(place, done.stdout)
    return record


def _text(spec: JobSpec) -> str:
    """Return a job file with all that a verification reads; the steps of the job may not be counted yet."""
    small = shrunk(spec, read_shape(spec))
    train = small.train.model_copy(update={"global_batch": spec.train.global_batch})
    parallel = spec.parallel.model_copy(update={"microbatches": spec.microbatches})
    return dump_job(spec.model_copy(update={"train": train, "parallel": parallel}))


def verify_first(specs: Sequence[JobSpec], listener: Listener) -> None:
    """Verify jobs before their first start, where the libraries are, and tell what has been found. Raises HpcMpError as
    ``verified``."""
    if os.environ.get(OFF) == "0" or not all(map(installed, TRAIN)):
        return
    for spec in specs:
        if known(spec) is None:
            listener.say(f"verifying the model on its layout, once for both ({OFF}=0 leaves it out)")
        listener.say(table({"verified": verified(spec).words()}))


def known(spec: JobSpec) -> Verified | None:
    """Return the record that is kept of this job, or of another one with the same model and the same small layout."""
    with suppress(OSError, ValueError):
        return FORMAT.validate_json(place_of(spec).read_bytes())
    return None


def place_of(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the record of a job."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shape = read_shape(spec)
    small, held = shrunk(spec, shape), stage_cut(spec, shape).layers
    tables = [table.model_dump(mode="json") for table in (small.parallel, small.train, small.lora)]
    libraries = [str(getattr(find_spec(name), "origin", None)) for name in ("torch", "transformers")]
    newest = max(path.stat().st_mtime_ns for path in (
        *(file for room in COMPUTES for file in (Path(hpc_mp.__file__).parent / room).rglob("*.py")),
        *(Path(library) for library in libraries if Path(library).exists())))
    content = json.dumps([read_config(spec), tables, small.data.documents, small.data.sequence_length, small.ranks, held[0] == 0,
                          held[-1] == 0, libraries, newest], sort_keys=True, default=repr)
    return cache / "hpc-mp" / "verified" / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
