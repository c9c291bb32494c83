"""Ranks in a container: its runtime, and the directories mounted into it."""

import re
from pathlib import Path, PurePosixPath

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.launch.facts import ClusterFacts

MOUNT = re.compile(r"(?P<source>/[^,:]*)(:(?P<target>/[^,:]*)(:(?P<flags>[a-z]+([+][a-z]+)*))?)?")
_WILD = re.compile(r"[*?\[]")


def runtime(spec: AnySpec, facts: ClusterFacts) -> str | None:
    """Return ``pyxis``, ``apptainer`` or ``singularity``; None for a job without a container. ``auto``: pyxis if srun has it."""
    if spec.slurm.container is None:
        return None
    if spec.slurm.container_runtime == "auto":
        return "pyxis" if facts.has_pyxis else "apptainer"
    return spec.slurm.container_runtime


def mounts(spec: AnySpec) -> list[str]:
    """Return ``SOURCE:TARGET[:FLAGS]`` of each directory that ranks read or write, and of those that the job names. Raises
    HpcMpError if the container's options would read a path as two, or a path would hide the image."""
    if spec.slurm.container is None:
        return []
    requested = [_mount(text) for text in spec.slurm.container_mounts]
    return [*(f"{path}:{path}" for path in map(_plain, _needed(spec))), *requested]


def _needed(spec: AnySpec) -> list[str]:
    """Return the directories that the run needs, none inside another: for runs, data, model and tokenizer."""
    if isinstance(spec, ProgramSpec):
        paths: list[str | None] = [spec.job.directory, spec.program.directory, *spec.program.stage]
    else:
        paths = [spec.job.directory, spec.model.pretrained, spec.data.tokenizer, spec.checkpoint.resume,
                 *(_fixed(pattern) for pattern in (*spec.data.files, *spec.evaluate.files, spec.data.template) if pattern)]
    directories = sorted({PurePosixPath(path) for path in paths if path})
    return [str(path) for path in directories if not any(other in path.parents for other in directories)]


def _fixed(pattern: str) -> str:
    """Return the deepest directory above a pattern without a wild card."""
    parents = (str(parent) for parent in Path(pattern).parents)
    return next(parent for parent in parents if not _WILD.search(parent))


def _plain(path: str) -> str:
    if path == "/":
        raise HpcMpError("the root directory as a place of data", "would hide the image inside the container",
                         "move the files into a directory")
    if re.search("[,:]", path):
        raise HpcMpError(f"the path {path}", "holds a comma or a colon, which part the mounts of a container",
                         "move it, or give slurm.container_mounts another name of it")
    return path


def _mount(text: str) -> str:
    match = MOUNT.fullmatch(text)
    if not match:
        raise HpcMpError(f"slurm.container_mounts: {text!r}", "does not read SOURCE[:TARGET[:FLAGS]] with absolute paths",
                         'write for example "/data:/inside:ro"')
    flags = f":{match['flags']}" if match["flags"] else ""
    return f"{match['source']}:{match['target'] or match['source']}{flags}"
