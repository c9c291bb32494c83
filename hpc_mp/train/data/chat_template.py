"""Chats to text by the tokenizer's template, with the characters whose tokens count in the loss.

Templates with ``{% generation %}`` mark what the assistant says. In others it is found by difference. The text up to an answer is
that of the earlier messages with the prompt for an answer; the text with the answer is that of the messages up to it. Both begin
the whole text, and the answer is between. Some templates break this, for example by dropping the thinking of earlier answers.
Then the answer is what changes in the whole text if another one is put in its place, with the end of the turn behind it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.chats import Chat, UnusableRow
from hpc_mp.job.tokenizer_files import missing_template

Span = tuple[int, int]  # the first character, and the one after the last
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]  # with the prompt for an answer behind the messages, if True
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
OTHERS = "¤#@"  # one of them is put in an answer's place: one that neither begins nor ends the answer
REMEDY = "correct the row, or name another template with data.template"


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat and the spans of characters whose tokens count in the loss, ascending."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    tokenizer: Any

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a chat. Raises UnusableRow if the template refuses it, or none of its characters counts."""
        source = str(self.tokenizer.get_chat_template(tools=_list(chat.tools)))
        if MARK.search(source) is None:
            text = self._text(source, chat)
            spans = spans_by_difference(lambda messages, prompt: self._text(
                source, replace(chat, messages=tuple(messages)), prompt), chat)
        else:
            text, marked = self._marked(source, chat)
            spans = _chosen(marked, chat)
        spans = tuple((begin, end) for begin, end in spans if end > begin)
        if not spans:
            raise UnusableRow("the chat template writes none of the assistant's turns: nothing would count in the loss", REMEDY)
        return RenderedChat(text, spans)

    def _text(self, source: str, chat: Chat, prompt: bool = False) -> str:
        return self._rendered(source, chat, add_generation_prompt=prompt)[0][0]

    def _marked(self, source: str, chat: Chat) -> tuple[str, list[Span]]:
        (text,), (spans,) = self._rendered(source, chat, return_assistant_tokens_mask=True)
        return text, spans

    def _rendered(self, source: str, chat: Chat, **options: bool) -> tuple[list[str], list[list[Span]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **chat.arguments}
        try:
            return render_jinja_template([[dict(message) for message in chat.messages]], tools=_list(chat.tools),
                                         chat_template=source, **options, **variables)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # templates index and add what they are given
            raise UnusableRow(f"the chat template refuses it: {' '.join(str(error).split())}", REMEDY) from None


@cache
def load_template(directory: Path, template: Path | None = None) -> ChatTemplate:
    """Return the chat template in a tokenizer's directory, as transformers reads it, or ``template`` in its place. Raises
    HpcMpError if there is none, or transformers cannot load the tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if template is not None:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
    except Exception as error:  # of many classes, one for each tokenizer class
        raise HpcMpError(f"tokenizer {directory}", f"its chat template cannot be used: transformers does not load it ({error})",
                         "save it again with save_pretrained, or name another directory") from None
    if not tokenizer.chat_template:
        raise missing_template(directory)
    return ChatTemplate(tokenizer)


def spans_by_difference(render: Render, chat: Chat) -> tuple[Span, ...]:
    """Return the spans of the turns that count, in the text of the whole chat. ``render``: writes messages as text, with the
    prompt for an answer behind them if its second argument is True."""
    whole = render(chat.messages, False)
    answers = [place for place, counts in enumerate(chat.counts) if counts]
    before = chat.messages[:answers[-1]]
    prompts = _rendered_if(render, before, True) != _rendered_if(render, before, False)  # the template knows such a prompt
    return tuple(_turn_span(render, chat.messages, place, whole, prompts) for place in answers)


def _turn_span(render: Render, messages: Messages, place: int, whole: str, prompts: bool) -> Span:
    """Return the span of one answer with the end of its turn."""
    prompt = _rendered_if(render, messages[:place], True) if prompts else ""
    text = whole if place + 1 == len(messages) else render(messages[:place + 1], False)
    words = _text_of(messages[place].get("content") or "").split()
    if prompt and whole.startswith(prompt) and whole.startswith(text) and words and not messages[place].get("tool_calls"):
        answer = whole[len(prompt):len(text)].rstrip()
        ends = answer.endswith(words[-1]) and _is_last(render, messages[:place + 1], text)
        return len(prompt), len(text) if ends else len(prompt) + len(answer)
    return _changed_span(render, messages, place, whole, prompt, text)


def _is_last(render: Render, messages: Messages, text: str) -> bool:
    """Return True if only white space is behind the last message: what its text ends with is no mark that ends alike, such as
    ``>`` in ``<|im_end|>``. So it is taken to be if the template refuses another answer."""
    other = _rendered_if(render, [*messages[:-1], _another(messages[-1])], False)
    return not text[_difference(text, other)[1]:].strip()


def _changed_span(render: Render, messages: Messages, place: int, whole: str, prompt: str, text: str) -> Span:
    """Return the span of an answer by another one in its place."""
    other = [*messages[:place], _another(messages[place]), *messages[place + 1:]]
    begin, content_end = _difference(whole, render(other, False))
    if begin == len(whole):  # the template leaves this turn out
        return begin, begin
    if prompt and whole.startswith(prompt):
        begin = len(prompt)
    if whole.startswith(text):
        return begin, _trimmed(whole, content_end, len(text))
    _, end = _difference(text, render(other[:place + 1], False))
    after = next((tail for tail in (text[end:], text[end:].rstrip()) if whole.startswith(tail, content_end)), "")
    return begin, _trimmed(whole, content_end, content_end + len(after))


def _rendered_if(render: Render, messages: Messages, prompt: bool) -> str:
    """Return the text of messages; empty if the template writes none of them alone, for example of no messages."""
    try:
        return render(messages, prompt)
    except UnusableRow:
        return ""


def _another(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose text differs in its first and in its last character."""
    content = message.get("content") or ""
    parts = isinstance(content, list)
    own = _text_of(content).strip()
    other = next(letter for letter in OTHERS if letter not in (own[:1], own[-1:]))
    return {**message, "content": [{"type": "text", "text": other}] if parts else other}


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _difference(text: str, other: str) -> Span:
    """Return the span of a text outside of which it is the other one."""
    begin = _alike(text, other)
    return begin, len(text) - _alike(text[begin:][::-1], other[begin:][::-1])


def _alike(text: str, other: str) -> int:
    """Return how many characters two texts have alike at their beginning."""
    return bisect_left(range(1, min(len(text), len(other)) + 1), True, key=lambda size: text[:size] != other[:size])


def _trimmed(text: str, content_end: int, end: int) -> int:
    """Return the end of a turn without the white space behind its last mark: a model stops with that mark."""
    mark = text[content_end:end].rstrip()
    return content_end + len(mark) if mark else end


def _chosen(spans: Sequence[Span], chat: Chat) -> tuple[Span, ...]:
    """Return the marked spans of the turns that count."""
    answers = [counts for message, counts in zip(chat.messages, chat.counts, strict=True) if message["role"] == "assistant"]
    if all(answers):
        return tuple(spans)
    if len(spans) != len(answers):
        raise UnusableRow(f"the chat template marks {len(spans)} parts of {len(answers)} turns of the assistant, so that it is "
                          "unknown which belong to a turn that does not count", REMEDY)
    return tuple(span for span, counts in zip(spans, answers, strict=True) if counts)


def _list(tools: Sequence[Any] | None) -> list[Any] | None:
    return None if tools is None else [*tools]
