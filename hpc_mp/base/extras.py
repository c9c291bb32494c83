"""What ``pip install hpc-mp`` leaves out: it brings the control half, and ``hpc-mp[train]`` the libraries of the rank half."""

from __future__ import annotations

from importlib.util import find_spec

from hpc_mp.base.errors import HpcMpError

TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")
REMEDY = 'install the rest with: pip install "hpc-mp[train]"'


def need_train(what: str) -> None:
    """Refuse ``what``, such as ``launch --on local``, where a library of the rank half is missing; none is imported.

    Raises:
        HpcMpError: one is missing.
    """
    absent = [name for name in TRAIN if find_spec(name) is None]
    if absent:
        raise HpcMpError(what, f"needs {', '.join(absent)}, and a plain installation of hpc-mp does without", REMEDY)


def missing_extra(error: ModuleNotFoundError) -> HpcMpError | None:
    """The same of a failed import; None if it is not about a library of the rank half, but a fault of ours."""
    name = (error.name or "").partition(".")[0]
    return HpcMpError(name, "is not installed: a plain installation of hpc-mp does without", REMEDY) if name in TRAIN else None
