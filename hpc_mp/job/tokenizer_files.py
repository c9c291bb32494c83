"""The tokenizer that a job uses, and its fit to the model, determined from its files without the library that loads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError

# A directory with one of these files has a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
                    "sentencepiece.bpe.model", "tekken.json")
GPT2_FILES = ["vocab.json", "merges.txt"]  # they define a GPT-2 tokenizer completely
TEMPLATE = "chat_template.jinja"  # or a text in tokenizer_config.json
BYTES = 256  # the alphabet of a tokenizer that is trained here, without the end-of-document token


def find_tokenizer(tokenizer: Path | None, pretrained: Path | None) -> Path | None:
    """Return the directory whose tokenizer is used: ``tokenizer``, else the checkpoint's. This is cheap enough for a login node.
    None means that a tokenizer is trained on the job's files, for a model with random initial weights. Raises HpcMpError if the
    directory ``tokenizer`` contains no tokenizer, or the checkpoint has none."""
    if tokenizer is not None and not files_there(tokenizer, VOCABULARY_FILES):
        raise HpcMpError(f"data.tokenizer = {tokenizer}", "is not a directory with a tokenizer",
                         "name a directory that holds tokenizer.json"
                         + (", or leave data.tokenizer out to train one" if pretrained is None else ""))
    if tokenizer is None and pretrained is not None and not files_there(pretrained, VOCABULARY_FILES):
        raise HpcMpError(f"model.pretrained = {pretrained}", "holds no tokenizer, and its weights do not work with another one",
                         "set data.tokenizer to the directory of the tokenizer with which it was trained, or copy its "
                         "tokenizer.json and tokenizer_config.json into the checkpoint")
    return tokenizer or pretrained


def check_tokenizer(directory: Path | None, vocabulary: int) -> None:
    """Refuse an unusable tokenizer at launch; ``directory`` is the result of ``find_tokenizer``. ``vocabulary``: rows of the
    model's embedding. Raises HpcMpError if the tokenizer cannot be read, is of an unsupported kind, or has ids beyond the
    vocabulary; or the vocabulary is too small for a tokenizer that would be trained."""
    if directory is None:
        if vocabulary <= BYTES:
            raise HpcMpError(f"the model's vocabulary of {vocabulary}",
                             f"is too small for a tokenizer trained here: {BYTES} bytes + <|endoftext|> = {BYTES + 1}",
                             f"set the model's vocab_size to at least {BYTES + 1}, or set data.tokenizer")
        return
    check_kind(directory)
    check_fit(directory, _size(directory), vocabulary)


def has_template(directory: Path) -> bool:
    """Return True if a tokenizer's directory holds a chat template. Raises HpcMpError."""
    return (directory / TEMPLATE).exists() or bool(read_object(directory / "tokenizer_config.json").get("chat_template"))


def missing_template(directory: Path | None) -> HpcMpError:
    """Return the error for chats without a chat template."""
    return HpcMpError(f"tokenizer {directory}" if directory else "the tokenizer that is trained on data.files",
                      "has no chat template, by which chats are written as text",
                      "set data.template to a file with a Jinja template, or data.tokenizer to the tokenizer of the chat model")


def check_kind(directory: Path) -> None:
    """Refuse a directory without ``tokenizer.json``, unless it has exactly GPT-2's two files. Raises HpcMpError."""
    if (directory / "tokenizer.json").exists():
        return
    files = files_there(directory, (*VOCABULARY_FILES, "added_tokens.json"))
    kind = str(read_object(directory / "tokenizer_config.json").get("tokenizer_class")
               or read_object(directory / "config.json").get("model_type", "gpt2"))
    if files != GPT2_FILES or not kind.lower().startswith("gpt2"):
        raise HpcMpError(f"tokenizer {directory}",
                         f"this kind is not supported yet ({kind}: {', '.join(files)} without tokenizer.json)",
                         "load it with transformers.AutoTokenizer and call its save_pretrained, which writes tokenizer.json")


def check_fit(directory: Path, size: int, vocabulary: int) -> None:
    """Refuse a tokenizer whose largest id, ``size`` − 1, has no row in the model's embedding. Raises HpcMpError."""
    if size > vocabulary:
        raise HpcMpError(f"tokenizer {directory}",
                         f"does not fit the model: its largest id {size - 1} needs a vocabulary of {size}, but the model's is "
                         f"{vocabulary}", f"use the model's own tokenizer, or a model whose vocab_size is at least {size}")


def files_there(directory: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if (directory / name).exists()]


def read_object(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON object that are not null; empty if the file does not exist. Raises HpcMpError."""
    if not path.exists():
        return {}
    try:
        return {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if v is not None}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise HpcMpError(f"tokenizer file {path}", f"cannot be read ({error})",
                         "save the tokenizer again with save_pretrained") from None


def _size(directory: Path) -> int:
    """Return the largest id of a tokenizer + 1, from its files. Raises HpcMpError."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return _largest(read_object(directory / "vocab.json").values()) + 1
    content = read_object(file)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise HpcMpError(f"tokenizer {directory}", "cannot be loaded (its tokenizer.json holds no vocabulary)",
                         "save it again with save_pretrained, or name another directory")
    added = [token.get("id") for token in content.get("added_tokens", []) if isinstance(token, dict)]
    return max(_largest(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1, _largest(added)) + 1


def _largest(ids: Sequence[Any] | Any) -> int:
    return max((token_id for token_id in ids if isinstance(token_id, int)), default=-1)
