"""Libraries that a plain ``pip install hpc-mp`` omits: it installs the control half; ``hpc-mp[train]`` adds the rank half."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hpc_mp.base.errors import HpcMpError

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # part of Python since 3.14
TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", ZSTD)
REMEDY = 'install the rest with: pip install "hpc-mp[train]"'


def installed(name: str) -> bool:
    """Return True if a module can be imported. Imports at most the package around it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def need_train(what: str) -> None:
    """Refuse ``what``, such as ``launch --on local``, if a library of the rank half is missing. Imports none of them. Raises
    HpcMpError."""
    absent = [name for name in TRAIN if not installed(name)]
    if absent:
        raise HpcMpError(what, f"needs {', '.join(absent)}, which a plain installation of hpc-mp omits", REMEDY)


def need_trackers(names: Sequence[str]) -> None:
    """Refuse ``track.to`` if a library that it names is missing. Imports none of them. Raises HpcMpError."""
    if absent := [name for name in names if not installed(name)]:
        raise HpcMpError(f"track.to = {list(names)}", f"needs what is not installed: {', '.join(absent)}",
                         f"pip install {' '.join(absent)}, where ranks run, or leave it out")


def missing_extra(error: ModuleNotFoundError) -> HpcMpError | None:
    """Return the same error for a failed import; None if the missing module is not one of these libraries."""
    package = (error.name or "").partition(".")[0]
    name = next((name for name in TRAIN if name.partition(".")[0] == package), None)
    return HpcMpError(name, "is not installed: a plain installation of hpc-mp omits it", REMEDY) if name else None
