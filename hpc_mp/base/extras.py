"""Libraries that a plain ``pip install hpc-mp`` omits: it installs the control half; ``hpc-mp[train]`` adds the rank half."""

from collections.abc import Sequence
from importlib.util import find_spec

from hpc_mp.base.errors import HpcMpError

TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "zstandard")
REMEDY = 'install the rest with: pip install "hpc-mp[train]"'


def need_train(what: str) -> None:
    """Refuse ``what``, such as ``launch --on local``, if a library of the rank half is missing. Imports none of them. Raises
    HpcMpError."""
    absent = [name for name in TRAIN if find_spec(name) is None]
    if absent:
        raise HpcMpError(what, f"needs {', '.join(absent)}, which a plain installation of hpc-mp omits", REMEDY)


def need_trackers(names: Sequence[str]) -> None:
    """Refuse ``track.to`` if a library that it names is missing. Imports none of them. Raises HpcMpError."""
    if absent := [name for name in names if find_spec(name) is None]:
        raise HpcMpError(f"track.to = {list(names)}", f"needs what is not installed: {', '.join(absent)}",
                         f"pip install {' '.join(absent)}, where ranks run, or leave it out")


def missing_extra(error: ModuleNotFoundError) -> HpcMpError | None:
    """Return the same error for a failed import; None if the missing module is not one of these libraries."""
    name = (error.name or "").partition(".")[0]
    return HpcMpError(name, "is not installed: a plain installation of hpc-mp omits it", REMEDY) if name in TRAIN else None
