"""Prefix keys: the same for router and worker, shared by prompts that begin alike, few even for long prompts."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire.prefix import FIRST_STEP, STEP_SHARE, beginnings, keys_of

message = st.binary(min_size=1, max_size=700)


def fields(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(body).encode(), type=dict[str, msgspec.Raw])


@given(st.lists(message, max_size=20), st.lists(message, max_size=5))
def test_a_longer_conversation_keeps_all_keys(begun: list[bytes], more: list[bytes]) -> None:
    assert keys_of([*begun, *more])[: len(keys_of(begun))] == keys_of(begun)


@given(st.lists(message, min_size=1, max_size=12), st.data())
def test_a_changed_byte_changes_every_key_from_there_on(messages: list[bytes], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(messages) - 1))
    at = data.draw(st.integers(0, len(messages[which]) - 1))
    changed = list(messages)
    changed[which] = messages[which][:at] + bytes([messages[which][at] ^ 1]) + messages[which][at + 1 :]
    position = sum(map(len, messages[:which])) + at
    for before, after in zip(keys_of(messages), keys_of(changed), strict=True):
        assert (before == after) == (before.end <= position)


@given(st.lists(st.binary(min_size=1, max_size=40_000), max_size=40))
def test_keys_are_few_and_dense(messages: list[bytes]) -> None:
    keys, size = keys_of(messages), sum(map(len, messages))
    ends = [0, *(key.end for key in keys), size]
    assert ends == sorted(ends)
    for begin, end in itertools.pairwise(ends):
        assert end - begin <= max(FIRST_STEP, begin // STEP_SHARE)
    # A quarter of a step at least between two cuts: 4 * 16 in each doubling beyond 4 KiB, and 64 before.
    assert len(keys) <= 64 + 64 * max(0, size.bit_length() - 12)


def test_the_largest_body_has_a_few_hundred_keys() -> None:
    assert len(keys_of([b"x" * (8 * 1024 * 1024)])) < 220


def test_a_conversation_goes_on_from_its_last_turn() -> None:
    turns = [{"role": "user", "content": "a question " * 20}]
    first = beginnings(fields({"messages": turns}))
    turns = [*turns, {"role": "assistant", "content": "an answer " * 30}, {"role": "user", "content": "and " * 40}]
    second = beginnings(fields({"messages": turns}))
    assert first.keys
    assert first.keys[-1].end == first.size
    assert second.keys[: len(first.keys)] == first.keys


@pytest.mark.parametrize("prompt", ["text " * 300, list(range(1000))])
def test_a_longer_text_goes_on_from_a_shorter_one(prompt: Any) -> None:
    longer = prompt * 2
    short, long = beginnings(fields({"prompt": prompt})), beginnings(fields({"prompt": longer}))
    # What is left of the last step may be cut otherwise.
    assert short.keys[:-1] == long.keys[: len(short.keys) - 1]


@pytest.mark.parametrize("body", [{}, {"messages": 5}, {"messages": "text"}, {"messages": []}, {"prompt": ""}])
def test_no_prompt_has_no_beginnings(body: dict[str, Any]) -> None:
    assert not beginnings(fields(body)).keys
    assert not beginnings(fields(body)).entries(10, answer_tokens=5)


def test_messages_nested_too_deep_to_read_have_no_beginnings() -> None:
    depth = sys.getrecursionlimit() + 1
    assert beginnings({"messages": msgspec.Raw(b"[" * depth + b"]" * depth)}).names == []


def test_tokens_are_shared_out_by_bytes() -> None:
    known = beginnings(fields({"prompt": "x" * 1025}))
    entries = known.entries(513)
    assert [entry.tokens for entry in entries[:4]] == [128, 256, 384, 512]
    assert known.entries(513, answer_tokens=9)[:-1] == entries[:-1]


def test_an_answer_lengthens_only_the_whole_prompt() -> None:
    whole = beginnings(fields({"messages": [{"role": "user", "content": "y" * 600}]}))
    assert whole.entries(300, answer_tokens=40)[-1].tokens == 340
    # A short last message has no key: the one before it is a beginning of other prompts too.
    cut = beginnings(fields({"messages": [{"role": "system", "content": "y" * 600}, {"content": "hi"}]}))
    assert cut.keys[-1].end < cut.size
    assert cut.entries(300, answer_tokens=40)[-1].tokens < 300
