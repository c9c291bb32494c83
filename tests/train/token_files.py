"""Texts and tokenizers for the tests of tokens."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from hpc_mp.train.data import TokenSet, bpe, prepare

TEXT = "The quick brown fox jumps over the lazy dog.\nNone of it is new.\n" * 20
ODD = "naïve 漢字 🙂\t  tabs\r\n\n\n  and   spaces <|endoftext|> It's 1234.5\x01"


def write(path: Path, content: str | bytes = "text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def prepared(cache: Path, *files: Path, given: Path | None = None, pretrained: Path | None = None,
             vocabulary: int = 300, **more: Any) -> TokenSet:
    return prepare(files, tokenizer_directory=given, pretrained=pretrained, vocabulary=vocabulary, cache=cache, **more)


def words(directory: Path, vocabulary: list[str], **config: Any) -> Path:
    """A tokenizer whose tokens are the words of ``vocabulary``."""
    encoder = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory.mkdir(parents=True)
    encoder.save(str(directory / "tokenizer.json"))
    if config:
        write(directory / "tokenizer_config.json", json.dumps(config))
    return directory


def gpt2_files(directory: Path, **config: str) -> Path:
    """GPT-2's two files, with the merges of a tokenizer trained on TEXT."""
    source = bpe.train([write(directory / "text.txt", TEXT)], ["text"], vocabulary=300, cache=directory / "cache")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    write(directory / "vocab.json", json.dumps(model["vocab"]))
    write(directory / "merges.txt", "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")
    for name, content in config.items():
        write(directory / f"{name}.json", content)
    return directory
