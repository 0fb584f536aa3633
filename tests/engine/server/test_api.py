"""The OpenAI API of one worker: shapes, parameters, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay_engine.types import FailEvent, SamplingParams
from forebay_wire import headers, paths
from support.fake_core import FakeCore

TEXT = {"model": "sim", "prompt": "hi there", "seed": 3, "max_tokens": 6, "ignore_eos": True}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 6, "ignore_eos": True}


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


async def test_completion_shape(worker: Any) -> None:
    worker.core.script = list(b"abc")
    status, body, response = await worker.post(paths.COMPLETIONS, TEXT, x_request_id="r7")
    assert status == 200
    assert body == {
        "id": "cmpl-r7",
        "object": "text_completion",
        "created": 1_800_000_000,
        "model": "sim",
        "choices": [{"index": 0, "text": "abcabc", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert response.headers["x-request-id"] == "r7"
    report = json.loads(response.headers[headers.LOAD])
    assert (report["engine_id"], report["ready"], report["free_blocks"]) == ("engine-1", True, 60)


async def test_chat_shape(worker: Any) -> None:
    worker.core.script = list(b"abc")
    status, body, _ = await worker.post(paths.CHAT, CHAT, x_request_id="r7")
    assert status == 200
    assert (body["id"], body["object"]) == ("chatcmpl-r7", "chat.completion")
    message = {"role": "assistant", "content": "abcabc", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    prompt = worker.core.requests[0].prompt_ids
    assert prompt.count(258) == 2
    assert prompt.count(259) == 1
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": len(prompt) // 16 * 16}


async def test_chat_chunks(worker: Any, parse_sse: Any) -> None:
    worker.core.script = [0xC3, 0xA9, 258, 33]
    body = {**CHAT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    status, raw, response = await worker.post(paths.CHAT, body, x_request_id="r7")
    assert (status, response.content_type) == (200, "text/event-stream")
    *chunks, done = [data for _, datas in parse_sse(raw) for data in datas]
    assert done == b"[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in parsed} == {
        ("chatcmpl-r7", "chat.completion.chunk", 1_800_000_000, "sim")
    }
    assert [c["choices"][0] for c in parsed[:-1]] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "\u00e9"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "!"}, "logprobs": None, "finish_reason": "length"},
    ]
    assert all(c["usage"] is None for c in parsed[:-1])
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 4


async def test_without_include_usage_there_is_no_usage_field(worker: Any, parse_sse: Any) -> None:
    _, raw, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "stream": True})
    *chunks, _ = [data for _, datas in parse_sse(raw) for data in datas]
    assert all("usage" not in json.loads(chunk) for chunk in chunks)
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"


async def test_an_incomplete_character_at_the_end_shows_as_a_replacement(worker: Any) -> None:
    worker.core.script = [97, 0xE2]
    _, body, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "max_tokens": 2})
    assert body["choices"][0]["text"] == "a\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "reason"),
    [
        ("END", "ab", 5, "stop"),
        (["zz", "ND"], "abE", 5, "stop"),
        ("Dx", "abENDc", 6, "length"),
        ("cab", "abENDc", 6, "length"),
        (None, "abENDc", 6, "length"),
    ],
)
async def test_stop_strings(worker: Any, stop: Any, text: str, tokens: int, reason: str) -> None:
    worker.core.script = list(b"abENDc")
    for stream in (False, True):
        status, body, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "stop": stop, "stream": stream})
        assert status == 200
        if not stream:
            assert body["choices"][0]["text"] == text
            assert body["choices"][0]["finish_reason"] == reason
            assert body["usage"]["completion_tokens"] == tokens
    assert len(worker.core.aborted) == (2 if reason == "stop" else 0)
    assert not worker.core.running


async def test_stop_strings_wait_for_min_tokens(worker: Any) -> None:
    worker.core.script = list(b"ENDEND")
    _, body, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "stop": "END", "min_tokens": 4})
    assert body["choices"][0]["text"] == "END"
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("min_tokens", "text"), [(2, ""), (3, "ENDx")])
async def test_a_match_counts_when_it_ends_after_min_tokens(worker: Any, min_tokens: int, text: str) -> None:
    worker.core.script = list(b"ENDx")
    _, body, _ = await worker.post(
        paths.COMPLETIONS, {**TEXT, "max_tokens": 4, "stop": "END", "min_tokens": min_tokens}
    )
    assert body["choices"][0]["text"] == text


async def test_the_stop_id_counts_but_is_not_shown(worker: Any) -> None:
    worker.core.script = list(b"abc")
    _, body, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "stop_token_ids": [99]})
    assert body["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 3


async def test_chat_logprobs(worker: Any, parse_sse: Any) -> None:
    worker.core.script = [0xC3, 0xA9, 97]
    body = {**CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    _, whole, _ = await worker.post(paths.CHAT, body)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [97]]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "a"]
    assert content[2]["logprob"] == -9999.0
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    _, raw, _ = await worker.post(paths.CHAT, {**body, "stream": True})
    chunks = [json.loads(data) for _, datas in parse_sse(raw)[1:-1] for data in datas]
    assert [c["choices"][0]["logprobs"]["content"][0] for c in chunks] == content
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "\u00e9a"


async def test_completion_logprobs_and_echo(worker: Any, parse_sse: Any) -> None:
    worker.core.script = [0xC3, 0xA9, 98]
    body = {**TEXT, "prompt": "x\u00e9", "max_tokens": 3, "logprobs": 1, "echo": True}
    _, whole, _ = await worker.post(paths.COMPLETIONS, body)
    choice = whole["choices"][0]
    assert choice["text"] == "x\u00e9\u00e9b"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 3]
    assert logprobs["token_logprobs"][0] is None
    assert all(isinstance(lp, float) for lp in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert all(token in top for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:])
    assert worker.core.requests[0].params.prompt_logprobs == 1

    _, raw, _ = await worker.post(paths.COMPLETIONS, {**body, "stream": True})
    chunks = [json.loads(data)["choices"][0] for _, datas in parse_sse(raw)[:-1] for data in datas]
    assert "".join(c["text"] for c in chunks) == choice["text"]
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [item for c in chunks for item in c["logprobs"][field]] == logprobs[field]


async def test_several_answers_and_prompts(worker: Any, parse_sse: Any) -> None:
    body = {**TEXT, "prompt": ["one", "three"], "n": 2, "max_tokens": 5}
    _, whole, _ = await worker.post(paths.COMPLETIONS, body)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 8
    assert whole["usage"]["completion_tokens"] == 20
    asked = worker.core.requests
    assert [(len(r.prompt_ids), r.params.choice) for r in asked] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    assert len({r.request_id for r in asked}) == 4
    for index, prompt in enumerate(("one", "three")):
        _, alone, _ = await worker.post(paths.COMPLETIONS, {**body, "prompt": prompt, "n": 1})
        assert alone["choices"][0]["text"] == whole["choices"][2 * index]["text"]
    _, raw, _ = await worker.post(paths.COMPLETIONS, {**body, "stream": True}, x_forebay_router="r")
    events = parse_sse(raw)
    assert not any(ids for ids, _ in events)
    texts = ["", "", "", ""]
    for _, datas in events[:-1]:
        choice = json.loads(datas[0])["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in whole["choices"]]


async def test_one_answer_stopped_leaves_the_others_running(worker: Any) -> None:
    body = {**TEXT, "n": 8, "max_tokens": 12, "stop": "E"}
    _, whole, _ = await worker.post(paths.COMPLETIONS, body)
    reasons = [c["finish_reason"] for c in whole["choices"]]
    assert set(reasons) == {"stop", "length"}
    assert len(worker.core.aborted) == reasons.count("stop")


@pytest.mark.parametrize("prompt", [[104, 105], "hi", ["hi"], [[104, 105]]], ids=["ids", "text", "texts", "id lists"])
async def test_forms_of_a_prompt(worker: Any, prompt: Any) -> None:
    status, _, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "prompt": prompt})
    assert status == 200
    assert worker.core.requests[0].prompt_ids == [104, 105]


async def test_every_parameter_reaches_the_core(worker: Any) -> None:
    body = {
        **CHAT,
        "ignore_eos": False,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "stop_token_ids": [5],
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logprobs": True,
        "top_logprobs": 4,
    }
    status, _, _ = await worker.post(paths.CHAT, body)
    assert status == 200
    assert worker.core.requests[0].params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        seed=3,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=(5, 257, 259),
        frequency_penalty=0.25,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        logprobs=4,
    )


async def test_defaults(worker: Any) -> None:
    bare = {"model": "sim", "prompt": "hi", "max_tokens": None, "temperature": None, "stream": None}
    for _ in range(2):
        status, _, _ = await worker.post(paths.COMPLETIONS, bare)
        assert status == 200
    first, second = (request.params for request in worker.core.requests)
    assert first.max_tokens == 256 - 2
    assert first.temperature == 1.0
    assert first.seed != second.seed


async def test_content_parts_and_roles_reach_the_template(worker: Any) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None, "audio": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    status, _, _ = await worker.post(paths.CHAT, {**CHAT, "messages": messages})
    assert status == 200
    text = bytes(token for token in worker.core.requests[0].prompt_ids if token < 256).decode()
    assert text == "developer\nbe kind\nuser\na\nb\nassistant\n\ntool\n42\nassistant\n"


async def test_the_cores_refusal_has_its_status(worker: Any) -> None:
    worker.core.fail = FailEvent("x", 429, "queue is full", retry_after_seconds=2.5)
    for stream in (False, True):
        status, answer, response = await worker.post(paths.CHAT, {**CHAT, "stream": stream})
        assert (status, answer["error"]["message"]) == (429, "queue is full")
        assert response.headers["retry-after"] == "3"


async def test_a_failure_mid_stream_is_said_in_the_stream(worker: Any, parse_sse: Any) -> None:
    worker.core.fail, worker.core.fail_at = FailEvent("x", 500, "lost it"), 3
    worker.core.script = list(b"abc")
    _, raw, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "stream": True})
    events = [data for _, datas in parse_sse(raw) for data in datas]
    assert json.loads(events[-1])["error"]["message"] == "lost it"
    assert events[-1].startswith(b'{"error"')
    assert b"[DONE]" not in raw
    assert len(events) == 4


async def test_one_failed_answer_of_several_fails_the_request(worker: Any) -> None:
    worker.core.fail, worker.core.fail_at = FailEvent("x", 500, "lost it"), 3
    status, _, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "n": 3})
    assert status == 500
    assert not worker.core.running


async def test_models(worker: Any) -> None:
    status, body = await worker.get(paths.MODELS)
    assert status == 200
    assert body["data"][0]["id"] == "sim"
    assert body["data"][0]["max_model_len"] == 256


async def test_one_model(worker: Any) -> None:
    status, body = await worker.get(paths.MODELS + "/sim")
    assert (status, body["id"], body["max_model_len"]) == (200, "sim", 256)
    status, body = await worker.get(paths.MODELS + "/other/name")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "'other/name' is not served here; there is sim" in body["error"]["message"]


async def test_openais_own_client(make_worker: Any) -> None:
    import openai

    async with make_worker(FakeCore()) as worker:
        worker.core.script = list(b"abc")
        async with openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.create(
                model="sim", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, logprobs=True
            )
            assert chat.choices[0].message.content == "abca"
            assert chat.choices[0].logprobs is not None
            stream = await client.chat.completions.create(
                model="sim",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abca"
            assert chunks[-1].usage is not None
            text = await client.completions.create(model="sim", prompt="x", max_tokens=3, logprobs=1)
            assert text.choices[0].text == "abc"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="gpt", prompt="x")
