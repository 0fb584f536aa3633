"""What of a request is taken, and what is refused with the field at fault."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_engine.text.template import ChatTemplate
from forebay_wire import headers, paths

TEXT = {"model": "sim", "prompt": "hi there", "seed": 3, "max_tokens": 6, "ignore_eos": True}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 6, "ignore_eos": True}


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


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
