"""Tokenizers with chat templates, chats, and masks of their tokens made by transformers or by hand."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEMPLATES = Path(__file__).with_name("chat_templates")
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|User|>",
           "<|Assistant|>")
WORDS = ("What is the weather in Paris? It is 21 degrees, sunny: user assistant system\n\nYou are brief. <think> </think> "
         "naïve 漢字 🙂\n")


@cache
def _encoder() -> str:
    """A byte-level BPE with merges over spaces and line ends, so that tokens reach over the edges of answers."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    encoder.train_from_iterator([WORDS] * 4, trainer)
    return encoder.to_str()


def chat_tokenizer(directory: Path, template: str | None) -> Path:
    """Write a tokenizer with the template of this name in ``chat_templates``."""
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(_encoder())
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}))
    if template is not None:
        (directory / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    return directory


def by_transformers(directory: Path, chats: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Tokens of chats and 1 for each that counts, by a template with generation marks."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids, counts = [], []
    for chat in chats:
        out = tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), return_dict=True,
                                            return_assistant_tokens_mask=True, **chat.get("chat_template_kwargs", {}))
        ids += out["input_ids"]
        counts += out["assistant_masks"]
    return ids, counts


def by_hand(directory: Path, chats: Sequence[dict[str, Any]],
            parts: Sequence[Sequence[tuple[str, int]]]) -> tuple[list[int], list[int]]:
    """The same from the parts of each chat's text, each with 1 if it counts. Together they are the template's text."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids, counts = [], []
    for chat, own in zip(chats, parts, strict=True):
        text = "".join(part for part, _ in own)
        assert text == tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), tokenize=False,
                                                     **chat.get("chat_template_kwargs", {}))
        letters = [count for part, count in own for _ in part]
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids += encoding["input_ids"]
        counts += [max(letters[begin:end], default=0) for begin, end in encoding["offset_mapping"]]
    return ids, counts
