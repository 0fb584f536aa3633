"""Which beginnings of prompts a worker has KV of, as far as this router knows. Pure, bounded.

Filled by the answers this router relays and by the workers' load streams, which tell of other routers' requests too.
Forgets as the workers' own caches do: the least recently used first, once what it lists exceeds the worker's KV cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from forebay_wire.prefix import PrefixEntry

MAX_KEYS = 8192
"""Of one worker: about 2 MB."""


class PrefixCache:
    """One worker process's beginnings. A key is never older than the longer ones that begin with it, so what is known
    of a prompt is always an unbroken run of its shortest keys."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._entries: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """key -> (tokens of the beginning, tokens it has beyond the one before). Least recently used first."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens listed, shared beginnings once."""
        return self._tokens

    def learn(self, entries: Sequence[PrefixEntry], capacity_tokens: int) -> None:
        """The worker has the KV of all these beginnings of one prompt, shortest first."""
        before = 0
        own: list[int] = []
        for entry in entries:
            own.append(max(0, entry.tokens - before))
            before = max(before, entry.tokens)
        for entry, more in zip(reversed(entries), reversed(own), strict=True):
            held = self._entries.pop(entry.key, None)
            if held is not None:
                self._tokens -= held[1]
            self._entries[entry.key] = (entry.tokens, more)
            self._tokens += more
        while self._entries and (len(self._entries) > self._max_keys or self._tokens > capacity_tokens > 0):
            _, (_, more) = self._entries.popitem(last=False)
            self._tokens -= more

    def cached(self, keys: Sequence[int]) -> int:
        """Tokens of the longest beginning of a prompt that is known. `keys` are the prompt's, shortest first."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._entries:
                low = middle + 1
            else:
                high = middle
        return self._entries[keys[low - 1]][0] if low else 0
