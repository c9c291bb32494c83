"""Rows as they are found: chats, ShareGPT, Alpaca and TRL's prompts in one form, and what is wrong with others."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpc_mp.job.chats import Chat, UnusableRow
from hpc_mp.job.rows import Form, row_content

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"name": "weather", "arguments": {"city": "Paris"}}


def chat(*messages: dict[str, Any], counts: tuple[int, ...], **more: Any) -> Chat:
    return Chat(messages, tuple(map(bool, counts)), **more)


@pytest.mark.parametrize(("form", "row", "content"), [
    ("auto", {"text": "x", "id": 1}, (("x", True),)),
    ("auto", {"prompt": "x", "completion": "y"}, (("x", False), ("y", True))),
    ("auto", {"messages": HI, "prompt_id": "7", "source": "web"}, chat(*HI, counts=(0, 1))),
    ("messages", {"messages": HI, "prompt": "Hi", "text": "x"}, chat(*HI, counts=(0, 1))),
    ("text", {"messages": HI, "text": "x"}, (("x", True),)),
    ("prompt", {"messages": HI, "prompt": "x", "completion": "y"}, (("x", False), ("y", True))),
    ("auto", {"prompt": HI, "completion": HI}, chat(*HI, *HI, counts=(0, 0, 0, 1))),
    ("auto", {"messages": [{**HI[0], "name": None}, {**HI[1], "weight": 1}], "tools": None}, chat(*HI, counts=(0, 1))),
    ("auto", {"messages": HI, "tools": json.dumps([CALL]), "chat_template_kwargs": {"thinking": True}},
     chat(*HI, counts=(0, 1), tools=(CALL,), arguments={"thinking": True})),
    ("auto", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HI[1]]},
     chat({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HI[1], counts=(0, 1))),
    ("auto", {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}]},
     chat(HI[0], {"role": "assistant", "tool_calls": [CALL]}, counts=(0, 1))),
    ("sharegpt", {"id": "x_0", "system": "Be brief.", "conversations": [
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
     chat({"role": "system", "content": "Be brief."}, *HI, counts=(0, 0, 1))),
    ("sharegpt", {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"},
                                    {"from": "chatgpt", "value": "Hello", "markdown": None, "weight": 0},
                                    {"from": "human", "value": "Hi"},
                                    {"from": "gpt", "value": "Hello"}]},
     chat({"role": "system", "content": "Be brief."}, *HI, *HI, counts=(0, 0, 0, 0, 1))),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(CALL)},
                                    {"from": "observation", "value": "21"}, {"from": "gpt", "value": "Hello"}],
                  "tools": json.dumps([{"name": "weather"}])},
     chat(HI[0], {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
          {"role": "tool", "content": "21"}, HI[1], counts=(0, 1, 0, 1), tools=({"name": "weather"},))),
    ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"}, chat(*HI, counts=(0, 1))),
    ("alpaca", {"instruction": "Hi", "output": "Hello", "text": "Below is …"}, chat(*HI, counts=(0, 1))),
    ("alpaca", {"instruction": "Add.", "input": "1 + 1", "output": "Hello", "system": "Be brief.", "history": [["Hi", "Hello"]]},
     chat({"role": "system", "content": "Be brief."}, *HI, {"role": "user", "content": "Add.\n1 + 1"}, HI[1],
          counts=(0, 0, 1, 0, 1))),
])
def test_rows(form: Form, row: dict[str, Any], content: object) -> None:
    assert row_content(row, form) == content == row_content(json.dumps(row).encode(), form)


# What is wrong = [data.format, the row, the reason, a part of the remedy].
WRONG: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("unusable_rows.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("wrong", WRONG)
def test_unusable_rows(wrong: str) -> None:
    form, row, reason, remedy = WRONG[wrong]
    with pytest.raises(UnusableRow) as caught:
        row_content(row.encode(), form)  # type: ignore[arg-type]
    assert str(caught.value) == reason and remedy in caught.value.remedy
