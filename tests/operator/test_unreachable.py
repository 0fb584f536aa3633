"""Why a connection failed, said for people."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from forebay_operator.unreachable import reason


async def failure(url: str) -> aiohttp.ClientError:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as caught:
            await session.get(url)
    return caught.value


async def test_a_closed_port_and_a_name_that_is_not_known() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        assert reason(await failure(f"http://127.0.0.1:{bound.getsockname()[1]}/")) == "connection refused"
    assert "is not known" in reason(await failure("http://no-such-host.invalid/"))


def test_what_has_no_text_is_called_by_its_kind() -> None:
    assert reason(aiohttp.ServerDisconnectedError("")) == "ServerDisconnectedError"
    assert reason(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
