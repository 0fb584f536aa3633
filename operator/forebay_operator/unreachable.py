"""Why a connection failed, in the words that a system has for it."""

from __future__ import annotations

import os
import socket

import aiohttp


def reason(error: OSError | aiohttp.ClientError) -> str:
    """Such as `connection refused`: aiohttp's own text repeats host and port and speaks of ssl where there is none."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, socket.gaierror):
            return f"its name is not known ({cause.strerror})"
        if cause.errno is not None:
            text = os.strerror(cause.errno)
            return text[:1].lower() + text[1:]
    return str(error) or type(error).__name__
