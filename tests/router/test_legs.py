"""From a client's body to the legs' bodies, and what the router reads of a hand-off."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_router import legs
from forebay_router.context import TokenEstimate
from forebay_wire import paths
from forebay_wire.errors import ApiError
from forebay_wire.messages import ContinueRequest
from forebay_wire.transfer import CLIENT_LIMIT_FIELDS, ClientLimits, KVTransferParams

RNG = random.Random(1)


def parse(path: str = paths.COMPLETIONS, **fields: Any) -> legs.ClientCall:
    return legs.parse(path, json.dumps({"model": "m", "seed": 3, **fields}).encode(), RNG)


@pytest.mark.parametrize(
    ("fields", "split", "several", "stream"),
    [
        ({"prompt": "x"}, True, False, False),
        ({"prompt": [1, 2, 3], "stream": True}, True, False, True),
        ({"prompt": "x", "stream": "true"}, True, False, False),
        ({"prompt": "x", "n": 1, "best_of": None, "echo": False, "prompt_logprobs": None}, True, False, False),
        ({"prompt": "x", "n": 2}, False, True, False),
        ({"prompt": "x", "n": "2"}, False, True, False),
        ({"prompt": "x", "best_of": 3}, False, True, False),
        ({"prompt": ["x", "y"]}, False, True, False),
        ({"prompt": [[1], [2]]}, False, True, False),
        ({"prompt": "x", "echo": True}, False, False, False),
        ({"prompt": "x", "prompt_logprobs": 0}, False, False, False),
    ],
)
def test_which_requests_are_split(fields: dict[str, Any], split: bool, several: bool, stream: bool) -> None:
    call = parse(**fields)
    assert (call.split, call.several, call.stream) == (split, several, stream)


@pytest.mark.parametrize("prompt", ['[ "x"]', "[\n  [1]\n]", "[" + " " * 100 + '"x"]'])
def test_blanks_in_the_body_change_nothing(prompt: str) -> None:
    call = legs.parse(paths.COMPLETIONS, b'{"prompt": %s}' % prompt.encode(), RNG)
    assert (call.split, call.several) == (False, True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*CLIENT_LIMIT_FIELDS, "model", "prompt", "messages", "temperature", "seed", "user", "ü"])


@given(st.dictionaries(names, json_values))
def test_bodies_hold_the_clients_values(fields: dict[str, Any]) -> None:
    """Whatever a client sends: nothing of it is changed or lost between the two legs, valid or not."""
    call = legs.parse(paths.COMPLETIONS, json.dumps(fields).encode(), RNG)
    plain = json.loads(call.plain())
    if fields.get("seed") is None:
        assert isinstance(plain.pop("seed"), int)
        fields.pop("seed", None)
    assert {name: plain[name] for name in fields} == fields
    prefill = json.loads(call.prefill())
    params = prefill.pop("kv_transfer_params")
    assert params.pop("do_remote_decode") is True
    client = params.pop("client")
    msgspec.convert(client, ClientLimits)
    assert not params
    assert prefill.pop("max_tokens") == 1
    prefill.pop("seed")
    assert {**prefill, **client} == {name: value for name, value in fields.items() if name != "seed"}
    raw = b'{"first": null, "x" : [1,  2]}'
    decode = call.decode(msgspec.Raw(raw))
    assert raw in decode
    message = msgspec.json.decode(
        call.resume(created=5, prompt_tokens=7, cached_tokens=2, output_ids=[1, 2]), type=ContinueRequest
    )
    assert (message.created, message.prompt_tokens, message.cached_tokens, message.output_ids) == (5, 7, 2, [1, 2])
    assert message.path == paths.COMPLETIONS
    assert {name: message.request[name] for name in fields} == fields


def test_large_numbers_pass_unchanged() -> None:
    call = legs.parse(
        paths.COMPLETIONS, b'{"seed": 123456789012345678901234567890, "top_p": 0.10000000000000000001}', RNG
    )
    assert b"123456789012345678901234567890" in call.plain()
    assert b"0.10000000000000000001" in call.plain()


@pytest.mark.parametrize("field", ["null", "{}", "1"])
def test_clients_may_not_send_params(field: str) -> None:
    with pytest.raises(ApiError) as refused:
        legs.parse(paths.CHAT, b'{"kv_transfer_params": ' + field.encode() + b"}", RNG)
    assert (refused.value.status, refused.value.body.param) == (400, "kv_transfer_params")


def test_handoff() -> None:
    first = b'{"token_id":4,"finish_reason":null,"delta":["a"],"state":{"output_ids":[4]}}'
    raw = b'{"remote_block_ids":[1,2], "first":' + first + b"}"
    handoff = legs.read_handoff(b'{"choices": [], "kv_transfer_params": ' + raw + b"}")
    assert handoff is not None
    assert bytes(handoff.raw) == raw
    assert (handoff.delta, handoff.first_ids, handoff.finished) == (["a"], [4], False)


def test_handoff_of_another_engine() -> None:
    """vLLM's params: no first token, fields we do not know."""
    handoff = legs.read_handoff(b'{"kv_transfer_params": {"do_remote_prefill": true, "transfer_mode": "pull"}}')
    assert handoff is not None
    assert (handoff.delta, handoff.first_ids, handoff.finished) == (None, [], False)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 3}', b"[]"])
def test_no_handoff(body: bytes) -> None:
    assert legs.read_handoff(body) is None


def test_our_own_params_can_be_read() -> None:
    params = msgspec.json.encode({"kv_transfer_params": KVTransferParams(compat_hash="h", prompt_tokens=9, created=1)})
    handoff = legs.read_handoff(params)
    assert handoff is not None
    assert (handoff.params.compat_hash, handoff.params.prompt_tokens) == ("h", 9)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a": 1,  "kv_transfer_params": {"x": 1}}', b'{"a":1}'),
        (b'{"a":  1}', b'{"a":  1}'),
        (b'not json "kv_transfer_params"', b'not json "kv_transfer_params"'),
    ],
)
def test_without_params(body: bytes, shown: bytes) -> None:
    assert legs.without_params(body) == shown


def test_token_estimate() -> None:
    estimate = TokenEstimate()
    text = parse(prompt="x" * 398)
    assert estimate.tokens(text) == 100
    for _ in range(100):
        estimate.learn(text, 200)
    assert estimate.tokens(text) == pytest.approx(200, abs=2)
    assert estimate.tokens(parse(prompt=list(range(321)))) == 321
    assert estimate.tokens(parse()) == 1


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({}, 256), ({"max_tokens": 9}, 9), ({"max_tokens": 9, "max_completion_tokens": 8}, 8), ({"max_tokens": "x"}, 256),
     ({"max_tokens": -5}, 256), ({"max_tokens": 10**30}, 256)],
)  # fmt: skip
def test_output_tokens(fields: dict[str, Any], tokens: int) -> None:
    assert parse(**fields).output_tokens() == tokens
