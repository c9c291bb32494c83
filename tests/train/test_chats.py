"""Chats to tokens: equal to what transformers makes of them and, for templates without marks, to masks made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import TEMPLATES, by_hand, by_transformers, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import prepared, write

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.chats import Chat, UnusableRow, of_messages
from hpc_mp.train.data import TokenSet
from hpc_mp.train.data.chat_template import ChatTemplate, load_template, spans_by_difference

MARKED = ("chatml_marked", "llama3_marked")


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    said = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *said] if system else said


TALK = turns("What is it?", "It is 21 degrees.", "\n And in Paris? ", "  sunny\n")
CHATS = [{"messages": TALK}, {"messages": turns("Hi", "naïve 漢字 🙂", system="You are brief.")},
         {"messages": turns("a", "\n\nb\n\n", "c")}, {"messages": [*turns("a", "b"), {"role": "assistant", "content": "c"}]},
         {"messages": turns("<|im_end|>", "<think>\nhm\n</think>\n\nyes")}]


def tokens_of(tmp_path: Path, tokenizer: Path, *rows: dict[str, Any], **more: Any) -> TokenSet:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return prepared(tmp_path / "cache", write(tmp_path / "rows.jsonl", lines), given=tokenizer, vocabulary=500, **more)


def assert_equal(token_set: TokenSet, expected: tuple[list[int], list[int]]) -> None:
    loss = token_set.loss()
    assert loss is not None and token_set.tokens().tolist() == expected[0] and loss.tolist() == expected[1]
    assert 0 < sum(expected[1]) < len(expected[1])


@pytest.mark.parametrize("template", MARKED)
def test_templates_with_marks(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template)
    token_set = tokens_of(tmp_path, tokenizer, *CHATS)
    assert_equal(token_set, by_transformers(tokenizer, CHATS))
    assert len(token_set.documents()) == len(CHATS) and token_set.documents()[0] == 0
    unmarked = chat_tokenizer(tmp_path / "unmarked", template.removesuffix("_marked"))
    assert_equal(tokens_of(tmp_path, unmarked, *CHATS), by_transformers(tokenizer, CHATS))  # by difference, the same


# By template: chats, and the parts of their texts by hand.
THOUGHT = "<think>\nhm\n</think>\n\nyes"
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
BY_HAND: dict[str, list[tuple[dict[str, Any], list[tuple[str, int]]]]] = {
    "qwen3": [
        ({"messages": turns("Hi", THOUGHT, "And?", THOUGHT)},
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), ("yes<|im_end|>", 1),
          ("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", 0), (f"{THOUGHT}<|im_end|>", 1), ("\n", 0)]),
        ({"messages": [*turns("Hi"), {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]},
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), (f"{THOUGHT}<|im_end|>", 1), ("\n", 0)]),
        ({"messages": [*turns("Hi"), {"role": "assistant", "content": None, "tool_calls": CALL},
                       {"role": "tool", "content": "21"}, {"role": "assistant", "content": "21 degrees"}],
          "tools": [{"type": "function", "function": {"name": "weather"}}]},
         [('<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "weather"}}\n<|im_end|>\n'
           "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
          ('\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>', 1),
          ("\n<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
          ("<think>\n\n</think>\n\n21 degrees<|im_end|>", 1), ("\n", 0)]),
        ({"messages": turns("Hi", "yes"), "chat_template_kwargs": {"enable_thinking": False}},  # its prompt has the block
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", 0),
          ("yes<|im_end|>", 1), ("\n", 0)]),
    ],
    "deepseek": [
        ({"messages": turns("Hi", f"{THOUGHT}", "And?", "<thus>", system="Be brief.")},
         [("<s>Be brief.<|User|>Hi<|Assistant|>", 0), ("\n\nyes</s>", 1), ("<|User|>And?<|Assistant|>", 0), ("<thus></s>", 1)]),
    ],
    "mistral": [
        ({"messages": turns("Hi", "yes", "And?", "no", system="Be brief.")},
         [("<s>[INST] Hi [/INST] ", 0), ("yes</s>", 1), ("[INST] Be brief.\n\nAnd? [/INST] ", 0), ("no</s>", 1)]),
    ],
    "plain": [
        ({"messages": turns("Hi", "yes", "And?", "no ")},
         [("user: Hi\nassistant: ", 0), ("yes\n", 1), ("user: And?\nassistant: ", 0), ("no \n", 1)]),
    ],
    "llama3": [
        ({"messages": turns("Hi", "  yes\n", "And?", "\nno")},
         [("<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
          ("yes<|eot_id|>", 1), ("<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant"
                                 "<|end_header_id|>\n\n", 0), ("no<|eot_id|>", 1)]),
    ],
    "chatml": [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one", "weight": 0},
                       {"role": "user", "content": "And?"}, {"role": "assistant", "content": "two", "weight": 1}]},
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
           "<|im_start|>assistant\n", 0), ("two<|im_end|>", 1), ("\n", 0)]),
        ({"messages": turns("Hi", "¤#")},
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), ("¤#<|im_end|>", 1), ("\n", 0)]),
        ({"messages": turns("Hi", "a |>")},  # the mark behind it ends alike
         [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), ("a |><|im_end|>", 1), ("\n", 0)]),
    ],
}


@pytest.mark.parametrize("template", BY_HAND)
def test_templates_without_marks(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template)
    chats, parts = zip(*BY_HAND[template], strict=True)
    assert_equal(tokens_of(tmp_path, tokenizer, *chats), by_hand(tokenizer, chats, parts))


def test_a_template_may_refuse_other_answers() -> None:
    """Those with which an answer is compared: then it counts with the line break behind it, as in any template without marks."""
    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        if any(message["content"] in "¤#@" for message in messages):
            raise UnusableRow("unknown answer", "")
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: " * prompt

    assert spans_by_difference(render, of_messages({"messages": turns("Hi", "yes")})) == ((20, 24),)


def test_weights_of_turns_with_marks(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "chatml_marked")
    (weighted, parts), *_ = BY_HAND["chatml"]
    assert_equal(tokens_of(tmp_path, tokenizer, weighted), by_hand(tokenizer, [weighted], [parts]))


def test_prompts_and_completions_of_messages(tmp_path: Path) -> None:
    """As in TRL: answers in the prompt do not count."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "chatml")
    (weighted, parts), *_ = BY_HAND["chatml"]
    messages = [{key: turn[key] for key in ("role", "content")} for turn in weighted["messages"]]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert_equal(tokens_of(tmp_path, tokenizer, row), by_hand(tokenizer, [{"messages": messages}], [parts]))


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.text("ab \n<>#¤é", min_size=1).filter(str.strip), min_size=2, max_size=7), system=st.booleans())
def test_any_chat_by_difference_is_as_marked(tmp_path_factory: pytest.TempPathFactory, contents: list[str], system: bool) -> None:
    chat = of_messages({"messages": turns(*contents, system="Be brief." if system else None)})
    base = tmp_path_factory.getbasetemp() / "by difference"
    for marked in MARKED:
        templates = [load_template(directory if directory.exists() else chat_tokenizer(directory, name))
                     for name in (marked, marked.removesuffix("_marked")) for directory in [base / name]]
        assert templates[0].render(chat) == templates[1].render(chat)


@pytest.mark.parametrize("fault", ["a mark that is not there", "the prompt counts", "no end of a turn"])
def test_spoilt_masks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Negative control of the tests above."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "chatml")
    spoilt = {"a mark that is not there": lambda render, chat: (),
              "the prompt counts": lambda render, chat: ((0, len(render(chat.messages, False))),),
              "no end of a turn": lambda render, chat: tuple((begin, end - len("<|im_end|>")) for begin, end in
                                                             spans_by_difference(render, chat))}[fault]
    monkeypatch.setattr("hpc_mp.train.data.chat_template.spans_by_difference", spoilt)
    marked = chat_tokenizer(tmp_path / "marked", "chatml_marked")
    with pytest.raises((AssertionError, HpcMpError)):
        assert_equal(tokens_of(tmp_path, tokenizer, *CHATS), by_transformers(marked, CHATS))


# --- which template --------------------------------------------------------------------------------------------------

def test_a_template_of_the_jobs_own(tmp_path: Path) -> None:
    """It takes the place of the tokenizer's, and the kept tokenizer has it, by which the model is exported."""
    from hpc_mp.train.data.documents import DocumentReading

    tokenizer, llama = chat_tokenizer(tmp_path / "tokenizer", "chatml"), chat_tokenizer(tmp_path / "llama", "llama3")
    given_template = DocumentReading(template=TEMPLATES / "llama3.jinja")
    own, other = tokens_of(tmp_path, tokenizer, *CHATS), tokens_of(tmp_path, tokenizer, *CHATS, reading=given_template)
    assert own.directory != other.directory and own.tokens().tolist() != other.tokens().tolist()
    assert other.tokens().tolist() == tokens_of(tmp_path, llama, *CHATS).tokens().tolist()
    kept = load_template(other.tokenizer_directory)
    assert isinstance(kept, ChatTemplate) and kept.tokenizer.chat_template == (TEMPLATES / "llama3.jinja").read_text()


def test_chats_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match="has no chat template") as caught:
        tokens_of(tmp_path, chat_tokenizer(tmp_path / "tokenizer", None), *CHATS)
    assert "data.template" in caught.value.remedy


def test_no_end_is_written_behind_a_chat(tmp_path: Path) -> None:
    """The template writes the ends of turns; a text among chats has the tokenizer's end."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "chatml")
    token_set = tokens_of(tmp_path, tokenizer, CHATS[0], {"text": "text"})
    ends = [place for place, token in enumerate(token_set.tokens().tolist()) if token == 1]
    assert ends == [token_set.count - 1] and len(token_set.documents()) == 2


def test_chats_that_a_template_leaves_out_are_refused() -> None:
    chat = Chat(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), (False, True))
    assert spans_by_difference(lambda messages, prompt: "a", chat) == ((1, 1),)  # nothing of it
