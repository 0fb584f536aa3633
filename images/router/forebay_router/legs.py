"""A client's request and the bodies made of it for the legs. Values stay raw JSON: the worker judges them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import msgspec

from forebay_wire import paths, prefix
from forebay_wire.errors import ApiError, bad_json
from forebay_wire.messages import ContinueRequest
from forebay_wire.transfer import CLIENT_LIMIT_FIELDS, ClientLimits

Raw = msgspec.Raw

_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode

_NULL = b"null"
_MANY_PROMPTS = re.compile(rb'\[\s*["\[]')
_MAX_SEED = 2**31 - 1
_DEFAULT_OUTPUT_TOKENS = 256
"""Room assumed for an answer whose length the client did not bound, when a decode worker is chosen."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


@dataclass(slots=True)
class ClientCall:
    """One parsed request."""

    path: str
    fields: dict[str, Raw]
    stream: bool
    split: bool
    """May run its two phases on two workers. Not: several answers, or anything about the prompt's own tokens."""

    several: bool
    """Its stream interleaves more than one answer."""

    _plain: bytes = field(default=b"", repr=False)
    _beginnings: prefix.Beginnings | None = field(default=None, repr=False)

    @property
    def model(self) -> str | None:
        """The named model; None when there is none, or something else than a string (the worker says what is wrong)."""
        try:
            return msgspec.json.decode(self.fields["model"], type=str)
        except (KeyError, msgspec.DecodeError):
            return None

    def prompt_size(self) -> tuple[int, bool]:
        """Size of the prompt, and whether that is tokens (True) or bytes."""
        raw = bytes(self.fields.get("messages" if self.path == paths.CHAT else "prompt", b"")).strip()
        if raw.startswith(b"[") and raw[1:].lstrip()[:1].isdigit():
            return raw.count(b",") + 1, True
        return len(raw), False

    @property
    def beginnings(self) -> prefix.Beginnings:
        """Of its prompt; nothing where there are several prompts."""
        if self._beginnings is None:
            self._beginnings = prefix.NOTHING if _many_prompts(self.fields) else prefix.beginnings(self.fields)
        return self._beginnings

    def output_tokens(self) -> int:
        """The answer's bound, or a guess."""
        for name in ("max_completion_tokens", "max_tokens"):
            raw = bytes(self.fields.get(name, _NULL))
            if raw.isdigit() and len(raw) < 10:
                return int(raw)
        return _DEFAULT_OUTPUT_TOKENS

    def asks_usage(self) -> bool:
        """Whether a chunk with the usage comes after the answer's last."""
        try:
            options = msgspec.json.decode(self.fields.get("stream_options", _NULL), type=_StreamOptions | None)
        except (msgspec.DecodeError, RecursionError):
            return False
        return options is not None and options.include_usage is True

    def plain(self) -> bytes:
        """Both phases on one worker: the client's body with the seed fixed."""
        if not self._plain:
            self._plain = _encode(self.fields)
        return self._plain

    def prefill(self) -> bytes:
        limits = ClientLimits(**{name: self.fields[name] for name in CLIENT_LIMIT_FIELDS if name in self.fields})
        kept = {name: value for name, value in self.fields.items() if name not in CLIENT_LIMIT_FIELDS}
        return _encode({**kept, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "client": limits}})

    def decode(self, params: Raw) -> bytes:
        return _encode({**self.fields, "kv_transfer_params": params})

    def resume(self, *, created: int, prompt_tokens: int | None, cached_tokens: int, output_ids: list[int]) -> bytes:
        """Body of /internal/continue."""
        return _encode(
            ContinueRequest(
                path=self.path,
                request=self.fields,
                created=created,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_ids=output_ids,
            )
        )


def parse(path: str, body: bytes, rng: random.Random) -> ClientCall:
    """Read a client's body. Raises ApiError 400 when it is no JSON object or carries what only the router may say."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_json(body, error) from error
    if "kv_transfer_params" in fields:
        raise ApiError(
            400,
            "kv_transfer_params is between the router and its workers; leave it out",
            param="kv_transfer_params",
        )
    if _absent(fields, "seed"):
        # A worker that goes on with another's answer must draw the same random numbers.
        fields["seed"] = Raw(b"%d" % rng.randint(0, _MAX_SEED))
    several = not (_one(fields, "n") and _one(fields, "best_of")) or _many_prompts(fields)
    about_prompt = _is(fields, "echo", b"true") or not _absent(fields, "prompt_logprobs")
    return ClientCall(path, fields, _is(fields, "stream", b"true"), not (several or about_prompt), several)


def _is(fields: dict[str, Raw], name: str, value: bytes) -> bool:
    return name in fields and bytes(fields[name]) == value


def _absent(fields: dict[str, Raw], name: str) -> bool:
    return name not in fields or bytes(fields[name]) == _NULL


def _one(fields: dict[str, Raw], name: str) -> bool:
    return _absent(fields, name) or bytes(fields[name]) == b"1"


def _many_prompts(fields: dict[str, Raw]) -> bool:
    return _MANY_PROMPTS.match(fields.get("prompt", b"")) is not None


class State(msgspec.Struct):
    output_ids: list[int] = []


class First(msgspec.Struct):
    """What the router reads of `first`; the rest passes through unread."""

    token_id: int = 0
    finish_reason: str | None = None
    delta: list[str] | None = None
    state: State | None = None


class Params(msgspec.Struct):
    """What the router reads of kv_transfer_params. Lenient: other engines send other fields."""

    compat_hash: str | None = None
    created: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first: First | None = None


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: Raw = Raw(_NULL)


@dataclass(frozen=True, slots=True)
class HandOff:
    """What a prefill leg left for the decode leg."""

    raw: Raw
    """kv_transfer_params, byte for byte."""

    params: Params

    @property
    def delta(self) -> list[str] | None:
        return self.params.first.delta if self.params.first else None

    @property
    def finished(self) -> bool:
        """The first token ended the answer."""
        return self.params.first is not None and self.params.first.finish_reason is not None

    @property
    def first_ids(self) -> list[int]:
        first = self.params.first
        if first is None:
            return []
        return list(first.state.output_ids) if first.state else [first.token_id]


def read_handoff(body: bytes) -> HandOff | None:
    """The params in a prefill leg's answer; None when it carries none that can be read."""
    try:
        raw = msgspec.json.decode(body, type=_PrefillReply).kv_transfer_params
        if bytes(raw) == _NULL:
            return None
        return HandOff(raw.copy(), msgspec.json.decode(raw, type=Params))
    except (msgspec.DecodeError, RecursionError):
        return None


def without_params(body: bytes) -> bytes:
    """A worker's answer as the client may see it."""
    if b'"kv_transfer_params"' not in body:
        return body
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    fields.pop("kv_transfer_params", None)
    return _encode(fields)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Usage(msgspec.Struct):
    usage: Usage | None = None


def read_usage(body: bytes) -> Usage | None:
    try:
        return msgspec.json.decode(body, type=_Usage).usage
    except (msgspec.DecodeError, RecursionError):
        return None
