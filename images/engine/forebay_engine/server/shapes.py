"""OpenAI's response shapes, as JSON. Field order and null fields are part of the shape."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay_engine.server.answer import Piece
from forebay_engine.server.plan import Plan
from forebay_engine.text.tokenizer import Tokenizer
from forebay_wire.transfer import KVTransferParams, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI's stand-in for it."""


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Delta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class Envelope(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: KVTransferParams | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


_encode = msgspec.json.Encoder().encode


def completion_id(chat: bool, request_id: str) -> str:
    return f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"


class Shapes:
    """Writes the chunks and the body of one request's answer."""

    def __init__(self, plan: Plan, request_id: str, created: int, tokenizer: Tokenizer) -> None:
        self._chat = plan.chat
        self._logprobs = plan.params.logprobs is not None
        self._token_bytes = tokenizer.token_bytes
        self._id = completion_id(plan.chat, request_id)
        self._created = created
        self._model = plan.model
        self._usage: msgspec.UnsetType | None = None if plan.include_usage else msgspec.UNSET

    def _envelope(self, kind: str, choices: list[Any]) -> Envelope:
        return Envelope(self._id, kind, self._created, self._model, choices)

    def _chunk(self, choices: list[Any], used: Usage | msgspec.UnsetType | None) -> bytes:
        envelope = self._envelope("chat.completion.chunk" if self._chat else "text_completion", choices)
        envelope.usage = used
        return _encode(envelope)

    def role_chunk(self, index: int) -> bytes:
        return self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""), None, None)], self._usage)

    def echo_chunk(self, index: int, text: str, logprobs: TextLogprobs | None) -> bytes:
        return self._chunk([TextChoice(index, text, logprobs, None)], self._usage)

    def piece_chunk(self, index: int, piece: Piece, base: int) -> bytes:
        """`base`: characters of an echoed prompt before the answer."""
        choice: ChatChunkChoice | TextChoice
        if self._chat:
            delta = Delta(content=piece.text) if piece.text or piece.finish_reason is None else Delta()
            choice = ChatChunkChoice(index, delta, self.chat_logprobs([piece]), piece.finish_reason)
        else:
            choice = TextChoice(index, piece.text, self.text_logprobs([piece], base), piece.finish_reason)
        return self._chunk([choice], self._usage)

    def usage_chunk(self, used: Usage) -> bytes:
        return self._chunk([], used)

    def body(self, choices: list[ChatChoice | TextChoice], used: Usage, params: KVTransferParams | None) -> bytes:
        envelope = self._envelope("chat.completion" if self._chat else "text_completion", choices)
        envelope.usage = used
        if params is not None:
            envelope.kv_transfer_params = params
        return _encode(envelope)

    def choice(
        self, index: int, text: str, pieces: list[Piece], finish_reason: str, echoed: EchoedPrompt | None
    ) -> ChatChoice | TextChoice:
        if self._chat:
            return ChatChoice(index, ChatMessage("assistant", text), self.chat_logprobs(pieces), finish_reason)
        logprobs = self.text_logprobs(pieces, echoed.length if echoed is not None else 0)
        if echoed is not None:
            text = echoed.text + text
            if logprobs is not None and echoed.logprobs is not None:
                logprobs = _joined(echoed.logprobs, logprobs)
        return TextChoice(index, text, logprobs, finish_reason)

    def chat_logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs([self._chat_logprob(piece.logprob) for piece in pieces if piece.logprob is not None])

    def _chat_logprob(self, entry: TokenLogprob) -> ChatLogprob:
        raw = self._token_bytes(entry.token_id)
        top = [self._top_logprob(token_id, logprob) for token_id, logprob in entry.top]
        return ChatLogprob(raw.decode("utf-8", "replace"), _finite(entry.logprob), list(raw), top)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._token_bytes(token_id)
        return TopLogprob(raw.decode("utf-8", "replace"), _finite(logprob), list(raw))

    def text_logprobs(self, pieces: list[Piece], base: int) -> TextLogprobs | None:
        if not self._logprobs:
            return None
        entries = [(piece.logprob, piece.offset) for piece in pieces if piece.logprob is not None]
        return TextLogprobs(
            text_offset=[base + offset for _, offset in entries],
            token_logprobs=[_finite(entry.logprob) for entry, _ in entries],
            tokens=[self._token_name(entry.token_id) for entry, _ in entries],
            top_logprobs=[self._alternatives(entry) for entry, _ in entries],
        )

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the sampled one even when it isn't among them."""
        return {
            self._token_name(token_id): _finite(lp) for token_id, lp in [*entry.top, (entry.token_id, entry.logprob)]
        }

    def _token_name(self, token_id: int) -> str:
        """A token as text; OpenAI's `bytes:\\x..` for one that isn't whole characters, so that names stay distinct."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def echoed_prompt(
        self, text: str, prompt: list[int], entries: list[TokenLogprob] | None, tokenizer: Tokenizer
    ) -> EchoedPrompt:
        """An echoed prompt; `entries` are the log-probabilities of its tokens from the second on."""
        if not self._logprobs:
            return EchoedPrompt(text, len(text), None)
        detokenizer = tokenizer.detokenizer()
        offsets, offset = [], 0
        for token_id in prompt:
            offsets.append(offset)
            offset += len(detokenizer.push(token_id))
        known = (entries or [])[: len(prompt) - 1]
        missing = len(prompt) - 1 - len(known)
        logprobs = TextLogprobs(
            text_offset=offsets,
            token_logprobs=[None, *(_finite(entry.logprob) for entry in known), *[None] * missing],
            tokens=[self._token_name(token_id) for token_id in prompt],
            top_logprobs=[None, *(self._alternatives(entry) for entry in known), *[None] * missing],
        )
        return EchoedPrompt(text, len(text), logprobs)


class EchoedPrompt(msgspec.Struct):
    text: str
    length: int
    logprobs: TextLogprobs | None


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def json_logprobs(entries: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
    """The same without -inf, which JSON can't carry."""
    if entries is None:
        return None
    return [
        TokenLogprob(entry.token_id, _finite(entry.logprob), [(token_id, _finite(lp)) for token_id, lp in entry.top])
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
