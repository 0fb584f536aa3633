"""The official client, streaming and not, against a router with two legs behind it."""

import openai
import pytest
import pytest_asyncio

from support.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "Say something, please."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    async with Cluster(tmp_path_factory.mktemp("openai"), worker_args=["--perf-model", "instant"]) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster):
    async with openai.AsyncOpenAI(base_url=cluster.router.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


async def test_chat(client):
    whole = await client.chat.completions.with_raw_response.create(
        model="simulated", messages=MESSAGES, max_tokens=12, temperature=0
    )
    assert (whole.headers["x-forebay-prefill"], whole.headers["x-forebay-decode"]) == ("p0", "d0")
    answer = whole.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    stream = await client.chat.completions.create(
        model="simulated",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1


async def test_completions_with_logprobs(client):
    answer = await client.completions.create(
        model="simulated", prompt="Once", max_tokens=6, temperature=0, logprobs=2, seed=3
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 6
    assert "".join(logprobs.tokens) == answer.choices[0].text


async def test_models(client):
    models = [model.id async for model in client.models.list()]
    assert models == ["simulated"]


async def test_an_error_is_the_clients_own_exception(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="simulated", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
