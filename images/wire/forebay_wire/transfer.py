"""`kv_transfer_params`: what the prefill leg hands to the decode leg through the router.

The field names without a note are vLLM's (NixlConnector), so that vLLM pools work behind the same router. The router
passes the object on unchanged; a worker trusts it only with a valid signature (design section 4, "Trust").
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec


class ClientLimits(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The client's fields that the prefill leg replaces; prefill validates these, not its own `max_tokens: 1`.

    A field the client did not send stays UNSET. Values are unvalidated JSON: the worker judges them.
    """

    max_tokens: Any = msgspec.UNSET
    max_completion_tokens: Any = msgspec.UNSET
    stream: Any = msgspec.UNSET
    stream_options: Any = msgspec.UNSET
    min_tokens: Any = msgspec.UNSET
    n: Any = msgspec.UNSET
    best_of: Any = msgspec.UNSET


CLIENT_LIMIT_FIELDS = tuple(f.name for f in msgspec.structs.fields(ClientLimits))


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability of a sampled token (natural log) and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class StreamState(msgspec.Struct, forbid_unknown_fields=True):
    """All a worker needs to go on with an answer: everything else (detokeniser, stop window, penalty counts, RNG
    position) is a function of the request and these ids, and is replayed."""

    output_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One per output id when the client asked for logprobs, else null."""


class FirstToken(msgspec.Struct, forbid_unknown_fields=True):
    """The first token, sampled by prefill."""

    token_id: int
    finish_reason: str | None
    """Set when the answer ends here: then there is no decode leg and no lease."""

    delta: list[str] | None
    """SSE data payloads (JSON text) to stream at once, in order; null while text must be held back."""

    state: StreamState


class KVTransferParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1
    remote_num_tokens: int | None = None
    """Tokens whose KV lies in the blocks (the whole prompt)."""

    client: ClientLimits | None = None
    """Request to prefill only (ours)."""

    compat_hash: str | None = None
    """KV compatibility hash of the prefill worker (ours, as all below)."""

    lease_epoch: int | None = None
    lease_seconds: float | None = None
    expires_unix: float | None = None
    """Wall-clock end of these params' validity, seconds; far beyond the lease, which the owner alone judges."""

    model: str | None = None
    created: int | None = None
    """Unix seconds: the answer's one `created`, and the "now" of the chat template."""

    prompt_tokens: int | None = None
    prompt_hash: str | None = None
    """`prompt_hash()` of the prompt ids; decode refuses params whose prompt differs from its own."""

    cached_tokens: int | None = None
    first: FirstToken | None = None
    signature: str | None = None


def prompt_hash(prompt_ids: list[int]) -> str:
    """Hex digest of a prompt's token ids."""
    return hashlib.blake2b(b",".join(b"%d" % t for t in prompt_ids), digest_size=16).hexdigest()


_ENCODER = msgspec.json.Encoder(order="deterministic")


def _digest(params: KVTransferParams, secret: bytes) -> str:
    unsigned = msgspec.structs.replace(params, signature=None)
    return hmac.new(secret, b"forebay/kv_transfer_params\0" + _ENCODER.encode(unsigned), hashlib.sha256).hexdigest()


def sign(params: KVTransferParams, secret: bytes) -> KVTransferParams:
    """The same params with an HMAC-SHA256 over every other field."""
    return msgspec.structs.replace(params, signature=_digest(params, secret))


class BadParams(ValueError):
    """kv_transfer_params a worker must refuse; the text says which check failed and both values where that helps."""


def verify(params: KVTransferParams, secret: bytes, *, request_id: str, now_unix: float) -> None:
    """Raise BadParams unless the params were signed with `secret`, for this request id, and are not past expiry."""
    if params.signature is None or not hmac.compare_digest(params.signature, _digest(params, secret)):
        raise BadParams("kv_transfer_params.signature does not match its content")
    if params.remote_request_id != request_id:
        raise BadParams(f"kv_transfer_params are for request {params.remote_request_id!r}, not {request_id!r}")
    if params.expires_unix is None or now_unix > params.expires_unix:
        raise BadParams(f"kv_transfer_params expired at {params.expires_unix}, now is {now_unix:.0f}")
