"""Byte-level BPE, GPT-2's kind of tokenizer: assembled from its parts, or trained on a job's own text."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from hpc_mp.job.tokenizer_files import check_tokenizer
from hpc_mp.train.data.cache import entry, key
from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading, pieces

FORMAT = 1  # increased when the same text gives another tokenizer
END = "<|endoftext|>"  # begins and ends a document, as in GPT-2
TEXT = 64 << 20  # limit of characters that a tokenizer is trained on
POLL_S = 0.2
MIN_FREQUENCY = 2  # occurrences that a pair needs to become a token
CLASS = "PreTrainedTokenizerFast"  # the class in transformers that takes tokenizer.json as it is
# Splitting rules of families whose own class transformers uses whatever tokenizer_config.json states. A tokenizer trained for
# these families splits text alike. Source: ``models/qwen2/tokenization_qwen2.py``, which composes characters (NFC) first.
SPLITS = {"qwen2": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
                  r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""}


def byte_level(model: models.BPE, *, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text like GPT-2 and keeps every byte."""
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _of_family(encoder: tokenizers.Tokenizer, split: str) -> tokenizers.Tokenizer:
    """Replace GPT-2's splitting rule of a byte-level tokenizer by a family's."""
    encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return encoder


def train(files: Sequence[Path], contents: Sequence[str], *, vocabulary: int, cache: Path,
          poll: Callable[[], object] = lambda: None, model_type: str = "gpt2",
          reading: DocumentReading = AS_THEY_ARE) -> Path:
    """Train a tokenizer with at most ``vocabulary`` ids on ``files``, or find it in the cache. Return its directory.

    Args:
        contents: identifies each file's content, and so the tokenizer in the cache.
        model_type: the family of the model, which may have its own splitting rule.
        reading: how files become documents; of a chat the contents of its messages are read.
        poll: called repeatedly; an exception from it ends the training.

    Raises:
        HpcMpError: ``vocabulary`` has no room for the 256 bytes and the end token, or a file cannot be read.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    check_tokenizer(None, vocabulary)

    def build(directory: Path) -> None:
        encoder = byte_level(models.BPE())
        if model_type in SPLITS:
            encoder = _of_family(encoder, SPLITS[model_type])
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, min_frequency=MIN_FREQUENCY, special_tokens=[END],
                                      initial_alphabet=alphabet, show_progress=False)
        _polled(lambda: encoder.train_from_iterator(_sample(files, reading), trainer), poll)
        (directory / "tokenizer.json").write_text(encoder.to_str(pretty=True), encoding="utf-8")
        special = {"bos_token": END, "eos_token": END}
        write_json(directory / "special_tokens_map.json", special)
        write_json(directory / "tokenizer_config.json", special | {"tokenizer_class": CLASS})

    return entry(cache / trained_name(contents, vocabulary, model_type, reading), build)


def trained_name(contents: Sequence[str], vocabulary: int, model_type: str = "gpt2",
                 reading: DocumentReading = AS_THEY_ARE) -> str:
    """Return the cache directory name of the tokenizer trained on these files."""
    split = [SPLITS[model_type]] if model_type in SPLITS else []
    return f"tokenizer-{key(FORMAT, TEXT, MIN_FREQUENCY, vocabulary, list(contents), *split, *reading.choices)}"


def _polled(work: Callable[[], None], poll: Callable[[], object]) -> None:
    """Run ``work``, which can block signals for long, in a thread. If ``poll`` raises, the thread is abandoned."""
    ended: Future[None] = Future()

    def act() -> None:
        try:
            work()
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=act, name="tokenizer", daemon=True).start()
    while not wait([ended], POLL_S).done:
        poll()
    ended.result()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sample(files: Sequence[Path], reading: DocumentReading = AS_THEY_ARE) -> Iterator[str]:
    """Yield all pieces of the text, or evenly spread pieces of at most ``TEXT`` characters in total."""
    total = sum(path.stat().st_size for path in files)
    position = taken = 0
    for piece in pieces(files, reading=replace(reading, tokenizer=None)):
        position += len(piece.text)
        if (taken + len(piece.text)) * total <= TEXT * position:
            taken += len(piece.text)
            yield piece.text
