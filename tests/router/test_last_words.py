"""A worker that dies with its answer complete, before it could say so."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from router.conftest import Bench, StartBench
from router.fake_worker import Answer as Truth
from router.fake_worker import Fault

TOKENS = 6


async def chunks_of(bench: Bench, body: dict[str, Any], path: str) -> tuple[list[dict[str, Any]], bool]:
    """The data of the client's stream, and whether it ended with [DONE]."""
    async with bench.session.post(bench.url + path, json=body, timeout=aiohttp.ClientTimeout(20)) as response:
        assert response.status == 200
        data = [line[6:] for line in (await response.text()).split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"], data[-1] == "[DONE]"


@pytest.mark.parametrize("others", [True, False], ids=["others", "alone"])
@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no usage"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("kind", ["reset", "no_done"])
async def test_nothing_is_said_twice(start_bench: StartBench, kind: str, chat: bool, usage: bool, others: bool) -> None:
    more: dict[str, str | None] = {"d1": "decode"} if others else {}
    bench = await start_bench({"p0": "prefill", "d0": "decode", **more}, both_phases=False)
    said = TOKENS - 1 + usage  # by the decode leg: all but the first token, one of them without a chunk
    for worker in bench.workers.values():
        worker.faults["decode"].append(Fault(kind, after=said))
    prompt = {"messages": [{"role": "user", "content": "q"}]} if chat else {"prompt": "q"}
    body = {"model": "fake", "max_tokens": TOKENS, "seed": 5, "stream": True, **prompt}
    if usage:
        body["stream_options"] = {"include_usage": True}
    chunks, done = await chunks_of(bench, body, "/v1/chat/completions" if chat else "/v1/completions")
    assert done
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - usage) + [True] * usage
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)
    assert text == Truth(body, chat, "").text()
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]


async def test_a_usage_chunk_that_was_lost_is_asked_for(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode", "d1": "decode"})
    for name in ("d0", "d1"):
        bench[name].faults["decode"].append(Fault("reset", after=TOKENS - 1))
    body = {"model": "fake", "prompt": "q", "max_tokens": TOKENS, "seed": 5, "stream": True}
    body["stream_options"] = {"include_usage": True}
    chunks, done = await chunks_of(bench, body, "/v1/completions")
    assert done
    assert [bool(chunk.get("usage")) for chunk in chunks[-2:]] == [False, True]
