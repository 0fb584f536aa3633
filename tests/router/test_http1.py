"""Responses of workers: whatever was written and however it was split, the same body comes out."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_router.http1 import MAX_CHUNK_LINE, MAX_HEAD, BadResponse, ResponseReader, request_head

bodies = st.binary(max_size=60)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def chunk(body: bytes, note: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(body), note, body)


def read(data: bytes, at: list[int]) -> tuple[bytes, ResponseReader]:
    reader = ResponseReader()
    return b"".join(reader.feed(part) for part in cut(data, at)), reader


splits = st.lists(st.integers(0, 400), max_size=20)


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=6), splits, st.sampled_from([b"", b";a=b"]))
def test_chunked_bodies(parts: list[bytes], at: list[int], note: bytes) -> None:
    data = HEAD + b"".join(chunk(part, note) for part in parts) + b"0\r\nx-trailer: y\r\n\r\n"
    body, reader = read(data, at)
    assert body == b"".join(parts)
    assert reader.complete
    assert reader.keep
    assert reader.head is not None
    assert (reader.head.status, reader.head.headers["content-type"]) == (200, "text/event-stream")


@given(bodies, splits, st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]))
def test_sized_bodies(body: bytes, at: list[int], interim: bytes) -> None:
    got, reader = read(interim + b"HTTP/1.1 429 \r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), at)
    assert (got, reader.complete, reader.keep) == (body, True, True)


@given(bodies, splits)
def test_bodies_until_the_connection_closes(body: bytes, at: list[int]) -> None:
    got, reader = read(b"HTTP/1.0 200 OK\r\n\r\n" + body, at)
    assert (got, reader.complete, reader.keep) == (body, False, False)
    reader.end()
    assert reader.complete


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4), st.integers(0, 400), splits)
def test_a_response_that_is_cut_is_not_taken_for_whole(parts: list[bytes], end: int, at: list[int]) -> None:
    whole = HEAD + b"".join(chunk(part) for part in parts) + b"0\r\n\r\n"
    got, reader = read(whole[: min(end, len(whole) - 1)], at)
    assert b"".join(parts).startswith(got)
    assert not reader.complete
    with pytest.raises(BadResponse):
        reader.end()


@given(st.binary(max_size=200), splits)
def test_any_bytes_give_an_answer_or_an_error(data: bytes, at: list[int]) -> None:
    for start in (b"", HEAD):
        with contextlib.suppress(BadResponse):
            read(start + data, at)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        HEAD + b"-1\r\n",
        HEAD + b"0x2\r\nab\r\n",
        HEAD + b"\r\n",
        HEAD + b"2\r\nabc\r\n",
        HEAD + b"2\r\nab\rx",
        HEAD + b"1" * (MAX_CHUNK_LINE + 1),
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD,
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_response_is_refused(data: bytes, whole: bool) -> None:
    with pytest.raises(BadResponse):
        read(data, [] if whole else list(range(0, len(data), 7)))


@pytest.mark.parametrize(
    ("data", "keep"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: Keep-Alive\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", False),
    ],
)
def test_which_connections_serve_again(data: bytes, keep: bool) -> None:
    _, reader = read(data, [])
    assert (reader.complete, reader.keep) == (True, keep)


def test_request_head() -> None:
    head = request_head("POST", "/v1/completions", {"host": "a:1", "x-request-id": "r"}, 5)
    assert head == b"POST /v1/completions HTTP/1.1\r\nhost: a:1\r\nx-request-id: r\r\ncontent-length: 5\r\n\r\n"
    for value in ("a\r\nx: y", "a\n", "a\r"):
        with pytest.raises(ValueError, match="line break"):
            request_head("POST", "/", {"x-request-id": value}, 0)
