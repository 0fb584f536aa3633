"""The OpenAI API of one worker: shapes, parameters, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay_engine.text.template import ChatTemplate
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


ACCEPTED: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "logit_bias": {},
    "modalities": ["text"],
    "n": 1,
    "stop": [],
    "seed": -1,
    "top_k": 0,
    "temperature": 2,
    "prompt_cache_key": "k",
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_accepted(worker: Any, name: str) -> None:
    status, answer, _ = await worker.post(paths.CHAT, {**CHAT, name: ACCEPTED[name]})
    assert status == 200, answer


def template(variables: Any) -> dict[str, Any]:
    return {**CHAT, "chat_template_kwargs": variables}


BIG = "x" * 300
REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "unknown model": (paths.CHAT, {**CHAT, "model": "gpt"}, 404, "model"),
    "no model": (paths.CHAT, without(CHAT, "model"), 400, "model"),
    "no messages": (paths.CHAT, without(CHAT, "messages"), 400, "messages"),
    "messages empty": (paths.CHAT, {**CHAT, "messages": []}, 400, "messages"),
    "prompt on chat": (paths.CHAT, {**CHAT, "prompt": "x"}, 400, "prompt"),
    "unknown field": (paths.CHAT, {**CHAT, "temprature": 1}, 400, "temprature"),
    "unknown option": (paths.CHAT, {**CHAT, "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    "options without stream": (paths.CHAT, {**CHAT, "stream_options": {}}, 400, "stream_options"),
    "role": (paths.CHAT, {**CHAT, "messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role"),
    "no content": (paths.CHAT, {**CHAT, "messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "image": (
        paths.CHAT,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content[0].type",
    ),
    "extra in message": (
        paths.CHAT,
        {**CHAT, "messages": [{"role": "user", "content": "x", "mood": 1}]},
        400,
        "messages[0].mood",
    ),
    "tools": (paths.CHAT, {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    "tool_choice": (paths.CHAT, {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    "json mode": (paths.CHAT, {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    "logit_bias": (paths.CHAT, {**CHAT, "logit_bias": {"1": 2}}, 400, "logit_bias"),
    "suffix": (paths.COMPLETIONS, {**TEXT, "suffix": "x"}, 400, "suffix"),
    "audio": (paths.CHAT, {**CHAT, "modalities": ["text", "audio"]}, 400, "modalities"),
    "store": (paths.CHAT, {**CHAT, "store": True}, 400, "store"),
    "store as int": (paths.CHAT, {**CHAT, "store": 0}, 400, "store"),
    "top_logprobs alone": (paths.CHAT, {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    "top_logprobs": (paths.CHAT, {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "logprobs": (paths.COMPLETIONS, {**TEXT, "logprobs": -1}, 400, "logprobs"),
    "logprobs kind": (paths.COMPLETIONS, {**TEXT, "logprobs": True}, 400, "logprobs"),
    "temperature": (paths.CHAT, {**CHAT, "temperature": -0.1}, 400, "temperature"),
    "temperature as text": (paths.CHAT, {**CHAT, "temperature": "hot"}, 400, "temperature"),
    "temperature as bool": (paths.CHAT, {**CHAT, "temperature": True}, 400, "temperature"),
    "top_p": (paths.CHAT, {**CHAT, "top_p": 0}, 400, "top_p"),
    "top_k": (paths.CHAT, {**CHAT, "top_k": -2}, 400, "top_k"),
    "min_p": (paths.CHAT, {**CHAT, "min_p": 1.1}, 400, "min_p"),
    "seed": (paths.CHAT, {**CHAT, "seed": 2**63}, 400, "seed"),
    "seed as float": (paths.CHAT, {**CHAT, "seed": 1.5}, 400, "seed"),
    "frequency": (paths.CHAT, {**CHAT, "frequency_penalty": 2.1}, 400, "frequency_penalty"),
    "presence": (paths.CHAT, {**CHAT, "presence_penalty": -2.1}, 400, "presence_penalty"),
    "repetition": (paths.CHAT, {**CHAT, "repetition_penalty": 0}, 400, "repetition_penalty"),
    "max_tokens": (paths.CHAT, {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens as bool": (paths.CHAT, {**CHAT, "max_tokens": True}, 400, "max_tokens"),
    "min over max": (paths.CHAT, {**CHAT, "min_tokens": 7}, 400, "min_tokens"),
    "n": (paths.CHAT, {**CHAT, "n": 129}, 400, "n"),
    "n x prompts": (paths.COMPLETIONS, {**TEXT, "prompt": ["x"] * 100, "n": 3}, 400, "n"),
    "prompts": (paths.COMPLETIONS, {**TEXT, "prompt": ["x"] * 129}, 400, "prompt"),
    "best_of": (paths.COMPLETIONS, {**TEXT, "best_of": 2}, 400, "best_of"),
    "stops": (paths.CHAT, {**CHAT, "stop": ["x"] * 17}, 400, "stop"),
    "stop too long": (paths.CHAT, {**CHAT, "stop": "x" * 257}, 400, "stop"),
    "stop empty": (paths.CHAT, {**CHAT, "stop": [""]}, 400, "stop[0]"),
    "stop id": (paths.CHAT, {**CHAT, "stop_token_ids": [260]}, 400, "stop_token_ids"),
    "prompt kind": (paths.COMPLETIONS, {**TEXT, "prompt": 7}, 400, "prompt"),
    "prompt empty": (paths.COMPLETIONS, {**TEXT, "prompt": ""}, 400, "prompt"),
    "prompt empty list": (paths.COMPLETIONS, {**TEXT, "prompt": []}, 400, "prompt"),
    "prompt empty ids": (paths.COMPLETIONS, {**TEXT, "prompt": [[]]}, 400, "prompt"),
    "prompt mixed": (paths.COMPLETIONS, {**TEXT, "prompt": ["x", 1]}, 400, "prompt[1]"),
    "prompt bool": (paths.COMPLETIONS, {**TEXT, "prompt": [1, True]}, 400, "prompt[1]"),
    "prompt id": (paths.COMPLETIONS, {**TEXT, "prompt": [260]}, 400, "prompt"),
    "prompt negative id": (paths.COMPLETIONS, {**TEXT, "prompt": [1, -1]}, 400, "prompt[1]"),
    "prompt too long": (paths.COMPLETIONS, {**TEXT, "prompt": BIG}, 400, "prompt"),
    "prompt far too long": (paths.COMPLETIONS, {**TEXT, "prompt": BIG * 100}, 400, "prompt"),
    "messages too long": (paths.CHAT, {**CHAT, "messages": [{"role": "user", "content": BIG}]}, 400, "messages"),
    "user": (paths.CHAT, {**CHAT, "user": 7}, 400, "user"),
    "template variables as list": (paths.CHAT, template([]), 400, "chat_template_kwargs"),
    "template variable's name": (paths.CHAT, template({"no name": 1}), 400, "chat_template_kwargs"),
    "template variable's long name": (paths.CHAT, template({"x" * 65: 1}), 400, "chat_template_kwargs"),
    "messages as variable": (paths.CHAT, template({"messages": []}), 400, "chat_template_kwargs.messages"),
    "special token as variable": (paths.CHAT, template({"eos_token": ""}), 400, "chat_template_kwargs.eos_token"),
    "another template": (paths.CHAT, template({"chat_template": "x"}), 400, "chat_template_kwargs.chat_template"),
    "33 template variables": (paths.CHAT, template({f"a{i}": i for i in range(33)}), 400, "chat_template_kwargs"),
    "large template variables": (paths.CHAT, template({"a": "x" * 16384}), 400, "chat_template_kwargs"),
    "huge number in a variable": (paths.CHAT, template({"a": [1, 2**63]}), 400, "chat_template_kwargs.a"),
    "deep template variable": (paths.CHAT, template({"a": [[[[[[[[[]]]]]]]]]}), 400, "chat_template_kwargs.a"),
    "template variables on text": (
        paths.COMPLETIONS,
        {**TEXT, "chat_template_kwargs": {}},
        400,
        "chat_template_kwargs",
    ),
    "kv params": (paths.CHAT, {**CHAT, "kv_transfer_params": {"do_remote_decode": True}}, 401, None),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(worker: Any, name: str) -> None:
    path, body, status, param = REFUSED[name]
    got, answer, response = await worker.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["type"] in ("invalid_request_error", "authentication_error")
    assert param is None or param in answer["error"]["message"] or param == "model"
    assert response.headers[headers.LOAD]
    assert not worker.core.requests


@pytest.mark.parametrize("variables", [None, {}, {"enable_thinking": False}, {"a": {"b": [1, 2.5, None, "c"]}}])
async def test_template_variables_are_taken(worker: Any, variables: Any) -> None:
    status, answer, _ = await worker.post(paths.CHAT, template(variables))
    assert status == 200, answer


async def test_template_variables_reach_the_prompt(worker: Any) -> None:
    worker.state.tokenizer._template = ChatTemplate("{{ 'quick' if not enable_thinking else 'slow' }}", {})
    lengths = []
    for thinking in (False, True):
        _, answer, _ = await worker.post(paths.CHAT, template({"enable_thinking": thinking}))
        lengths.append(answer["usage"]["prompt_tokens"])
    assert lengths == [len("quick"), len("slow")]


async def test_a_template_that_fails_is_a_clear_400(worker: Any) -> None:
    worker.state.tokenizer._template = ChatTemplate("{{ 1 // (messages | length - 1) }}", {})
    status, answer, _ = await worker.post(paths.CHAT, CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "ZeroDivisionError" in answer["error"]["message"]


async def test_over_the_limit_names_both_numbers(worker: Any) -> None:
    _, answer, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "max_tokens": 249, "stream": True})
    message = answer["error"]["message"]
    assert "257" in message
    assert "256" in message
    assert "248" in message
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}{}",
        b"\xff",
        b'{"model": "sim", "prompt": "\xff"}',
        b'{"model": "sim", "prompt": "\\ud800"}',
        b'{"model": "sim", "prompt": "x", "temperature": NaN}',
        b'{"model": "sim", "prompt": "x", "temperature": 1e999}',
        b'{"model": "sim", "prompt": "x", "max_tokens": 100000000000000000000000}',
        b'{"model": "sim", "prompt": ' + b"[" * 100_000,
    ],
    ids=range(12),
)
async def test_malformed_bodies(worker: Any, data: bytes) -> None:
    status, answer, _ = await worker.post(paths.COMPLETIONS, data)
    assert status == 400
    assert answer["error"]["message"]


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
