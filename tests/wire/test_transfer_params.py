import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire.transfer import (
    BadParams,
    FirstToken,
    KVTransferParams,
    StreamState,
    prompt_hash,
    sign,
    verify,
)

SECRET = b"a per-model secret"
NOW = 1_700_000_000.0


def params(**changes):
    full = KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="engine-1",
        remote_request_id="req-1",
        remote_block_ids=[3, 4, 9],
        remote_host="10.0.0.1",
        remote_port=8000,
        remote_num_tokens=33,
        compat_hash="abc",
        lease_epoch=7,
        lease_seconds=30.0,
        expires_unix=NOW + 600,
        model="m",
        created=int(NOW),
        prompt_tokens=33,
        prompt_hash=prompt_hash([1, 2, 3]),
        cached_tokens=0,
        first=FirstToken(token_id=5, finish_reason=None, delta=['{"a":1}'], state=StreamState(output_ids=[5])),
    )
    return msgspec.structs.replace(full, **changes)


def through_json(signed):
    return msgspec.json.decode(msgspec.json.encode(signed), type=KVTransferParams)


def test_signed_params_survive_json():
    verify(through_json(sign(params(), SECRET)), SECRET, request_id="req-1", now_unix=NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [3, 4, 10]},
        {"remote_engine_id": "engine-2"},
        {"remote_host": "10.0.0.2"},
        {"lease_epoch": 8},
        {"model": "other"},
        {"compat_hash": "abd"},
        {"expires_unix": NOW + 6000},
        {"remote_num_tokens": 32},
        {"first": None},
        {"signature": None},
        {"signature": "00"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_changed_field_is_refused(change):
    forged = msgspec.structs.replace(sign(params(), SECRET), **change)
    with pytest.raises(BadParams, match="signature"):
        verify(forged, SECRET, request_id="req-1", now_unix=NOW)


def test_another_secret_is_refused():
    with pytest.raises(BadParams, match="signature"):
        verify(sign(params(), b"other"), SECRET, request_id="req-1", now_unix=NOW)


def test_replay_under_another_request_id_is_refused():
    with pytest.raises(BadParams, match="'req-1', not 'req-2'"):
        verify(sign(params(), SECRET), SECRET, request_id="req-2", now_unix=NOW)


def test_expired_params_are_refused():
    with pytest.raises(BadParams, match="expired"):
        verify(sign(params(), SECRET), SECRET, request_id="req-1", now_unix=NOW + 601)


def test_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.json.decode(b'{"surprise": 1}', type=KVTransferParams)


@given(st.lists(st.integers(0, 10**6)), st.lists(st.integers(0, 10**6)))
def test_prompt_hash_tells_prompts_apart(one, other):
    assert (prompt_hash(one) == prompt_hash(other)) == (one == other)
