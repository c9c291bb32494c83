"""Rows of data files: the accepted contents, and remedies for rows in the formats of other tools."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_mp.base.text import shown
from hpc_mp.job.chats import Chat, UnusableRow, of_alpaca, of_messages, of_prompt, of_sharegpt

SHAPES = '{"text": "…"}, {"prompt": "…", "completion": "…"} or {"messages": [{"role": "…", "content": "…"}, …]}'
WRITE = f"write {SHAPES} on each line"

Form = Literal["auto", "text", "prompt", "messages", "sharegpt", "alpaca"]
Texts = tuple[tuple[str, bool], ...]  # each with True if it counts in the loss


@dataclass(frozen=True, slots=True)
class Example:
    """A text or a pair of texts with the number of its class. ``limit``: tokens at which it is cut off."""

    texts: tuple[str, ...]
    label: int
    limit: int


@dataclass(frozen=True, slots=True)
class Labelled:
    """The reading of rows for classification: ``data.text``, ``data.label``, ``data.labels`` and ``data.sequence_length``."""

    texts: tuple[str, ...]
    label: str
    names: tuple[str, ...]
    limit: int

    def example(self, row: Mapping[str, Any]) -> Example:
        """Return the example of a row. Raises UnusableRow."""
        for key in self.texts:
            if not isinstance(row.get(key), str):
                raise UnusableRow(f"its {key} is {'not a string' if key in row else 'missing'}", "name the keys in data.text")
        value, numbers = str(row.get(self.label)), [f"{number}" for number in range(len(self.names))]
        names = self.names if value in self.names or any(map(str.isdecimal, self.names)) else numbers  # a name is no number
        if value not in names:
            raise UnusableRow(f"its {self.label} is {shown(row.get(self.label))}, which is none of the classes "
                              f"{', '.join(self.names)}, and no number of one", "name the key in data.label, all in data.labels")
        return Example(tuple(str(row[key]) for key in self.texts), names.index(value), self.limit)


Content = Texts | Chat | Example
RowForm = Form | Labelled

# The keys of rows of other tools: the kind of row, and its form here. The first match counts.
ELSEWHERE: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"conversations"}), "a chat of ShareGPT", 'set data.format = "sharegpt"'),
    (frozenset({"chosen", "rejected"}), "a pair of answers for preference training, which is not supported",
     "write {\"prompt\": \"…\", \"completion\": \"…\"} with the chosen answer"),
    (frozenset({"instruction", "output"}), "an instruction with its output", 'set data.format = "alpaca"'),
    *((frozenset({question, answer}), f"{question} and {answer}",
       f"rename these keys: jq -c '{{prompt: .{question}, completion: .{answer}}}' OLD.jsonl > NEW.jsonl")
      for question, answer in (("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "response"),
                               ("input", "output"), ("question", "answer"), ("query", "response"), ("source", "target"))),
    *((frozenset({key}), f"a text under {key}", f"rename the key: jq -c '{{text: .{key}}}' OLD.jsonl > NEW.jsonl")
      for key in ("content", "body", "document")),
    (frozenset({"input_ids"}), "tokens",
     "write the text from which they were made, as {\"text\": \"…\"}: hpc-mp makes the tokens"),
)


def _text(row: Mapping[str, Any]) -> Content:
    if not isinstance(text := row.get("text"), str):
        raise UnusableRow(f"its text is {'not a string' if 'text' in row else 'missing'}", WRITE)
    return ((text, True),)


# The contents of rows by ``data.format``. Keys that a format does not name are ignored.
READERS: dict[Form, Callable[[Mapping[str, Any]], Content]] = {
    "text": _text, "prompt": of_prompt, "messages": of_messages, "sharegpt": of_sharegpt, "alpaca": of_alpaca}
# The keys by which "auto" knows a row. Rows of ShareGPT and Alpaca are told by ``data.format`` alone: their keys have other uses.
BY_KEYS: dict[Form, frozenset[str]] = {
    "text": frozenset({"text"}), "prompt": frozenset({"prompt", "completion"}), "messages": frozenset({"messages"})}
COLUMNS = frozenset({"text", "prompt", "completion", "messages", "tools", "chat_template_kwargs", "conversations", "system",
                     "instruction", "input", "output", "history"})  # all that the formats read


def columns_of(form: RowForm) -> frozenset[str]:
    """Return the keys of rows that are read."""
    return frozenset((*form.texts, form.label)) if isinstance(form, Labelled) else COLUMNS


def row_content(row: bytes | Mapping[str, Any], form: RowForm = "auto") -> Content:
    """Return the texts of a row, or its chat. A prompt does not count in the loss, its completion does. ``row``: a line of JSON,
    or a row of a table. ``form``: ``data.format``; "auto": by the row's keys. Raises UnusableRow if it is another kind of row, or
    not a row."""
    entries = _parsed(row) if isinstance(row, bytes) else row
    if not isinstance(entries, Mapping):
        raise UnusableRow("it is no object with keys" if form != "auto" else
                          "it holds neither a text nor a prompt and a completion, as strings, nor messages", WRITE)
    if isinstance(form, Labelled):
        return form.example(entries)
    return READERS[_form_of(entries) if form == "auto" else form](entries)


def known_keys(row: Collection[str]) -> bool:
    """Return True if these are the keys of a training row, hpc-mp's or another tool's, and not of unrelated JSON."""
    keys = set(row)
    return (keys in ({"text"}, {"prompt", "completion"}) or "messages" in keys
            or any(shape <= keys for shape, _, _ in ELSEWHERE))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UnusableRow(reason, WRITE) from None


def _form_of(row: Mapping[str, Any]) -> Form:
    """Return the format that the keys of a row name. Raises UnusableRow if they name none, or several."""
    parts = {form: keys & row.keys() for form, keys in BY_KEYS.items()}
    if parts["text"] and parts["prompt"]:
        raise UnusableRow("it holds both a text and a prompt or completion", f'{WRITE}, or set data.format = "text" or "prompt"')
    if parts["messages"] and (parts["text"] or parts["prompt"]):
        other = min(parts["text"] | parts["prompt"])
        raise UnusableRow(f"it holds both messages and a {other}", 'set data.format = "messages" to train on the messages alone, '
                          'or "text" or "prompt" to leave them out')
    for form, keys in BY_KEYS.items():
        if keys <= row.keys():
            return form
    raise _of_another_shape(row)


def _of_another_shape(row: Mapping[str, Any]) -> UnusableRow:
    """Return the error for an object that is not a training row."""
    for shape, description, remedy in ELSEWHERE:
        if shape <= row.keys():
            return UnusableRow(f"it holds {description}, not a text or a prompt and a completion", f"{remedy}; rows are {SHAPES}")
    keys = ", ".join(map(repr, list(row)[:8])) or "nothing"
    return UnusableRow(f"it holds {keys}, but neither a text nor a prompt and a completion, nor messages", WRITE)
