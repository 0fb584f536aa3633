"""Replaying ids and going on is the same as never having stopped: the pure half of hand-over, over random requests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.server import schema
from forebay_engine.server.plan import ModelLimits, Plan, make_plan
from forebay_engine.server.reply import Reply, StreamEvent
from forebay_engine.server.shapes import Shapes
from forebay_engine.text.simulated import SimulatedTokenizer
from forebay_engine.types import TokenEvent
from forebay_wire.transfer import TokenLogprob

TOKENIZER = SimulatedTokenizer()
LIMITS = ModelLimits("sim", 64, TOKENIZER.vocab_size)
PROMPT = "hi"

ids = st.lists(st.sampled_from([*b"aEND \n", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF, 258]), min_size=1, max_size=16)
requests = st.fixed_dictionaries(
    {
        "chat": st.booleans(),
        "stop": st.lists(st.sampled_from(["END", "ND", "\u00e9", "a\n", "aa"]), max_size=3),
        "min_tokens": st.integers(0, 1),
        "logprobs": st.booleans(),
        "usage": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [10]]),
    }
)


def plan_of(request: dict[str, Any], max_tokens: int) -> Plan:
    body: dict[str, Any] = {
        "model": "sim",
        "stop": request["stop"],
        "max_tokens": max_tokens,
        "min_tokens": request["min_tokens"],
        "stop_token_ids": request["stop_token_ids"],
        "stream": True,
        "stream_options": {"include_usage": request["usage"]},
    }
    prompt = list(PROMPT.encode())
    if request["chat"]:
        chat = schema.parse_chat(
            {**body, "messages": [{"role": "user", "content": PROMPT}], "logprobs": request["logprobs"]}
        )
        return make_plan(chat, [prompt], [PROMPT], TOKENIZER, LIMITS, default_seed=1)
    text = schema.parse_completion({**body, "prompt": PROMPT, "logprobs": 2 if request["logprobs"] else None})
    return make_plan(text, [prompt], [PROMPT], TOKENIZER, LIMITS, default_seed=1)


def reply_of(plan: Plan) -> Reply:
    return Reply(plan, Shapes(plan, "r", 5, TOKENIZER), TOKENIZER, cached_tokens=0)


def logprobs_of(plan: Plan, token_ids: list[int]) -> list[TokenLogprob] | None:
    return [TokenLogprob(t, -t / 7) for t in token_ids] if plan.params.logprobs is not None else None


def generate(reply: Reply, plan: Plan, token_ids: list[int], batch: int) -> list[StreamEvent]:
    """What the core's events for `token_ids` give, `batch` ids an event; the core stops at ids and max_tokens."""
    events: list[StreamEvent] = []
    for start in range(0, len(token_ids), batch):
        part = token_ids[start : start + batch]
        if reply.all_finished:
            break
        finish = None
        for i, token in enumerate(part):
            if token in plan.stop_ids:
                part, finish = part[: i + 1], "stop"
                break
        if finish is None and start + batch >= len(token_ids):
            finish = "length"
        events += reply.feed(0, TokenEvent("r", part, logprobs_of(plan, part), finish))
        if finish is not None:
            break
    return [*events, *(([], chunk) for chunk in reply.closing())]


@given(token_ids=ids, request=requests, cut=st.integers(1, 16), batch=st.integers(1, 4), delivered=st.booleans())
def test_any_cut(token_ids: list[int], request: dict[str, Any], cut: int, batch: int, delivered: bool) -> None:
    plan = plan_of(request, len(token_ids))
    plain = reply_of(plan)
    whole = generate(plain, plan, token_ids, 1)
    made = [token for got, _ in whole for token in got]
    cut = min(cut, len(made))
    second = reply_of(plan)
    events = second.replay(made[:cut], logprobs_of(plan, made[:cut]), delivered=delivered)
    if second.all_finished:
        events += [([], chunk) for chunk in second.closing()]
    else:
        events += generate(second, plan, token_ids[cut:], batch)
    if delivered:
        last = max(i for i, (got, _) in enumerate(whole) if got and got[0] is not None and _count(whole, i) == cut)
        assert events == whole[last + 1 :]
    else:
        assert events == whole
    assert second.usage() == plain.usage()
    assert second.finish_reason == plain.finish_reason


def _count(events: list[StreamEvent], last: int) -> int:
    return sum(len(got) for got, _ in events[: last + 1])


@given(token_ids=ids, request=requests)
def test_the_body_says_what_the_stream_said(token_ids: list[int], request: dict[str, Any]) -> None:
    import json

    plan = plan_of(request, len(token_ids))
    streamed = reply_of(plan)
    chunks = [json.loads(chunk) for _, chunk in generate(streamed, plan, token_ids, 1) if chunk is not None]
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "") if request["chat"] else choice["text"]
    whole = Reply(plan, Shapes(plan, "r", 5, TOKENIZER), TOKENIZER, cached_tokens=0, stream=False)
    generate(whole, plan, token_ids, 3)
    choice = json.loads(whole.body())["choices"][0]
    assert (choice["message"]["content"] if request["chat"] else choice["text"]) == text
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert choice["finish_reason"] == finishes[-1]
    assert all(finish is None for finish in finishes[:-1])


def test_the_server_never_imports_torch() -> None:
    code = "import sys, forebay_engine.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
