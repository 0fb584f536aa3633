"""Addresses as URLs write them."""

from __future__ import annotations


def url_host(host: str) -> str:
    """An IPv6 address goes in brackets."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int | str) -> str:
    """`host:port`, as in URLs and as `split_host_port` reads it."""
    return f"{url_host(host)}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The two parts of `host_port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r:.100} is not host:port")
    return bare, int(port)
