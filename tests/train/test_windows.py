"""The tokens of a text that comes in pieces are those of one pass over it, with every kind of tokenizer."""

import functools
import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from token_files import ODD, TEXT, write_rows
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from hpc_mp.train.data import documents, windows
from hpc_mp.train.data.documents import TextPiece, pieces

MIXED = TEXT + ODD * 30 + Path(json.__file__).read_text()
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
# Llama 3's way of cutting text into words
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


SOME = ["the ", "lazy", "\n", "\n\n", "    ", " ", "é", "漢字", "🙂", "aaaaaaa", "1234", "'s", "\t", "fox.", "▁"]


def trained(pre: pre_tokenizers.PreTokenizer, alphabet: list[str], vocabulary: int = 500) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre
    encoder.train_from_iterator([MIXED], trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False))
    return encoder


def byte_level(spaced: bool) -> tokenizers.Tokenizer:
    encoder = trained(pre_tokenizers.ByteLevel(add_prefix_space=spaced), ALPHABET)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def llama2() -> tokenizers.Tokenizer:
    """One word from the first character to the last, with a space before it and bytes for what has no token."""
    learnt = json.loads(trained(pre_tokenizers.Metaspace(prepend_scheme="always"), []).to_str())["model"]
    letters = [token for token in learnt["vocab"] if token.isascii() or "▁" in token]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [(left, right) for left, right in learnt["merges"] if {left, right, left + right} <= set(letters)]
    encoder = tokenizers.Tokenizer(models.BPE(
        {name: number for number, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return encoder


def llama3() -> tokenizers.Tokenizer:
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    encoder = trained(pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), ALPHABET)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    encoder = trained(pre_tokenizers.Metaspace(prepend_scheme=scheme), sorted(set(MIXED)), 700)
    encoder.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return encoder


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "GPT-2": lambda: byte_level(spaced=False),
    "GPT-2 with a space before": lambda: byte_level(spaced=True),
    "Llama 2": llama2,
    "Llama 3": llama3,
    "T5": lambda: metaspace("always"),
    "newer sentencepiece": lambda: metaspace("first"),
}
kind_of = functools.cache(lambda name: KINDS[name]())


def in_pieces(text: str, lengths: list[int]) -> list[TextPiece]:
    """Pieces of ``lengths`` characters, and what is left."""
    places = [place for place in itertools.accumulate(lengths, initial=0) if place < len(text)]
    parts = [text[first:end] for first, end in pairwise([*places, len(text)])] or [""]
    return [TextPiece(Path("text"), part, True, number < len(parts), number == len(parts), 0, 0)
            for number, part in enumerate(parts, start=1)]


def ids_of(found: list[TextPiece], encoder: tokenizers.Tokenizer, batch: int = windows.BATCH) -> list[int]:
    given_out = list(windows.encode(found, encoder, batch))
    assert [piece for piece, _ in given_out] == found
    return [token for _, ids in given_out for token in ids]


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.sampled_from(SOME), max_size=200), lengths=st.lists(st.integers(48, 200), max_size=12),
       batch=st.integers(1, 400))
def test_tokens_are_those_of_one_pass(kind: str, words: list[str], lengths: list[int], batch: int) -> None:
    """Also where windows overlap so little that often none of their tokens agree."""
    text, encoder = "".join(words), kind_of(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "CONTEXT", 48)
        assert ids_of(in_pieces(text, lengths), encoder, batch) == encoder.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_many_pieces_is_one_text(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 3000)
    encoder = kind_of(kind)
    text = MIXED * 4 + " " * 9000 + "x" * 9000 + "\n" * 3001 + "    indented\n" * 900
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = list(pieces([tmp_path / "a.txt"]))
    assert len(found) > 20
    ids = ids_of(found, encoder)
    assert ids == encoder.encode(text, add_special_tokens=False).ids
    if kind != "T5" and kind != "newer sentencepiece":  # those have no token for some of the text
        assert encoder.decode(ids).removeprefix(" " if "space" in kind else "") == text
    monkeypatch.setattr(windows, "agreement", lambda tail, head: (len(tail), 0))
    assert ids_of(found, encoder) != ids, "negative control: windows that are only put together are another text"


def test_a_word_longer_than_can_be_encoded_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST", 3000)
    text = "x" * 10_001
    ids = ids_of(in_pieces(text, [1000] * 10), kind_of("GPT-2"))
    assert kind_of("GPT-2").decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_goes_on_where_its_prompt_ends(kind: str, tmp_path: Path) -> None:
    encoder = kind_of(kind)
    rows = write_rows(tmp_path / "a.jsonl", {"prompt": "the laz", "completion": "y dog"}, {"prompt": "", "completion": "fox"},
                      {"prompt": "the lazy", "completion": " dog"}, {"text": "fox"})
    encoded = [(piece.text, ids) for piece, ids in windows.encode(pieces([rows]), encoder)]
    begun = {text: encoder.encode(text, add_special_tokens=False).ids for text in ("the laz", "the lazy", "fox")}
    assert [(text, ids) for text, ids in encoded if text in begun] == [
        ("the laz", begun["the laz"]), ("fox", begun["fox"]), ("the lazy", begun["the lazy"]), ("fox", begun["fox"])]
    for prompt, completion in (0, 1), (4, 5):  # a prompt is encoded as it is when text is generated after it
        ids = encoded[prompt][1] + encoded[completion][1]
        assert encoder.decode(ids).strip() == encoded[prompt][0] + encoded[completion][0]


def test_the_joint_of_a_prompt_had_a_space() -> None:
    """Negative control: what encoding both alone comes to."""
    encoder = kind_of("Llama 2")
    assert encoder.decode(encoder.encode("the laz").ids + encoder.encode("y dog").ids) == "the laz y dog"
    bare = windows.without_prefix(encoder)
    assert encoder.decode(encoder.encode("the laz").ids + bare.encode("y dog").ids) == "the lazy dog"
