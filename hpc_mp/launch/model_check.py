"""What transformers itself says of a model configuration, before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import REMEDY
from hpc_mp.layout.models import family_of
from hpc_mp.rundir.origin import TAKE_WEIGHTS, counters_of, first_difference, model_fields

ModelChecker = Callable[[dict[str, Any], int, str | None, str | None, list[str]], list[str]]
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_model(
    config: dict[str, Any], vocabulary: int, origin: str | None = None, tokenizer: str | None = None, files: Sequence[str] = (),
) -> list[str]:
    """Let transformers validate a configuration; returns warnings. Imports transformers, which takes 2 to 3 s.

    Where only the control half is installed, the one warning is that nobody has validated it.

    Args:
        config: as ``hpc_mp.layout.models.read_config`` gives it.
        vocabulary: of the model.
        origin: the checkpoint of another run whose state is taken over.
        tokenizer: the directory of the tokenizer; None: one is trained.
        files: of the text.

    Raises:
        HpcMpError: a value that transformers refuses, or one that differs from what ``origin`` was trained with, or a tokenizer
            that would be another one in the exported model.
    """
    if find_spec("transformers") is None:
        return [f"transformers is not installed here, so it has not validated the model; the ranks will ({REMEDY})"]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns even of special ids that are its own defaults
    try:
        values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        built = CONFIG_MAPPING[config["model_type"]](**values)
    except Exception as error:  # transformers validates with exceptions of many kinds
        said = " ".join(str(error).split())
        raise HpcMpError(f"model.config of model_type {config['model_type']!r}", f"is refused by transformers ({said})",
                         "mend that value") from None
    if origin is not None:
        now = model_fields(built.to_dict(), family_of(config["model_type"]).dropouts)
        if difference := first_difference(counters_of(Path(origin)).origin, {"model": now}):
            raise HpcMpError(f"checkpoint.resume = {origin}", str(difference), TAKE_WEIGHTS)
    if tokenizer is not None and find_spec("tokenizers") is not None:
        from hpc_mp.train.data.tokenizer_agreement import agreeing_settings

        agreeing_settings(Path(tokenizer), config, [Path(name) for name in files])
    return [f"model.config.{key} = {config[key]} is beyond the vocabulary of {vocabulary}" for key in SPECIAL
            if isinstance(config.get(key), int) and not 0 <= config[key] < vocabulary]
