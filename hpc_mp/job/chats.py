"""Chats: the rows of ``messages``, ShareGPT and Alpaca in one form, checked before a template sees them.

A template renders nearly anything: of a turn with a misspelt role or without an answer it makes text on which a model is trained
wrongly, or on nothing. Such rows are refused here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_mp.base.text import shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "environment", "document", "context")
# Names of speakers in rows of ShareGPT.
SPEAKERS = {**dict.fromkeys(("human", "user"), "user"), "system": "system",
            **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
            **dict.fromkeys(("tool", "observation", "function_response"), "tool"), "function_call": "function_call"}
MESSAGES = 'write {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
SHAREGPT = 'write {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
ALPACA = 'write {"instruction": "…", "input": "…", "output": "…"}'
PROMPT = 'write {"prompt": "…", "completion": "…"}'


class UnusableRow(ValueError):
    """A row that cannot be trained on; ``remedy`` describes the expected form."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a chat template takes it."""

    messages: tuple[Mapping[str, Any], ...]  # each with ``role``, ``content`` and whatever else the template reads
    counts: tuple[bool, ...]  # for each message True if its tokens count in the loss; only the assistant's do
    tools: tuple[Any, ...] | None = None  # descriptions of functions; None if there are none
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template


def of_messages(row: Mapping[str, Any]) -> Chat:
    """Return the chat of ``{"messages": […]}``. ``tools`` and ``chat_template_kwargs`` are the template's, as in TRL. Raises
    UnusableRow."""
    return _chat("messages", row.get("messages"), row)


def of_prompt(row: Mapping[str, Any]) -> Chat | tuple[tuple[str, bool], ...]:
    """Return a prompt with its completion: two strings, or two lists of messages, as in TRL. Raises UnusableRow."""
    prompt, completion = row.get("prompt"), row.get("completion")
    match prompt, completion:
        case str(), str():
            return (prompt, False), (completion, True)
        case list(), list():
            chat = _chat("prompt and completion", [*prompt, *completion], row)
            counts = tuple(counts and place >= len(prompt) for place, counts in enumerate(chat.counts))
            return _counted(Chat(chat.messages, counts, chat.tools, chat.arguments))
    name, value = next(((name, value) for name, value in (("prompt", prompt), ("completion", completion))
                        if not isinstance(value, str)), ("completion", completion))
    kind = ("missing" if value is None else "a chat" if isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
            else "not a string")
    raise UnusableRow(f"its {name} is {kind}", f"{PROMPT}: both as one string, or both as lists of messages")


def of_sharegpt(row: Mapping[str, Any]) -> Chat:
    """Return the chat of ``{"conversations": [{"from": …, "value": …}, …]}``, with its ``system`` and ``tools``. Raises
    UnusableRow."""
    turns = _turns("conversations", row.get("conversations"), SHAREGPT)
    messages: list[dict[str, Any]] = _system(row, SHAREGPT)
    for place, turn in enumerate(turns):
        name = f"conversations[{place}]"
        speaker, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or (role := SPEAKERS.get(speaker)) is None:
            raise UnusableRow(f"its {name}.from is {shown(speaker)}", f"use one of {', '.join(SPEAKERS)}")
        if not isinstance(value, str):
            raise UnusableRow(f"its {name}.value is {shown(value)}, not a string", SHAREGPT)
        message = _called(name, value) if role == "function_call" else {"role": role, "content": value}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return _chat("conversations", messages, row, SHAREGPT)


def of_alpaca(row: Mapping[str, Any]) -> Chat:
    """Return an instruction, below it ``input`` if there is one, as the user's turn, and ``output`` as the answer; ``system`` and
    the pairs of ``history`` stand before. Raises UnusableRow."""
    messages = _system(row, ALPACA)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise UnusableRow(f"its history is {shown(history)}, not a list of pairs", 'write "history": [["…", "…"], …]')
    for place, pair in enumerate(history):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text.strip() for text in pair)):
            raise UnusableRow(f"its history[{place}] is {shown(pair)}, not an instruction and its answer",
                              'write "history": [["…", "…"], …]')
        messages += ({"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]})
    texts = {}
    for name in ("instruction", "input", "output"):
        text = row.get(name, "" if name == "input" else None)
        if name == "input" and text is None:
            text = ""
        if not isinstance(text, str):
            raise UnusableRow(f"its {name} is {'missing' if text is None else f'{shown(text)}, not a string'}", ALPACA)
        texts[name] = text
    question = f"{texts['instruction']}\n{texts['input']}" if texts["input"] else texts["instruction"]
    if not question.strip():
        raise UnusableRow("its instruction and input are empty", ALPACA)
    if not texts["output"].strip():
        raise UnusableRow("its output is empty: the assistant answers nothing", "add the answer, or take the row out")
    messages += ({"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]})
    return _chat("output", messages, row, ALPACA)


def _system(row: Mapping[str, Any], remedy: str) -> list[dict[str, Any]]:
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise UnusableRow(f"its system is {shown(system)}, not a string", remedy)
    return [{"role": "system", "content": system}] if system else []


def _called(name: str, value: str) -> dict[str, Any]:
    """Return an assistant's message with the call that a turn of ``function_call`` holds as JSON."""
    try:
        calls = json.loads(value)
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UnusableRow(f"its {name}.value is {shown(value)}, not a call",
                          'write it as "{\\"name\\": \\"…\\", \\"arguments\\": {…}}"')
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _turns(name: str, turns: Any, remedy: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(turns, list):
        raise UnusableRow(f"its {name} is {'missing' if turns is None else f'{shown(turns)}, not a list'}", remedy)
    if not turns:
        raise UnusableRow(f"its {name} is empty", remedy)
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise UnusableRow(f"its {name}[{place}] is {shown(turn)}, not an object", remedy)
    return turns


def _chat(name: str, messages: Any, row: Mapping[str, Any], remedy: str = MESSAGES) -> Chat:
    """Return the chat of a row after a check of each of its messages."""
    turns = _turns(name, messages, remedy)
    checked: list[Mapping[str, Any]] = []
    counts = []
    for place, turn in enumerate(turns):
        where = f"{name}[{place}]"
        role = turn.get("role")
        if role not in ROLES:
            hint = '; set data.format = "sharegpt"' if role is None and "from" in turn else ""
            raise UnusableRow(f"its {where}.role is {'missing' if role is None else shown(role)}",
                              f"use one of {', '.join(ROLES)}{hint}")
        calls = _checked_calls(where, turn, remedy)
        weight = turn.get("weight")
        if weight not in (None, 0, 1):
            raise UnusableRow(f"its {where}.weight is {shown(weight)}", "write 1, or 0 for a turn that does not count")
        checked.append({key: value for key, value in turn.items() if key not in ("weight", "tool_calls") and value is not None}
                    | ({"tool_calls": [*calls]} if calls else {}))
        counts.append(role == "assistant" and weight != 0)
    tools = _list_of("tools", row.get("tools"))
    arguments = row.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise UnusableRow(f"its chat_template_kwargs is {shown(arguments)}, not an object", remedy)
    return _counted(Chat(tuple(checked), tuple(counts), tools, dict(arguments)))


def _counted(chat: Chat) -> Chat:
    if not any(chat.counts):
        answers = any(turn["role"] == "assistant" for turn in chat.messages)
        raise UnusableRow(("every turn of the assistant has a weight of 0 or is in the prompt" if answers else
                           "it has no turn of the assistant") + ": nothing would count in the loss",
                          "add the answer, or take the row out")
    return chat


def _checked_calls(where: str, turn: Mapping[str, Any], remedy: str) -> tuple[Any, ...] | None:
    """Return the calls of a message, after a check of its content. Raises UnusableRow."""
    content = turn.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise UnusableRow(f"its {where}.content[{place}] is {shown(kind)}, not a text",
                                  'write parts {"type": "text", "text": "…"}: a language model is trained on text alone')
        text = "".join(part["text"] for part in content)
    elif content is None or isinstance(content, str):
        text = content or ""
    else:
        raise UnusableRow(f"its {where}.content is {shown(content)}, not a string", remedy)
    calls = _list_of(f"{where}.tool_calls", turn.get("tool_calls"))
    if turn["role"] == "assistant" and not text.strip() and not calls:
        raise UnusableRow(f"its {where}.content is {'missing' if content is None else 'empty'}: the assistant answers nothing",
                          "add the answer, or take the row out")
    if content is None and not calls:
        raise UnusableRow(f"its {where}.content is missing", remedy)
    return calls


def _list_of(name: str, value: Any) -> tuple[Any, ...] | None:
    """Return a list that may be written as JSON in a string, as in tables whose rows differ; None if it is empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UnusableRow(f"its {name} is {shown(value)}, not JSON", f"write {name} as a list") from None
    if value is None or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise UnusableRow(f"its {name} is {shown(value)}, not a list of objects", f"write {name} as a list")
    return tuple(value) or None
