"""What passes between the parts of a worker: server -> core -> scheduler -> executor, and back.

The messages between server and core (EngineRequest, Abort, ... and the events) are msgspec structs because they cross a
process border; the rest is plain data inside the core process.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from forebay_wire.transfer import TokenLogprob


class SamplingParams(msgspec.Struct, frozen=True):
    """Validated by the server; the core trusts them. Stop strings are the server's matter (it has the text)."""

    temperature: float = 1.0
    """0 means greedy."""

    top_p: float = 1.0
    top_k: int = 0
    """0: off."""

    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Index of the answer when n > 1; with seed and position it names one random number."""

    max_tokens: int = 16
    """Output tokens at most, those in `output_ids` included."""

    min_tokens: int = 0
    """Until then no stop id ends the answer (they are masked out)."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer, the model's end-of-sequence ids included unless ignore_eos. finish_reason "stop"."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """OpenAI's two count output ids; repetition counts prompt and output ids (as Hugging Face and vLLM)."""

    logprobs: int | None = None
    """Number of top alternatives to report for each output token; None: no logprobs. Raw log-softmax, before
    temperature, penalties and filters (as vLLM's default)."""

    prompt_logprobs: int | None = None


class PullSource(msgspec.Struct, frozen=True):
    """Where a decode request's KV lies. Comes from verified kv_transfer_params."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: list[int]
    num_tokens: int
    epoch: int
    compat_hash: str
    lease_seconds: float


class EngineRequest(msgspec.Struct, tag=True):
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = []
    """Already part of the answer: sampled by prefill, or by a worker that died. Never emitted again."""

    hold: bool = False
    """Prefill leg: sample one token, then lease out the prompt's blocks (unless that token ends the answer)."""

    pull: PullSource | None = None
    """Decode leg: fetch the prompt's KV before the first step; when that fails, compute it here."""

    step_seconds: float = 0.0
    """The longest step it is to decode in: prompts computed beside it get chunks to match. 0: any."""

    wait_seconds: float = 0.0
    """Its prompt is to be computed within this, or else refused with a 429 at once. 0: whenever."""


class Abort(msgspec.Struct, tag=True):
    """Stop a request, free its blocks, release its lease. Unknown ids are ignored."""

    request_id: str
    receipt: int | None = None
    """The reader has left, and asks for an AbortDone with this number. None: a reader, if any, gets an "abort"."""


class SetDraining(msgspec.Struct, tag=True):
    draining: bool


class HoldInfo(msgspec.Struct, frozen=True):
    """Where the held blocks are; the server makes kv_transfer_params of it."""

    block_ids: list[int]
    num_tokens: int
    epoch: int
    lease_seconds: float


class TokenEvent(msgspec.Struct, tag=True):
    """New tokens of one request. `finish_reason` (stop | length | abort) ends it; the token that did is included."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    """With the first event: prompt tokens whose KV was found here."""

    prompt_logprobs: list[TokenLogprob] | None = None
    """With the first event, one per prompt token from the second on."""

    hold: HoldInfo | None = None


class FailEvent(msgspec.Struct, tag=True):
    """The request ended without an answer; only this request is touched."""

    request_id: str
    status: int
    message: str
    retry_after_seconds: float | None = None


class AbortDone(msgspec.Struct, tag=True):
    """Answers every Abort that has a receipt, after the request's last event: from here on its id means another one."""

    request_id: str
    receipt: int


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What the sampler needs for one sequence's next token."""

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    """All output ids so far; position of the new token in the answer = len(output_ids)."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step: run `token_ids` at positions start, start + 1, ...

    `block_table` lists the arena blocks of positions 0 .. at least start + len(token_ids) - 1, block_size each.
    KV of positions < start is in the arena already. `sample` is set when the last of `token_ids` is the sequence's last
    known token, so that its logits give a new one.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: SampleSpec | None
    prompt_logprobs: int | None = None
    next_token: int | None = None
    """With prompt_logprobs, where the prompt goes on after `token_ids`: its next id, so that a chunk's last position
    can be scored too."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result for one SequenceStep. `token_id` is None where nothing was to be sampled."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of prompt tokens start + 1 .. start + n (those that lie in the prompt)."""


@dataclass(eq=False, slots=True)
class UnsettledRead:
    """A read that was given up and may still write to its local blocks until `over`, which the transport sets."""

    over: bool = False
