"""What makes a request a prefill leg, a decode leg or a continuation: reading and writing kv_transfer_params. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay_engine.core.handle import CoreInfo
from forebay_engine.server.plan import Plan
from forebay_engine.server.schema import refusal
from forebay_engine.types import HoldInfo, PullSource
from forebay_wire.errors import ApiError
from forebay_wire.transfer import (
    CLIENT_LIMIT_FIELDS,
    BadParams,
    FirstToken,
    KVTransferParams,
    StreamState,
    prompt_hash,
    sign,
    verify,
)

FIELD = "kv_transfer_params"
VALIDITY_SECONDS = 3600.0
"""How long a decode leg may come after its prefill leg; the lease, far shorter, is judged by its owner."""

_MAX_BLOCK_ID = 2**31 - 1


def read_params(value: object) -> KVTransferParams:
    """The request's kv_transfer_params. Raises ApiError naming the field inside it."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{FIELD}: expected an object, got {type(value).__name__}", param=FIELD)
    try:
        return msgspec.convert(value, KVTransferParams)
    except msgspec.ValidationError as error:
        found = refusal(error, value)
        name = f"{FIELD}.{found.body.param}" if found.body.param else FIELD
        raise ApiError(400, f"{FIELD}: {found}", param=name) from error


def clients_body(body: Mapping[str, Any], params: KVTransferParams) -> dict[str, Any]:
    """The body as the client wrote it, of a prefill leg's body and the limits that travel beside it.

    Without `client` (another engine's router) the client's limits are unknown: none is assumed, and the decode worker
    judges them.
    """
    kept = {name: value for name, value in body.items() if name not in CLIENT_LIMIT_FIELDS}
    if params.client is not None:
        for name in CLIENT_LIMIT_FIELDS:
            value = getattr(params.client, name)
            if value is not msgspec.UNSET:
                kept[name] = value
    return kept


def check_single(plan: Plan, what: str) -> None:
    """Legs and continuations carry one answer to one prompt."""
    if plan.choices != 1:
        raise ApiError(
            400, f"{what}: {plan.choices} answers in one request; run both phases on one worker", param=FIELD
        )
    if plan.echo_texts is not None and what != "continuation":
        raise ApiError(400, f"{what}: echo needs both phases on one worker", param=FIELD)


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prefill leg's outcome."""

    request_id: str
    created: int
    now_unix: float
    cached_tokens: int
    first: FirstToken
    hold: HoldInfo | None


def signed_params(
    plan: Plan, handoff: Handoff, info: CoreInfo, *, host: str, port: int, secret: bytes
) -> KVTransferParams:
    """What the decode leg needs; without a hold only `first`, since the answer ended."""
    prompt = plan.prompts[0]
    params = KVTransferParams(
        remote_request_id=handoff.request_id,
        compat_hash=info.compat_hash,
        expires_unix=handoff.now_unix + VALIDITY_SECONDS,
        model=plan.model,
        created=handoff.created,
        prompt_tokens=len(prompt),
        prompt_hash=prompt_hash(prompt),
        cached_tokens=handoff.cached_tokens,
        first=handoff.first,
    )
    if handoff.hold is not None:
        params.do_remote_prefill = True
        params.remote_engine_id = info.engine_id
        params.remote_block_ids = handoff.hold.block_ids
        params.remote_num_tokens = handoff.hold.num_tokens
        params.remote_host = host
        params.remote_port = port
        params.lease_epoch = handoff.hold.epoch
        params.lease_seconds = handoff.hold.lease_seconds
    return sign(params, secret)


def verify_params(params: KVTransferParams, secret: bytes, *, request_id: str, now_unix: float) -> None:
    try:
        verify(params, secret, request_id=request_id, now_unix=now_unix)
    except BadParams as error:
        raise ApiError(400, str(error), param=FIELD) from error


def check_decode(params: KVTransferParams, plan: Plan, info: CoreInfo) -> None:
    """Refuse params that are genuine but not for this worker or this request, with both values."""
    prompt = plan.prompts[0]
    _equal("model", params.model, plan.model)
    _equal("compat_hash", params.compat_hash, info.compat_hash)
    _equal("prompt_tokens", params.prompt_tokens, len(prompt))
    _equal("prompt_hash", params.prompt_hash, prompt_hash(prompt))
    _equal("remote_num_tokens", params.remote_num_tokens, len(prompt))
    if params.first is not None:
        if params.first.finish_reason is not None:
            raise _refused("first.finish_reason", f"the answer ended in prefill ({params.first.finish_reason})")
        check_output_ids(params.first.state.output_ids, info, f"{FIELD}.first.state.output_ids")
        logprobs = params.first.state.logprobs
        if plan.params.logprobs is not None and len(logprobs or []) != len(params.first.state.output_ids):
            raise _refused("first.state.logprobs", "one per output id is needed, the request asks for logprobs")


def check_output_ids(ids: list[int], info: CoreInfo, field: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < info.vocab_size), None)
    if wrong is not None:
        raise ApiError(400, f"{field}: token id {wrong} is not in 0..{info.vocab_size - 1}", param=field)


def pull_source(params: KVTransferParams) -> PullSource:
    """Where the KV lies, of verified params. Raises ApiError when a part is missing."""
    blocks = params.remote_block_ids
    if not blocks or any(not 0 <= block <= _MAX_BLOCK_ID for block in blocks):
        raise _refused("remote_block_ids", "a list of block ids is needed")
    if len(set(blocks)) < len(blocks):
        raise _refused(
            "remote_block_ids", f"{len(blocks)} ids, {len(set(blocks))} of them different: none may come twice"
        )
    if params.remote_port is None or not 0 < params.remote_port < 65536:
        raise _refused("remote_port", f"not a port: {params.remote_port}")
    if (
        params.remote_engine_id is None
        or params.remote_request_id is None
        or params.remote_host is None
        or params.remote_num_tokens is None
        or params.lease_epoch is None
        or params.lease_seconds is None
        or params.compat_hash is None
    ):
        raise _refused("remote_engine_id", "the address of the KV and its lease must be complete")
    return PullSource(
        engine_id=params.remote_engine_id,
        request_id=params.remote_request_id,
        host=params.remote_host,
        port=params.remote_port,
        block_ids=blocks,
        num_tokens=params.remote_num_tokens,
        epoch=params.lease_epoch,
        compat_hash=params.compat_hash,
        lease_seconds=params.lease_seconds,
    )


def first_state(params: KVTransferParams) -> StreamState:
    return params.first.state if params.first is not None else StreamState(output_ids=[])


def _equal(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise _refused(field, f"{theirs!r} there, {ours!r} here")


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{FIELD}.{field}: {why}", param=f"{FIELD}.{field}")
