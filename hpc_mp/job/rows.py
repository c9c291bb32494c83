"""Rows of JSON Lines files: the accepted contents, and remedies for rows in the formats of other tools."""

import json
from collections.abc import Collection
from typing import Any

SHAPES = '{"text": "…"} or {"prompt": "…", "completion": "…"}'
WRITE = f"write {SHAPES} on each line"

# The keys of rows of other tools: the kind of row, and its form here. The first match counts.
ELSEWHERE: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"messages"}), "a chat",
     "apply the model's chat template: write all turns before an answer as prompt and the answer as completion"),
    (frozenset({"conversations"}), "a chat",
     "apply the model's chat template: write all turns before an answer as prompt and the answer as completion"),
    (frozenset({"chosen", "rejected"}), "a pair of answers for preference training, which is not supported",
     "write {\"prompt\": \"…\", \"completion\": \"…\"} with the chosen answer"),
    (frozenset({"instruction", "output"}), "an instruction with its output",
     "convert it: jq -c '{prompt: (.instruction + \"\\n\" + (.input // \"\") + \"\\n\"), completion: .output}' OLD.jsonl > "
     "NEW.jsonl"),
    *((frozenset({question, answer}), f"{question} and {answer}",
       f"rename these keys: jq -c '{{prompt: .{question}, completion: .{answer}}}' OLD.jsonl > NEW.jsonl")
      for question, answer in (("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "response"),
                               ("input", "output"), ("question", "answer"), ("query", "response"), ("source", "target"))),
    *((frozenset({key}), f"a text under {key}", f"rename the key: jq -c '{{text: .{key}}}' OLD.jsonl > NEW.jsonl")
      for key in ("content", "body", "document")),
    (frozenset({"input_ids"}), "tokens",
     "write the text from which they were made, as {\"text\": \"…\"}: hpc-mp makes the tokens"),
)


class UnusableRow(ValueError):
    """A line that is not a training row; ``remedy`` describes the expected form."""

    def __init__(self, reason: str, remedy: str = WRITE) -> None:
        super().__init__(reason)
        self.remedy = remedy


def row_parts(line: bytes) -> list[tuple[str, bool]]:
    """Return a row's texts, each with True if it counts in the loss. A row is ``{"text": …}``, or a prompt, which does not count,
    with its completion. Other keys are ignored. Raises UnusableRow if it is another kind of row, or not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UnusableRow(reason) from None
    match row:
        case {"text": _, "prompt": _} | {"text": _, "completion": _}:
            raise UnusableRow("it holds both a text and a prompt or completion")
        case {"text": str(text)}:
            return [(text, True)]
        case {"prompt": str(prompt), "completion": str(completion)}:
            return [(prompt, False), (completion, True)]
        case dict():
            raise _of_another_shape(row)
    raise UnusableRow("it holds neither a text nor a prompt and a completion, as strings")


def known_keys(row: Collection[str]) -> bool:
    """Return True if these are the keys of a training row, hpc-mp's or another tool's, and not of unrelated JSON."""
    keys = set(row)
    return keys in ({"text"}, {"prompt", "completion"}) or any(shape <= keys for shape, _, _ in ELSEWHERE)


def _of_another_shape(row: dict[str, Any]) -> UnusableRow:
    """Return the error for an object that is not a training row."""
    for key in ("text", "prompt", "completion"):
        if not isinstance(row.get(key, ""), str):
            kind = "a chat" if isinstance(row[key], list) and all(isinstance(turn, dict) for turn in row[key]) else "not a string"
            return UnusableRow(f"its {key} is {kind}",
                               f"write the {key} as one string, with the turns of a chat in the model's chat template")
    for shape, description, remedy in ELSEWHERE:
        if shape <= row.keys():
            return UnusableRow(f"it holds {description}, not a text or a prompt and a completion", remedy)
    keys = ", ".join(map(repr, list(row)[:8])) or "nothing"
    return UnusableRow(f"it holds {keys}, but neither a text nor a prompt and a completion, as strings")
