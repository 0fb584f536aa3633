"""Requests to a router before fake workers, what their answers have to be, and faults on the way."""

from __future__ import annotations

from typing import Any

from router.conftest import Bench
from router.fake_worker import Answer as Truth
from router.fake_worker import Fault
from support.client import Answer, complete

ONE_PAIR: dict[str, str | None] = {"p0": "prefill", "d0": "decode"}


def completion(stream: bool = True, tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "a prompt", "max_tokens": tokens, "seed": 5, "stream": stream, **more}


def chat(stream: bool = True, tokens: int = 12, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a question"}]
    return {"model": "fake", "messages": messages, "max_tokens": tokens, "seed": 5, "stream": stream, **more}


def check(answer: Answer, request: dict[str, Any]) -> None:
    truth = Truth(request, "messages" in request, "")
    assert (answer.status, answer.error) == (200, None)
    assert answer.text == truth.text()
    assert answer.done
    assert answer.finish_reason == "length"


async def ask(bench: Bench, request: dict[str, Any], **kwargs: Any) -> Answer:
    return await complete(bench.session, bench.url, request, **kwargs)


def plant(bench: Bench, pool: str, leg: str, fault: Fault, workers: int = 1) -> None:
    """The same fault on the first `workers` workers of a pool that come to run this leg."""
    left = workers

    for name, worker in bench.workers.items():
        if name.startswith(pool):
            original = worker._fault

            def fault_once(asked: str, original=original) -> Fault | None:
                nonlocal left
                if asked == leg and left > 0:
                    left -= 1
                    return fault
                return original(asked)

            worker._fault = fault_once  # type: ignore[method-assign]
