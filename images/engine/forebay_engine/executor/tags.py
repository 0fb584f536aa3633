"""What the simulated engine stores instead of KV: a 16-byte tag per block, and the tokens that follow from tags.

A block's tag is a function of the tag read from the block before it and of the token ids in the block so far. The next
token is a function of the tags read from all of a sequence's blocks. So text is right only when every block holds what
this sequence's prefix would have put there: a lost, stale or foreign block changes it. How the tokens were cut into
steps does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from forebay_engine.types import SamplingParams
from forebay_wire.transfer import TokenLogprob

TAG_BYTES = 16
VOCAB_SIZE = 260
"""Ids of the simulated model: 256 bytes and 4 special ids, as text/simulated.py has them."""

PRINTABLE = range(32, 127)
"""Ids that answers are made of: printable ASCII."""

_PRIME = (1 << 127) - 1
_FACTOR = 0x5851F42D4C957F2D14057B7EF767814F


def open_block(previous: bytes | None) -> bytes:
    """Tag of a block with no token yet. `previous` is the tag of the block before it, None for the first block."""
    return hashlib.blake2b(previous or b"", digest_size=TAG_BYTES, person=b"forebay-block").digest()


def extend(tag: bytes, token_ids: Sequence[int]) -> bytes:
    """Tag after further tokens in the same block; extend(extend(t, a), b) == extend(t, a + b)."""
    value = int.from_bytes(tag, "little")
    for token in token_ids:
        # Multiplication keeps the order of tokens in the value; a hash per token would cost ten times as much.
        value = ((value + token + 1) * _FACTOR) % _PRIME
    return value.to_bytes(TAG_BYTES, "little")


def sample(tags: bytes, params: SamplingParams, position: int) -> tuple[int, TokenLogprob | None]:
    """The token at `position` of the answer (0-based), from the concatenated tags of all blocks of the context.

    With temperature 0 it depends on the tags alone, else on (seed, choice, position) too. Below min_tokens it is never
    a stop id. The log-probabilities are made up, but are a function of the tags as well.
    """
    noise = b"" if params.temperature == 0 else b"%d %d %d" % (params.seed, params.choice, position)
    digest = hashlib.blake2b(tags, digest_size=16, key=noise[:64], person=b"forebay-token").digest()
    size = len(PRINTABLE)
    index = int.from_bytes(digest[:8], "little") % size
    if position < params.min_tokens:
        banned = set(params.stop_token_ids)
        for step in range(size):
            if PRINTABLE[(index + step) % size] not in banned:
                index = (index + step) % size
                break
    logprob = None
    if params.logprobs is not None:
        first = -(1 + digest[8]) / 256
        top = [(PRINTABLE[(index + i) % size], first - 0.25 * i) for i in range(min(params.logprobs, size))]
        logprob = TokenLogprob(PRINTABLE[index], first, top)
    return PRINTABLE[index], logprob


def score(tag: bytes, token: int, count: int) -> TokenLogprob:
    """A made-up log-probability of a prompt token, from the tag of the context before it."""
    digest = hashlib.blake2b(tag + token.to_bytes(4, "little"), digest_size=2).digest()
    logprob = -(1 + digest[0]) / 256
    top = [(token, logprob)] + [
        (PRINTABLE[(digest[1] + i) % len(PRINTABLE)], logprob - 1 - i) for i in range(count - 1)
    ]
    return TokenLogprob(token, logprob, top[:count])
