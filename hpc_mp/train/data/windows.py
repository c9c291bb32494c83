"""Tokenization of texts in windows: no text has to fit into memory, and the tokens equal those of a single pass.

A long text comes in pieces. Each piece is encoded together with some characters of its neighbours, so that two windows overlap.
If both windows have the same tokens over a stretch of the overlap, neither is affected by its own edge there: that is where the
output switches from one window to the next. If no such place exists, because a word is longer than the overlap, both windows are
encoded as one.

A chat is encoded as one, however long it is. Its tokens count if they overlap a span that counts, as in transformers.

An example for classification is encoded as one too, with the special tokens of the tokenizer's template.

A completion continues its prompt. The joint is the end of a token, as in generation, where the prompt is encoded separately. But
a completion does not begin a text: tokenizers that put a space before a text (``▁``) put none there.
"""

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from hpc_mp.train.data.chat_template import Span
from hpc_mp.train.data.documents import TextPiece

CONTEXT = 512  # characters taken from a neighbour
SURE = 8  # consecutive tokens in which two windows must agree
MOST = 4 << 20  # limit of characters that are encoded as one; a longer word is cut
BATCH = 4 << 20  # characters encoded at once, on all cores; the library needs about 60 bytes for each

Token = tuple[int, int, int]  # first character in its text, the character after its last, id


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A piece with its surrounding characters. ``begin``: position in its text of the window's first character; ``own``: of the
    piece's first character. ``goes_on``: True if its text continues another text of the same document."""

    piece: TextPiece
    text: str
    begin: int
    own: int
    goes_on: bool

    @property
    def whole(self) -> bool:
        """True if its text is only this window."""
        return self.begin == self.own == 0 and not self.piece.joined

    @property
    def plain(self) -> bool:
        """True if the positions of its tokens are not needed."""
        return self.whole and self.piece.spans is None


@dataclass(frozen=True, slots=True)
class EncodedWindow:
    """The ids of a window and the tokens at its edges: its first ones, ``head``, and those from number ``tail_at`` on,
    ``tail``; of a chat also the stretches of tokens that count."""

    window: TextWindow
    ids: list[int]
    head: list[Token]
    tail: list[Token]
    counted: list[Span] | None = None

    @property
    def tail_at(self) -> int:
        return len(self.ids) - len(self.tail)


def encode(stream: Iterable[TextPiece], encoder: tokenizers.Tokenizer, batch: int = BATCH,
           apart: bool = False) -> Iterator[tuple[TextPiece, list[int]]]:
    """Yield each piece with its part of the text's ids, without the special tokens that the tokenizer's template would add.
    ``apart``: as in ``DocumentReading``.

    A chat is yielded in parts whose tokens all count, or all do not."""
    splice = _Splice(encoder)
    for windows in _batches(_windows(stream, apart), batch):
        if (example := windows[0].piece.example) is not None:
            yield from _examples([window.piece for window in windows], encoder, example.limit)
            continue
        for encoded in splice.encoded(windows):
            if encoded.counted is not None:
                yield from _runs(encoded.window.piece, encoded.ids, encoded.counted)
            elif encoded.window.whole:
                yield encoded.window.piece, encoded.ids
            else:
                yield from splice.add(encoded)


class _Splice:
    """The splicing of a text's windows, one after another."""

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        self.encoders = {False: encoder, True: without_prefix(encoder)}
        self.held: EncodedWindow | None = None  # its tokens from ``given`` on are not yielded yet
        self.given = 0

    def encoded(self, windows: Sequence[TextWindow]) -> list[EncodedWindow]:
        """Encode windows, in order. Token positions are computed only for windows that overlap, because it takes time."""
        by_number: dict[int, EncodedWindow] = {}
        for goes_on, encoder in self.encoders.items():
            for plain, act in (True, encoder.encode_batch_fast), (False, encoder.encode_batch):
                chosen = [number for number, window in enumerate(windows) if (window.goes_on, window.plain) == (goes_on, plain)]
                encodings = act([windows[number].text for number in chosen], add_special_tokens=False)
                for number, encoding in zip(chosen, encodings, strict=True):
                    window = windows[number]
                    edges = ([], []) if window.whole else _edges(encoding, window)
                    spans = window.piece.spans
                    counted = None if spans is None else counted_tokens(encoding, spans)
                    by_number[number] = EncodedWindow(window, encoding.ids, *edges, counted)
        return [by_number[number] for number in range(len(windows))]

    def add(self, encoded: EncodedWindow) -> Iterator[tuple[TextPiece, list[int]]]:
        """Yield the ids that are final now that this window of a text is known."""
        held, window = self.held, encoded.window
        if held is None:
            self.given = 0
        elif (met := agreement(held.tail, encoded.head)) is not None:
            yield held.window.piece, held.ids[self.given:held.tail_at + met[0]]
            self.given = met[1]
        elif len(held.window.text) + len(window.text) <= MOST:
            yield held.window.piece, []
            encoded = self._joined(held, window)
        else:
            yield held.window.piece, held.ids[self.given:held.tail_at + _from(held.tail, window.own)]
            self.given = _from(encoded.head, window.own)
        self.held = encoded
        if not window.piece.joined:
            yield window.piece, encoded.ids[self.given:]
            self.held = None

    def _joined(self, held: EncodedWindow, window: TextWindow) -> EncodedWindow:
        """Encode the held window and the next one as one. Ids of the held window that were already yielded stay."""
        begin = held.window.begin
        text = held.window.text[:window.begin - begin] + window.text
        (one,) = self.encoded([replace(window, text=text, begin=begin)])
        if self.given:
            self.given = _from(one.head, held.head[self.given][0])
        return one


def _examples(pieces: Sequence[TextPiece], encoder: tokenizers.Tokenizer, limit: int) -> Iterator[tuple[TextPiece, list[int]]]:
    encoder.enable_truncation(limit)  # of a pair, the longer text first, as in transformers
    texts = [piece.example.texts for piece in pieces if piece.example is not None]
    encodings = encoder.encode_batch([pair if len(pair) > 1 else pair[0] for pair in texts])
    encoder.no_truncation()
    for piece, one in zip(pieces, encodings, strict=True):
        yield replace(piece, second=bisect_left(one.type_ids, 1), cut=bool(one.overflowing)), one.ids


def counted_tokens(encoding: tokenizers.Encoding, spans: Sequence[Span]) -> list[Span]:
    """Return the stretches of tokens that overlap ``spans``, which are of characters; both ascend."""
    tokens = range(len(encoding))

    def characters(number: int) -> Span:
        place = encoding.token_to_chars(number)
        assert place is not None  # only a template's tokens have no characters
        return place

    return [(bisect_right(tokens, begin, key=lambda number: characters(number)[1]),
             bisect_left(tokens, end, key=lambda number: characters(number)[0])) for begin, end in spans]


def _runs(piece: TextPiece, ids: list[int], counted: Sequence[Span]) -> Iterator[tuple[TextPiece, list[int]]]:
    """Yield the tokens of a chat in runs that count alike; the last one has the piece's size, and ends the document."""
    done = 0
    for first, last in counted:
        first = max(first, done)  # a token may overlap two spans
        yield replace(piece, counts=False, last=False, size=0, replaced=0), ids[done:first]
        yield replace(piece, counts=True, last=False, size=0, replaced=0), ids[first:last]
        done = max(first, last)
    yield replace(piece, counts=False), ids[done:]


def agreement(tail: Sequence[Token], head: Sequence[Token]) -> tuple[int, int] | None:
    """Return the places in ``tail`` and ``head`` at which to switch from one window to the next: the middle of the longest
    stretch in which both agree; None if they agree in fewer than ``SURE`` tokens."""
    places = {token: place for place, token in enumerate(head)}
    best = length = 0
    last, middle = -2, (0, 0)
    for number, token in enumerate(tail):
        place = places.get(token, -2)
        length = 0 if place < 0 else length + 1 if place == last + 1 else 1
        last = place
        if length > best:
            best, middle = length, (number - length // 2, place - length // 2)
    return middle if best >= SURE else None


def _from(tokens: Sequence[Token], position: int) -> int:
    """Return the number of the first token that begins at ``position`` or later."""
    return bisect_left(tokens, position, key=lambda token: token[0])


def _edges(encoding: tokenizers.Encoding, window: TextWindow) -> tuple[list[Token], list[Token]]:
    """Return the tokens that begin in the first and in the last characters of a window, as far as two neighbours may overlap."""
    ids, shared = encoding.ids, 2 * CONTEXT

    def at(number: int) -> Token:
        place = encoding.token_to_chars(number)
        assert place is not None  # only a template's tokens have no characters
        first, end = place
        return window.begin + first, window.begin + end, ids[number]

    early, late = window.begin + shared, window.begin + len(window.text) - shared
    head = itertools.takewhile(lambda token: token[0] < early, map(at, range(len(ids))))
    tail = itertools.takewhile(lambda token: token[0] >= late, map(at, reversed(range(len(ids)))))
    return list(head), list(tail)[::-1]


def _windows(stream: Iterable[TextPiece], apart: bool) -> Iterator[TextWindow]:
    pieces = iter(stream)
    piece = next(pieces, None)
    before, own, goes_on, some = "", 0, False, False
    while piece is not None:
        following = next(pieces, None)
        after = following.text[:CONTEXT] if piece.joined and following is not None else ""
        yield TextWindow(piece, before + piece.text + after, own - len(before), own, goes_on)
        some = (some or bool(piece.text)) and not piece.last and not apart
        before, own = (piece.text[-CONTEXT:], own + len(piece.text)) if piece.joined else ("", 0)
        goes_on = goes_on if piece.joined else some
        piece = following


def _batches(windows: Iterable[TextWindow], limit: int) -> Iterator[list[TextWindow]]:
    batch: list[TextWindow] = []
    size = 0
    for window in windows:
        batch.append(window)
        size += len(window.text)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def without_prefix(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer that puts nothing before a text."""
    document = json.loads(encoder.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        document[part] = _bare(document[part])
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def _bare(part: Any) -> Any:
    """Remove from a normalizer or pre-tokenizer of tokenizer.json everything that treats the beginning of a text specially."""
    if part is None or part["type"] == "Prepend":
        return None
    lists = {key: [remainder for child in part[key] if (remainder := _bare(child)) is not None]
             for key in ("normalizers", "pretokenizers") if key in part}
    changed = {"ByteLevel": {"add_prefix_space": False}, "Metaspace": {"prepend_scheme": "never"}}
    return part | lists | changed.get(part["type"], {})
