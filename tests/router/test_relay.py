"""The SSE relay: however the bytes were split on the way, the client gets the same, and the same ids are counted."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_router import relay
from forebay_router.relay import Delivered, Relay, Splitter, read_chunk
from forebay_wire import stream

ids = st.lists(st.integers(0, 200_000), max_size=3)
payloads = st.text(max_size=20).map(lambda text: json.dumps({"choices": [{"index": 0, "text": text}]}).encode())
events = st.lists(st.tuples(ids, st.none() | payloads), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(events, st.lists(st.integers(0, 2000), max_size=20), st.booleans())
def test_any_split_gives_the_same(written: list[tuple[list[int], bytes | None]], at: list[int], done: bool) -> None:
    data = b"".join(stream.event(*event) for event in written) + (stream.DONE if done else b"")
    delivered = Delivered(several=False)
    one = Relay(delivered)
    out = b"".join(one.feed(part) for part in cut(data, at))
    assert out == b"".join(stream.event([], payload) for _, payload in written)
    assert delivered.ids == [token for tokens, _ in written for token in tokens]
    assert delivered.events == sum(payload is not None for _, payload in written)
    assert one.done is done
    assert one.error is None


@given(events, st.integers(0, 500))
def test_a_cut_event_is_neither_shown_nor_counted(written: list[tuple[list[int], bytes | None]], end: int) -> None:
    """Ids and text of one event stand or fall together: that is what a continuation relies on."""
    data = b"".join(stream.event(*event) for event in written)[:end]
    delivered = Delivered(several=False)
    out = Relay(delivered).feed(data)
    whole: list[tuple[list[int], bytes | None]] = []
    size = 0
    for event in written:
        size += len(stream.event(*event))
        if size > end:
            break
        whole.append(event)
    assert delivered.ids == [token for tokens, _ in whole for token in tokens]
    assert out == b"".join(stream.event([], payload) for _, payload in whole)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_splitter_on_any_bytes(data: bytes, at: list[int]) -> None:
    split, whole = Splitter(), Splitter()
    assert [event for part in cut(data, at) for event in split.feed(part)] == whole.feed(data)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (b"data: {}\n\n", b"data: {}\n\n"),
        (b"data:{}\n\n", b"data:{}\n\n"),
        (b": keep-alive\n\n", b""),
        (b": t 1 2\n\n", b""),
        (b": t 1\n: other\ndata: {}\n\n", b"data: {}\n\n"),
        (b"event: x\n: other\ndata: {}\n\n", b"event: x\ndata: {}\n\n"),
        (b"\n\n\ndata: {}\n\n\n\n", b"data: {}\n\n"),
    ],
)
def test_comments_are_dropped(event: bytes, shown: bytes) -> None:
    assert Relay(Delivered(several=False)).feed(event) == shown


@pytest.mark.parametrize(
    "broken",
    [b'data: {"error": {"message": "x"}}\n\n', b": t x\ndata: {}\n\n", b": t 1 -\ndata: {}\n\n"],
)
def test_a_broken_event_ends_the_stream_and_is_not_shown(broken: bytes) -> None:
    delivered = Delivered(several=False)
    one = Relay(delivered)
    good = stream.event([1], b'{"choices": [{"text": "a"}]}')
    assert one.feed(good + broken + stream.event([2], b"{}")) == b'data: {"choices": [{"text": "a"}]}\n\n'
    assert one.error is not None
    assert not one.done
    assert delivered.ids == [1]
    assert one.feed(stream.DONE) == b""


def test_an_endless_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_EVENT", 100)
    one = Relay(Delivered(several=False))
    one.feed(b"data: " + b"x" * 90)
    assert one.error is None
    one.feed(b"x" * 90)
    assert one.error == "an event of more than 100 bytes"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=15), st.data())
def test_a_second_run_leaves_out_what_is_delivered(order: list[int], data: st.DataObject) -> None:
    """Interleaved answers: the second run may interleave them otherwise; each goes on where it was."""
    seen: Counter[int] = Counter()
    written = []
    for index in order:
        chunk = {"choices": [{"index": index, "text": f"{index}.{seen[index]} "}]}
        written.append((index, stream.event([], json.dumps(chunk).encode())))
        seen[index] += 1
    first = data.draw(st.integers(0, len(written)))
    second = sorted(written, key=lambda event: event[0]) if data.draw(st.booleans()) else written
    delivered = Delivered(several=True)
    out = Relay(delivered).feed(b"".join(event for _, event in written[:first]))
    out += Relay(delivered, Counter(delivered.by_index)).feed(b"".join(event for _, event in second))
    texts: Counter[int] = Counter()
    for part in out.split(b"\n\n")[:-1]:
        choice = json.loads(part[6:])["choices"][0]
        assert choice["text"] == f"{choice['index']}.{texts[choice['index']]} "
        texts[choice["index"]] += 1
    assert texts == seen


@pytest.mark.parametrize(
    ("chunk", "content"),
    [
        ({"choices": [{"text": "a"}]}, True),
        ({"choices": [{"text": ""}]}, False),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"role": "assistant"}}]}, False),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, False),
    ],
)
def test_content(chunk: dict[str, object], content: bool) -> None:
    assert read_chunk(json.dumps(chunk)).has_content is content


def test_unreadable_chunk_is_no_content() -> None:
    assert not read_chunk(b'{"choices": 3}').has_content


def test_inter_token_times_count_tokens_only() -> None:
    one = Relay(Delivered(several=False))
    one.feed(stream.event([], b'{"choices": [{"delta": {"role": "assistant"}}]}'))
    assert one.content_events == 0
    one.feed(stream.event([1], b'{"choices": [{"delta": {"content": "a"}}]}') + stream.event([2], b"{}"))
    assert one.content_events == 2
    one.feed(stream.event([], b'{"choices": [], "usage": {}}') + stream.DONE)
    assert one.content_events == 0
