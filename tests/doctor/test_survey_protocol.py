"""Messages through srun, which cuts long lines and mixes those of several tasks."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.doctor.survey.agents import Joiner, Message, encode, pieces

texts = st.text(max_size=3000)


@given(st.lists(st.dictionaries(texts, texts, max_size=4), min_size=1, max_size=5), st.randoms())
def test_messages_survive_srun(messages: list[Message], dice: random.Random) -> None:
    waiting = {rank: [*pieces(rank, message)] for rank, message in enumerate(messages)}
    joiner, heard = Joiner(), {}
    while waiting:
        rank = dice.choice([*waiting])
        line = waiting[rank].pop(0)
        assert line.endswith("\n") and line.count("\n") == 1 and len(line.encode()) < 1024
        if not waiting[rank]:
            del waiting[rank]
        whole = joiner.add(line)
        assert joiner.add("a prolog says hello\n") is None
        if whole:
            heard[whole[0]] = whole[1]
    assert heard == dict(enumerate(messages))


@given(texts)
def test_words_of_others_are_no_messages(line: str) -> None:
    joiner = Joiner()
    for word in line.splitlines() or [""]:
        assert joiner.add(word) is None


def test_a_torn_message_is_dropped() -> None:
    first, *_ = pieces(3, {"id": 1, "long": "x" * 2000})
    joiner = Joiner()
    assert joiner.add(first) is None
    assert joiner.add("hpc-mp-survey 3 .!") is None
    assert joiner.add(next(pieces(3, {"id": 2}))) == (3, {"id": 2})


def test_an_order_is_one_line() -> None:
    assert json.loads(encode({"do": "x", "pairs": [[0, 1]]})) == {"do": "x", "pairs": [[0, 1]]}
    assert encode({"text": "a\nb"}).count("\n") == 1
