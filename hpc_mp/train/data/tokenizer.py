"""The tokenizer of a job.

Whatever its source, it becomes a directory in the cache that ``transformers.AutoTokenizer.from_pretrained`` loads. A run does not
depend on the given directory and does not change with it.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.tokenizer_files import TEMPLATE, VOCABULARY_FILES, check_fit, check_kind, files_there, find_tokenizer, read_object
from hpc_mp.rundir.checkpoints import sha256
from hpc_mp.train.data.bpe import CLASS, END, byte_level, train, trained_name, write_json
from hpc_mp.train.data.cache import entry, key
from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading

# Files that accompany the ``VOCABULARY_FILES``.
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE)

SPECIAL = ("eos", "bos", "pad", "unk")

GPT2 = {"eos_token": END, "add_prefix_space": False}  # settings that GPT-2's two files do not contain


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer."""

    directory: Path
    encoder: tokenizers.Tokenizer
    special: Mapping[str, int | None]  # ids of the tokens that it names, by ``SPECIAL``; None if the vocabulary lacks the token
    size: int  # largest id + 1

    @property
    def end(self) -> int | None:
        """Id of the token that ends a document; None if there is none."""
        return self.special.get("eos")


def resolve(files: Sequence[Path], contents: Sequence[str], *, directory: Path | None, pretrained: Path | None,
            vocabulary: int, cache: Path, poll: Callable[[], object] = lambda: None, model_type: str = "gpt2",
            reading: DocumentReading = AS_THEY_ARE) -> Tokenizer:
    """Return the tokenizer of a job and keep it in ``cache``.

    Args:
        files: training text for a new tokenizer, if the job names none; ``contents`` identifies each file's content.
        directory: ``data.tokenizer``; ``pretrained``: the model's checkpoint, whose tokenizer is the second choice.
        vocabulary: rows of the model's embedding.
        poll, model_type, reading: as in ``train``, for a tokenizer that is trained. The template of ``reading`` takes the place
            of the tokenizer's own.

    Raises:
        HpcMpError: the tokenizer cannot be read, is of an unsupported kind, or has ids beyond ``vocabulary``.
    """
    source = find_tokenizer(directory, pretrained)
    tokenizer = load(source or train(files, contents, vocabulary=vocabulary, cache=cache, poll=poll, model_type=model_type,
                                     reading=reading))
    check_fit(tokenizer.directory, tokenizer.size, vocabulary)
    if source is None and reading.template is None:
        return tokenizer
    name = kept_name(contents, directory=directory, pretrained=pretrained, vocabulary=vocabulary, model_type=model_type,
                     reading=reading)
    return replace(tokenizer, directory=_keep(tokenizer, cache / name, reading.template))


def load(directory: Path) -> Tokenizer:
    """Read a directory with ``tokenizer.json``, or with GPT-2's ``vocab.json`` and ``merges.txt``. Raises HpcMpError if the
    tokenizer cannot be read, or is of an unsupported kind."""
    file = directory / "tokenizer.json"
    config = ({} if file.exists() else GPT2) | _config(directory)
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file)) if file.exists() else _gpt2(directory, config)
    except HpcMpError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise HpcMpError(f"tokenizer {directory}", f"cannot be loaded ({error})",
                         "save it again with save_pretrained, or name another directory") from None
    encoder.no_truncation()  # both are inference settings that tokenizer.json may contain
    encoder.no_padding()
    special = {name: encoder.token_to_id(str(token)) for name in SPECIAL if (token := config.get(f"{name}_token")) is not None}
    return Tokenizer(directory, encoder, special, size=max(encoder.get_vocab().values(), default=-1) + 1)


def _gpt2(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build a tokenizer of GPT-2's kind; other kinds with the same file names are refused."""
    check_kind(directory)
    encoder = byte_level(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")),
                         add_prefix_space=config["add_prefix_space"])
    named = dict.fromkeys(v for k, v in config.items() if k.endswith("_token") and isinstance(v, str))
    encoder.add_special_tokens([token for token in named if encoder.token_to_id(token) is not None])
    return encoder


def _keep(tokenizer: Tokenizer, target: Path, template: Path | None) -> Path:
    """Copy a tokenizer into the cache, completed so that AutoTokenizer loads it without the model's config.json."""
    names = files_there(tokenizer.directory, VOCABULARY_FILES + SIDE_FILES)

    def build(directory: Path) -> None:
        for name in names:
            shutil.copyfile(tokenizer.directory / name, directory / name)
        config = read_object(directory / "tokenizer_config.json")
        if "tokenizer.json" not in names:
            (directory / "tokenizer.json").write_text(tokenizer.encoder.to_str(pretty=True), encoding="utf-8")
            ends = {} if tokenizer.end is None else {"eos_token": tokenizer.encoder.id_to_token(tokenizer.end)}
            write_json(directory / "tokenizer_config.json", config | ends | {"tokenizer_class": CLASS})
        elif "tokenizer_class" not in config:
            write_json(directory / "tokenizer_config.json", config | {"tokenizer_class": CLASS})
        if template is not None:
            shutil.copyfile(template, directory / TEMPLATE)

    return entry(target, build)


def kept_name(contents: Sequence[str], *, directory: Path | None, pretrained: Path | None, vocabulary: int,
              model_type: str, reading: DocumentReading = AS_THEY_ARE) -> str:
    """Return the cache directory name of the tokenizer that ``resolve`` returns, without building it. Raises HpcMpError."""
    source = find_tokenizer(directory, pretrained)
    name = trained_name(contents, vocabulary, model_type, reading) if source is None else _kept_name(source)
    return name if reading.template is None else f"tokenizer-{key(name, sha256(reading.template))}"


def _kept_name(directory: Path) -> str:
    names = files_there(directory, VOCABULARY_FILES + SIDE_FILES)
    return f"tokenizer-{key([(name, sha256(directory / name)) for name in names])}"


def _config(directory: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json`` merged over ``special_tokens_map.json``, with each token as a plain string."""
    config = read_object(directory / "special_tokens_map.json") | read_object(directory / "tokenizer_config.json")
    return {k: v.get("content") if k.endswith("_token") and isinstance(v, dict) else v for k, v in config.items()}
