"""Token ids to text, one id at a time, never showing half a character.

What a detokeniser has shown is a function of the ids alone, however they were split over events: a worker that takes
over an answer replays them and goes on exactly there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that `token_id` makes certain; empty while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end of the answer: an incomplete character shows as U+FFFD."""

    @property
    def pending(self) -> bool:
        """True while bytes of an incomplete character are held back."""


class ByteDetokenizer:
    """Exact for tokenisers whose tokens are byte strings (byte-level BPE)."""

    def __init__(self, visible_bytes: Callable[[int], bytes]) -> None:
        """`visible_bytes` gives a token's bytes; empty for special tokens, which are never shown."""
        self._bytes = visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])


class WindowDetokenizer:
    """For any other decoder (SentencePiece style): decodes a short window twice and shows the difference.

    The window's first part gives context: such decoders strip or add a space depending on what stands before.
    """

    LONGEST_CHARACTER = 8
    """Tokens: twice the bytes of a UTF-8 character, each of which may be a token of its own. A window that still ends
    in U+FFFD after so many holds invalid bytes, not an unfinished character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0
        """Ids of the window whose text was shown."""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    @property
    def pending(self) -> bool:
        return self._shown < len(self._ids)

    def _advance(self, *, final: bool) -> str:
        if not self.pending:
            return ""
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        waited = len(self._ids) - self._shown
        if text.endswith(REPLACEMENT) and not final and waited < self.LONGEST_CHARACTER:
            return ""
        if len(text) > len(before) or final:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        elif waited >= self.LONGEST_CHARACTER:  # nothing but tokens without text: keep the context, drop them
            self._ids = self._ids[: self._shown]
        return text[len(before) :]
