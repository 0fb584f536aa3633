"""What status tells of a container that ends again and again."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_operator.observe.problems import problems

CAUSE = "forebay-engine: no memory for a KV arena; give the worker less KV memory (spec.engine.kvCache.memory)"


def crashing(code: int, message: str | None) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error"} | ({} if message is None else {"message": message})
    return {
        "kind": "Pod",
        "metadata": {"name": "a-prefill-1", "namespace": "llm", "labels": {"forebay.dev/pool": "prefill"}},
        "status": {
            "containerStatuses": [
                {
                    "name": "engine",
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {"terminated": ended},
                }
            ]
        },
    }


@pytest.mark.parametrize(
    ("code", "message", "text"),
    [
        (78, f"2026-01-01 12:00:00 INFO loading\n{CAUSE}\n", f"with exit code 78: {CAUSE}; see its log"),
        (78, "\x1b[31mred\n", "with exit code 78: [31mred; see its log"),
        (78, "x" * 5000, f"with exit code 78: {'x' * 400}; see its log"),
        (78, "\n", "with exit code 78; see its log"),
        (78, None, "with exit code 78; see its log"),
        (1, "2026-01-01 12:00:00 a prompt\n", "with exit code 1; see its log"),
    ],
)
def test_the_cause_is_told_where_it_is_the_same_each_time(code: int, message: str | None, text: str) -> None:
    (problem,) = problems([], [], [crashing(code, message)], 0.0)
    assert problem.message == f"container engine ended {text}"
