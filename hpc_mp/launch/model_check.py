"""Validation of a model configuration by transformers, before anything is started.

Importing transformers takes seconds, so accepted configurations are remembered: by an empty file for each configuration and
installation, in ``$XDG_CACHE_HOME/hpc-mp/models`` (``~/.cache`` by default).
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import REMEDY
from hpc_mp.job.rows import RowForm
from hpc_mp.layout.models.reading import family_in
from hpc_mp.rundir.origin import TAKE_WEIGHTS, counters_of, first_difference, model_fields

ModelChecker = Callable[[dict[str, Any], int, str | None, str | None, list[str], RowForm], list[str]]
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_model(config: dict[str, Any], vocabulary: int, origin: str | None = None, tokenizer: str | None = None,
                files: Sequence[str] = (), form: RowForm = "auto") -> list[str]:
    """Let transformers validate a configuration that it has not accepted before. Return warnings.

    If only the control half is installed, the one warning is that the model has not been validated.

    Args:
        config: configuration from ``hpc_mp.layout.models.read_config``.
        vocabulary: vocabulary size of the model.
        origin: another run's checkpoint to start from.
        tokenizer: directory of the tokenizer; None if one is trained.
        files: files of the text; ``form``: ``data.form``.

    Raises:
        HpcMpError: transformers refuses a value, a value differs from the training of ``origin``, or the tokenizer would differ
            in the exported model.
    """
    if find_spec("transformers") is None:
        return [f"transformers is not installed here, so it has not validated the model; the ranks will ({REMEDY})"]
    accepted = acceptance(config)
    if origin is not None or not accepted.exists():
        built = validated(config)
        with suppress(OSError):  # a full or read-only home costs the next launch some seconds
            accepted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            accepted.touch()
        fields = model_fields(built, family_in(config).dropouts)
        if origin is not None and (difference := first_difference(counters_of(Path(origin)).origin, {"model": fields})):
            raise HpcMpError(f"checkpoint.resume = {origin}", str(difference), TAKE_WEIGHTS)
    if tokenizer is not None and find_spec("tokenizers") is not None:
        from hpc_mp.train.data.tokenizer_agreement import agreeing_settings

        agreeing_settings(Path(tokenizer), config, [Path(name) for name in files], form=form)
    return [f"model.config.{key} = {config[key]} is beyond the vocabulary of {vocabulary}" for key in SPECIAL
            if isinstance(config.get(key), int) and not 0 <= config[key] < vocabulary]


def acceptance(config: Mapping[str, Any]) -> Path:
    """Return the file that exists once the installed transformers has accepted these values."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = getattr(find_spec("transformers"), "origin", None)
    content = json.dumps([library, library and Path(library).stat().st_mtime_ns, config], sort_keys=True, default=repr)
    return cache / "hpc-mp" / "models" / hashlib.sha256(content.encode()).hexdigest()


def validated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of the configuration, including defaults of transformers. Raises HpcMpError if a value is refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns even of special ids that are its own defaults
    try:
        values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        built: dict[str, Any] = CONFIG_MAPPING[config["model_type"]](**values).to_dict()
    except Exception as error:  # transformers validates with exceptions of many kinds
        message = " ".join(str(error).split())
        raise HpcMpError(f"model.config of model_type {config['model_type']!r}", f"is refused by transformers ({message})",
                         "mend that value") from None
    return built
