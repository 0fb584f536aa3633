"""Bodies of the workers' internal endpoints (paths.py). All JSON; unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Compatibility(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What must be equal for one worker to read another's KV blocks (design section 4, handshake)."""

    engine_version: str
    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    block_size: int
    layout: str


class Handshake(Message):
    """GET /internal/handshake: how to reach this process's KV arena. `agent` is opaque to all but the transport."""

    engine_id: str
    compatibility: Compatibility
    compat_hash: str
    transport: str
    agent: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    words_address: int = 0
    num_words: int = 0
    """Lease words, 8 bytes each: by one of them a reader sees that a lease stands. 0: it must ask."""

    memory: Literal["DRAM", "VRAM"] = "DRAM"
    """Where the arena is: host memory, or a GPU's. The words are in host memory always."""

    device: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    """Number of that GPU in the arena's process."""


class LeaseRef(Message):
    request_id: str
    epoch: int


class HeartbeatRequest(Message):
    leases: list[LeaseRef]


class HeartbeatResponse(Message):
    extended: list[str]
    """Request ids whose lease was extended to a full period from now."""

    gone: list[str]


class CompleteResponse(Message):
    """POST /internal/leases/complete (body LeaseRef): true when the lease was unbroken from start to now; the blocks
    are freed with the answer. False: the reader must discard what it read, unless it saw the lease's word after it."""

    unbroken: bool


class CancelRequest(Message):
    request_id: str


class ProgressRequest(Message):
    """POST /internal/leases/progress: long poll for finished chunks of a prefill that may still run."""

    request_id: str
    known_blocks: int = 0
    wait_seconds: float = 1.0


class ProgressResponse(Message):
    """`block_ids` are the full blocks computed so far, in order; they stay held while the prefill runs or is leased."""

    state: str
    """`unknown` (not arrived or gone), `running`, `leased`."""

    block_ids: list[int] = []
    epoch: int = 0
    num_tokens: int = 0
    lease_seconds: float = 0.0


class ReserveRequest(Message):
    """POST /internal/reserve at the decode worker, sent beside the prefill leg: keep a slot, pull what is finished."""

    request_id: str
    prefill_host: str
    prefill_port: int
    prompt_tokens: int
    """The router's estimate."""

    ttl_seconds: float


class ReserveResponse(Message):
    admitted: bool
    reason: str = ""
    retry_after_seconds: float = 0.0


class ContinueRequest(Message):
    """POST /internal/continue: go on with an answer that another worker began."""

    path: str
    """`/v1/chat/completions` or `/v1/completions`: the shape of the answer."""

    request: dict[str, Any]
    """The client's body, with the seed the router fixed."""

    created: int
    output_ids: list[int]
    """Every token id of the answer that the client's chunks already cover."""

    prompt_tokens: int | None = None
    """As the prefill worker counted them: another count here means another model. None: no prefill leg told."""

    cached_tokens: int = 0


class DrainRequest(Message):
    draining: bool = True
    move: bool = False
    """Break running answers off, so that the router continues each on another worker."""


class DrainResponse(Message):
    draining: bool
    running: int
    held_blocks: int
