"""What headers hold."""

from __future__ import annotations

import pytest

from forebay_wire.headers import bearer, is_request_id
from forebay_wire.urls import host_port, split_host_port


@pytest.mark.parametrize("text", ["a", "A.b_c:d-9", "x" * 128])
def test_request_ids(text: str) -> None:
    assert is_request_id(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "a b", "a\n", "../a", "caf\u00e9", "a/b"])
def test_no_request_ids(text: str) -> None:
    assert not is_request_id(text)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, None),
        ("", None),
        ("key", None),
        ("Basic key", None),
        ("Bearer key", b"key"),
        ("bearer  key ", b"key"),
        ("Bearer", b""),
        ("Bearer k\udce9y", b"k\xe9y"),
    ],
)
def test_bearer(header: str | None, token: bytes | None) -> None:
    assert bearer(header) == token


@pytest.mark.parametrize(
    ("host", "written"), [("10.0.0.1", "10.0.0.1:80"), ("worker-3", "worker-3:80"), ("fd00::1", "[fd00::1]:80")]
)
def test_host_and_port(host: str, written: str) -> None:
    assert host_port(host, 80) == written
    assert split_host_port(written) == (host, 80)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:0", "host:65536", "host:\u0661", "[]:1"])
def test_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        split_host_port(text)
