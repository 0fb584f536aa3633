"""Servers that would hold a thread, or fill the memory, of whoever asks them."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import requests

from forebay_operator.observe.bounded_session import BoundedSession
from support.rude_server import drip, flood, serving, silence, whole

SECONDS = 0.3
MOST = 5 * SECONDS
"""A drip goes on for twice as long."""

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: 100000\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("http", drip(LENGTH)),
        ("http", drip(OK, byte=b"X-More: 1\r\n")),
        ("http", drip(OK + b"X-Long: ")),
        ("http", drip(b"", byte=b"HTTP/1.1 100 Continue\r\n\r\n")),
        ("http", drip(CHUNKED + b"ffff\r\n")),
        ("http", drip(CHUNKED + b"0\r\n", byte=b"X-More: 1\r\n")),
        ("http", drip(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 100000\r\n\r\n")),
        ("http", silence),
        ("https", drip(b"\x16\x03\x03\x3f\xff")),
    ],
    ids=["body", "headers", "header", "continue", "chunk", "trailers", "redirect", "silence", "handshake"],
)
def test_the_deadline_is_for_the_whole(scheme: str, answer: Any) -> None:
    with serving(answer) as at, BoundedSession(SECONDS) as session:
        began = time.monotonic()
        with pytest.raises(requests.RequestException, match="timed out"):
            session.get(f"{scheme}://{at}/", timeout=SECONDS)
        assert time.monotonic() - began < MOST


def test_the_deadline_is_for_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be one that drops packets: here a queue of connections that is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        found = socket.getaddrinfo("127.0.0.1", full.getsockname()[1], 0, socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found * 10)
        began = time.monotonic()
        with BoundedSession(SECONDS) as session, pytest.raises(requests.ConnectionError, match="timed out"):
            session.get("http://many.example/")
        assert time.monotonic() - began < MOST


def test_an_address_that_drops_packets_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(whole(b"{}")) as at,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.socket() as first,
    ):
        first.connect(full.getsockname())
        port = int(at.rpartition(":")[2])
        ports = (full.getsockname()[1], port)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in ports]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
        with BoundedSession(2.0) as session:
            assert session.get("http://two.example/").content == b"{}"


def test_of_a_redirect_no_more_is_read_than_of_others() -> None:
    """requests reads the whole of it, to keep the connection for where it leads."""
    sent: list[int] = []
    refused = pytest.raises(ValueError, match="more than 100000 bytes")
    answer = flood(b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", sent)
    with serving(answer) as at, BoundedSession(30.0, 100_000) as session, refused:
        session.get(f"http://{at}/", timeout=30.0)
    assert sum(sent) < 1 << 25


def test_an_adapter_mounted_later_has_the_deadline_too() -> None:
    """prometheus-api-client mounts its own."""
    with serving(drip(LENGTH)) as at, BoundedSession(SECONDS) as session:
        session.mount(f"http://{at}", requests.adapters.HTTPAdapter())
        began = time.monotonic()
        with pytest.raises(requests.ConnectionError, match="timed out"):
            session.get(f"http://{at}/")
        assert time.monotonic() - began < MOST


def test_a_closed_session_asks_no_more() -> None:
    with serving(whole(b"{}")) as at:
        session = BoundedSession(SECONDS)
        assert session.get(f"http://{at}/").content == b"{}"
        session.close()
        with pytest.raises(requests.ConnectionError, match="closed"):
            session.get(f"http://{at}/")
