"""``environment.stage``: the Python environment of the ranks as one archive, unpacked on every node before they start.

A thousand ranks that import torch from a shared file system request millions of small files; one archive per node is one long
read. The archive is made on the login node, once for each state of the environment, and named by a hash of it.
``slurm/node-start.sh`` unpacks it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.program.files import program_python
from hpc_mp.launch.render.values import rank_python
from hpc_mp.launch.staging.members import Interpreter, Member, interpreter, members, write_tar
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.program import use_staged
from hpc_mp.rundir.records import RankStatus, StagedEnvironment, write_record

FORMAT = 1  # increased when the same environment gives a different archive
COMPRESS = ("zstd", "-q", "-T0", "-3")

PackedBytes = Callable[[int, int], None]  # bytes packed so far, bytes in all


def stage_environment(spec: AnySpec, listener: Listener, *runs: RunDirectory) -> None:
    """Pack the ranks' Python environment if the job asks for it, and record the archive's path in its runs, for the supervisor.
    The listener receives the number of packed bytes. Raises HpcMpError if the environment cannot be packed."""
    if not spec.environment.stage:
        return
    if isinstance(spec, ProgramSpec):
        python = program_python(spec)
    else:  # the interpreter to pack is not the packed one
        python = rank_python(resolved(spec, [ResolvedKey("environment.stage", False)]), sys.executable)

    def show(done: int, size: int) -> None:
        listener.update(RankStatus(0, "packing the Python environment", done=done, total=size), ())

    with listener.following(spec.train.steps if isinstance(spec, JobSpec) else 0):
        packed = pack(interpreter([python]), runs[0].cache, show)
    for run in runs:
        write_record(run.environment, packed)
        if isinstance(spec, ProgramSpec):
            use_staged(run.program, Path(packed.prefix))


def pack(python: Interpreter, cache: Path, show: PackedBytes) -> StagedEnvironment:
    """Return the archive of the environment of ``python``, made unless it exists; ``ARCHIVE.bytes`` has its unpacked size.
    ``cache``: directory for archives, on a file system that all nodes share; older ones of the same prefix are removed. Raises
    HpcMpError if the environment cannot be packed, or the cache cannot be written."""
    content = members(python)
    size = sum(member.size for member in content)
    name = f"environment-{_key(str(python.prefix))}-{fingerprint(python, content)}"
    archive = cache / (name + (".tar.zst" if shutil.which(COMPRESS[0]) else ".tar"))
    packed = StagedEnvironment(str(archive), str(python.prefix), size)
    if archive.exists():
        return packed
    part = cache / f".{archive.name}.{os.getpid()}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(content, part, lambda done: show(done, size))
        archive.with_name(f"{archive.name}.bytes").write_text(f"{size}\n", encoding="ascii")
        part.rename(archive)
    except OSError as error:
        raise HpcMpError(f"environment.stage: the archive {archive}", f"cannot be written ({error.strerror or error})",
                         "make room there, or leave environment.stage out") from None
    finally:
        with suppress(OSError):
            part.unlink()
    _remove_older(archive)
    return packed


def fingerprint(python: Interpreter, content: Sequence[Member]) -> str:
    """Return a hash of the interpreter and of every file's name, size and mtime; bytecode follows its source."""
    parts = (f"{member.name}\0{member.size}\0{member.changed}" for member in content if "/__pycache__/" not in member.name)
    return _key("\n".join((str(FORMAT), python.version, str(python.prefix), *parts)))


def _key(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _write(content: Sequence[Member], path: Path, show: Callable[[int], None]) -> None:
    with open(path, "wb") as file:
        if ".tar.zst" not in path.name:
            write_tar(content, file, show)
            return
        with subprocess.Popen(COMPRESS, stdin=subprocess.PIPE, stdout=file) as zstd:
            assert zstd.stdin is not None
            write_tar(content, zstd.stdin, show)
        if zstd.returncode:
            raise OSError(f"zstd ended with {zstd.returncode}")


def _remove_older(archive: Path) -> None:
    """Remove older archives. A job still queued may need one: it then uses the environment itself and reports that."""
    same = archive.name.rpartition("-")[0]
    for old in archive.parent.glob(f"{same}-*"):
        if not old.name.startswith(archive.name):
            with suppress(OSError):
                old.unlink()
