"""Every sampling and API parameter: prefill/decode gives the chunks, logprobs and usage of one worker."""

import itertools
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay_engine.server.schema import ChatRequest, CompletionRequest
from support.client import complete
from support.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.model, pytest.mark.timeout(600)]

CHAT = {"messages": [{"role": "user", "content": "Name three colours, then explain rain in two sentences."}]}
TEXT = {"prompt": "A short list of animals: cat, dog,"}
IDS = {"prompt": [504, 3575, 282, 4649, 314]}

GREEDY = {"temperature": 0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "default sampling": {"seed": 7},
    "temperature": {"temperature": 1.7, "seed": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.7, "seed": 2},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 4},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 1.5},
    "presence_penalty": {**GREEDY, "presence_penalty": 1.5},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.3},
    "all penalties": {
        "seed": 5,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "one token": {**GREEDY, "max_tokens": 1},
    "two tokens": {**GREEDY, "max_tokens": 2},
    "min_tokens": {**GREEDY, "min_tokens": 10, "max_tokens": 14},
    "stop": {**GREEDY, "stop": [",", "."]},
    "stop across tokens": {**GREEDY, "stop": "e b"},
    "stop never found": {**GREEDY, "stop": ["zzzzzz"]},
    "stop_token_ids": {**GREEDY, "stop_token_ids": [28, 30]},
    "ignore_eos": {**GREEDY, "ignore_eos": True, "max_tokens": 20},
    "eos": {**GREEDY, "max_tokens": 60},
}
LOGPROBS = {
    "chat": {"logprobs": True, "top_logprobs": 3},
    "text": {"logprobs": 3},
}
SHAPES: dict[str, dict[str, Any]] = {"chat": CHAT, "text": TEXT, "ids": IDS}
OF_ONE_ENDPOINT: dict[str, dict[str, Any]] = {
    "max_completion_tokens": {**CHAT, **GREEDY, "max_completion_tokens": 5, "max_tokens": 9},
    "chat_template_kwargs": {**CHAT, **GREEDY, "chat_template_kwargs": {"enable_thinking": False}},
    "top_logprobs of 0": {**CHAT, **GREEDY, "logprobs": True},
    "content parts and roles": {
        **GREEDY,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Name a"}, {"type": "text", "text": "fish."}]},
            {"role": "assistant", "content": "Trout."},
            {"role": "user", "content": "Another?", "name": "Ann"},
        ],
    },
    "logprobs of 0": {**TEXT, **GREEDY, "logprobs": 0},
    "best_of of 1": {**TEXT, "seed": 6, "n": 1, "best_of": 1},
    "top_k off": {**TEXT, "temperature": 1.0, "top_k": -1, "seed": 8},
    "without effect": {
        **TEXT,
        **GREEDY,
        "user": "ann",
        "metadata": {"team": "fish"},
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    },
}
ON_ONE_WORKER: dict[str, dict[str, Any]] = {
    "text n": {**TEXT, "n": 3, "seed": 9},
    "chat n": {**CHAT, "n": 2, "seed": 9},
    "echo": {**TEXT, **GREEDY, "echo": True},
    "several prompts": {**GREEDY, "prompt": ["One fish,", "two fish,"]},
}


async def test_every_field_of_both_endpoints_is_tried():
    """A new parameter has to come here."""
    tried = {"model", "max_tokens", "stream", "stream_options", *LOGPROBS["chat"], *LOGPROBS["text"]}
    for body in (*CASES.values(), *SHAPES.values(), *OF_ONE_ENDPOINT.values(), *ON_ONE_WORKER.values()):
        tried |= body.keys()
    known = {field.name for kind in (ChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)}
    assert known <= tried, known - tried


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def systems(tmp_path_factory, small_dir):
    args = ["--dtype", "float32", "--max-model-len", "1024"]
    folder = tmp_path_factory.mktemp("parameters")
    options = {"engine": "native", "model_dir": small_dir, "worker_args": args}
    async with (
        Cluster(folder / "pd", **options) as pair,
        Cluster(folder / "single", decode=0, with_router=False, **options) as single,
    ):
        yield pair, single


def comparable(value):
    """Without the time; logprobs rounded, since a batch of one and a chunk of many sum in another order."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in ("created", "cached_tokens")}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


numbers = itertools.count()


async def both(systems, body):
    pair, single = systems
    body = {"model": "smollm2", "max_tokens": 16, **body}
    headers = {"x-request-id": f"case-{next(numbers)}"}
    left = await complete(pair.session, pair.router.url, body, headers=headers)
    right = await complete(single.session, single.workers["p0"].url, body, headers=headers)
    return left, right


def check_equal(left, right, *, one_token=False):
    """And that the left one came by two legs: else one worker was compared with itself."""
    assert (left.status, left.error) == (200, None)
    alone = one_token or (left.usage or {}).get("completion_tokens") == 1
    assert (left.headers["x-forebay-prefill"], left.headers["x-forebay-decode"]) == ("p0", "p0" if alone else "d0")
    assert right.status == 200, right.error
    assert left.done
    assert comparable(left.chunks) == comparable(right.chunks)
    assert comparable(left.body) == comparable(right.body)
    assert left.text == right.text
    assert left.finish_reason == right.finish_reason


pytestmark.append(pytest.mark.asyncio(loop_scope="module"))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
async def test_parameter(systems, case, shape, stream):
    body = {**SHAPES[shape], **CASES[case], "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    left, right = await both(systems, body)
    check_equal(left, right)
    assert left.usage is not None


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("shape", ["chat", "text"])
@pytest.mark.parametrize("case", ["greedy", "default sampling", "one token", "stop", "all penalties"])
async def test_logprobs(systems, case, shape, stream):
    left, right = await both(systems, {**SHAPES[shape], **CASES[case], **LOGPROBS[shape], "stream": stream})
    check_equal(left, right, one_token=case == "one token")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("case", OF_ONE_ENDPOINT)
async def test_parameter_of_one_endpoint(systems, case, stream):
    left, right = await both(systems, {**OF_ONE_ENDPOINT[case], "stream": stream})
    check_equal(left, right)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("case", ON_ONE_WORKER)
async def test_both_phases_on_one_worker(systems, case, stream):
    body = ON_ONE_WORKER[case]
    left, right = await both(systems, {**body, "stream": stream})
    assert left.status == right.status == 200, (left.error, right.error)
    if stream:
        # Answers interleave as steps fall; each one's own chunks are equal.
        for index in range(body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)):
            assert [comparable(c) for c in left.chunks if c["choices"][0]["index"] == index] == [
                comparable(c) for c in right.chunks if c["choices"][0]["index"] == index
            ]
    else:
        assert comparable(left.body) == comparable(right.body)


async def test_without_a_seed_answers_differ(systems):
    texts = {(await both(systems, {**TEXT, "temperature": 2.0}))[0].text for _ in range(4)}
    assert len(texts) > 1


async def test_nothing_is_left(systems):
    assert (await systems[0].load("d0")).kv_bytes_received > 0
    for cluster in systems:
        await cluster.assert_nothing_left()
