"""Prefix keys: names for the beginnings of a prompt, made of its bytes, so that a router need not tokenise.

A chained hash over the prompt's bytes, cut where two prompts with the same beginning are cut alike: at message ends,
and every 1/16 of the way so far. Router and workers compute the same keys from the same body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

FIRST_STEP = 256
"""Bytes of the shortest part, about four KV blocks of text."""

STEP_SHARE = 16
"""A part is 1/16 of the bytes before it: at most 6 % of a shared beginning is not seen, and 8 MiB have 200 keys."""

_ROOT = b"forebay/prefix"


class PrefixKey(NamedTuple):
    end: int
    """Bytes of the prompt that it names."""

    key: int
    """64 bits. A collision costs a poor choice of worker, no more: the KV cache has keys of its own."""


class PrefixEntry(msgspec.Struct, array_like=True, frozen=True):
    """One beginning whose KV a worker has."""

    key: int
    tokens: int


def keys_of(messages: Iterable[bytes]) -> list[PrefixKey]:
    """Keys of the beginnings of the concatenated `messages`, shortest first.

    A message's end is a cut unless the part would be shorter than a quarter of the step: a conversation of many short
    messages stays bounded too.
    """
    keys: list[PrefixKey] = []
    digest, end, part = _ROOT, 0, bytearray()

    def cut(data: bytes) -> None:
        nonlocal digest, end
        digest = hashlib.blake2b(digest + data, digest_size=8).digest()
        end += len(data)
        keys.append(PrefixKey(end, int.from_bytes(digest, "big")))

    for message in messages:
        part += message
        while len(part) >= (step := _step(end)):
            cut(bytes(part[:step]))
            del part[:step]
        if len(part) * 4 >= _step(end):
            cut(bytes(part))
            part.clear()
    return keys


def _step(end: int) -> int:
    return max(FIRST_STEP, end // STEP_SHARE)


def messages_of(fields: Mapping[str, msgspec.Raw]) -> list[bytes]:
    """The prompt of a request body, in raw JSON, as the parts whose ends may be cuts. Empty: there is none to tell.

    The closing bracket or quote is left out: a longer prompt has other bytes there.
    """
    if "messages" in fields:
        try:
            return [bytes(message) for message in msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])]
        except (msgspec.DecodeError, RecursionError):
            # How deep JSON may be depends on the caller's depth: a body that was read before may be too deep here.
            return []
    return [bytes(fields["prompt"]).strip()[:-1]] if "prompt" in fields else []


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The named beginnings of one prompt."""

    keys: list[PrefixKey]
    """Shortest first."""

    size: int
    """Bytes of the whole prompt."""

    @property
    def names(self) -> list[int]:
        return [key.key for key in self.keys]

    def entries(self, prompt_tokens: int, *, answer_tokens: int = 0) -> list[PrefixEntry]:
        """The beginnings of a prompt of `prompt_tokens` tokens, each with its share of them. Whoever also has the KV
        of the answer has more than the prompt when a later one goes on from its end."""
        entries = [PrefixEntry(key, prompt_tokens * end // self.size) for end, key in self.keys]
        if answer_tokens and self.keys[-1:] and self.keys[-1].end == self.size:
            entries[-1] = PrefixEntry(self.keys[-1].key, prompt_tokens + answer_tokens)
        return entries


NOTHING = Beginnings([], 0)


def beginnings(fields: Mapping[str, msgspec.Raw]) -> Beginnings:
    """Of the prompt in a request body."""
    messages = messages_of(fields)
    return Beginnings(keys_of(messages), sum(map(len, messages)))
