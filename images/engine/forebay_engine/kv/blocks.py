"""The block pool: which KV blocks are free, shared, cached or quarantined. The step thread owns it."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

_ROOT = b"forebay/kv-block"


class PoolError(RuntimeError):
    """The caller broke the reference rules: a bug, never load. Going on would let two sequences share a block."""


def chain_keys(
    token_ids: Sequence[int], block_size: int, *, first_block: int = 0, parent: bytes | None = None
) -> list[bytes]:
    """Keys of the full blocks from `first_block` on: 16-byte BLAKE2b of the parent's key and the block's token ids.

    A key names the whole prefix up to its block's end, because KV at a position depends on every token before it.
    `parent` is the key of block first_block - 1 (None only for block 0). The digest is cryptographic: a collision would
    serve one user's KV to another.
    """
    if (parent is None) != (first_block == 0):
        raise ValueError(
            f"chain_keys: block {first_block} needs the key of the block before it, and only block 0 has none"
        )
    keys = []
    key = parent or _ROOT
    for start in range(first_block * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("I", token_ids[start : start + block_size]).tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=16).digest()
        keys.append(key)
    return keys


class BlockPool:
    """Reference-counted blocks with a prefix cache over token ids.

    Each block is in one of four states:

    - free: no reference, no content worth keeping;
    - cached: no reference, found by its key; evicted in LRU order when the free list is short;
    - used: one reference or more, each by a sequence, a lease or a reservation;
    - quarantined: kept only by quarantine holds (a remote reader may still be reading it).

    A quarantined block's content is intact, so its key stays findable and acquire() makes it used again; what
    quarantine forbids is refilling it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one token, got {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._free: deque[int] = deque(range(num_blocks))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._holds = [0] * num_blocks
        """Quarantine holds per block; two leases that share a prefix may both expire."""
        self._held = 0
        self._until: list[tuple[float, int]] = []
        """Heap of (release time, block), one entry per hold."""
        self._key: list[bytes | None] = [None] * num_blocks
        """Key of the block's content, also where an older block with equal content is the one in the cache."""
        self._by_key: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + len(self._lru)

    @property
    def cached(self) -> int:
        """Unreferenced blocks kept for the prefix cache."""
        return len(self._lru)

    @property
    def quarantined(self) -> int:
        """Blocks with at least one quarantine hold."""
        return self._held

    def lookup(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix, full blocks only. Takes no reference: acquire() before anything else."""
        if not self.prefix_cache or not self._by_key:
            return []
        return self.match(chain_keys(token_ids, self.block_size))

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """lookup() for a caller that keeps the keys of its prompt, so that a waiting prompt is hashed once."""
        if not self.prefix_cache:
            return []
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count in `free` now: acquire() would take that many away from allocate()."""
        return sum(1 for block in blocks if block in self._lru)

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference each. Raises PoolError for a block that is free: its content is nobody's."""
        for block in blocks:
            if block not in self._lru and not self._refs[block] and not self._holds[block]:
                raise PoolError(f"acquire: block {block} is free; take it by allocate()")
        for block in blocks:
            self._lru.pop(block, None)
            self._refs[block] += 1

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None, with nothing changed, when fewer are free.

        Cached blocks are evicted in LRU order once the free list is empty. Ids come in ascending order, so that
        neighbours merge into long transfer descriptors.
        """
        if n > self.free:
            return None
        blocks = []
        for _ in range(n):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._lru.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        blocks.sort()
        return blocks

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. The last one moves a block to the LRU's young end, or to the free list.

        A sequence's later blocks are useless without the earlier ones, so they are made the older of the two.
        """
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise PoolError(f"free: block {block} has no reference left to give back (of {len(blocks)} blocks)")
            self._refs[block] -= 1
            self._settle(block)

    def publish(self, token_ids: Sequence[int], blocks: Sequence[int], first_block: int) -> None:
        """Make the full blocks from index `first_block` on findable. Their KV must be computed and final.

        `blocks[i]` holds tokens i * block_size and on; the caller has a reference to each. Where an equal block is in
        the cache already, that older one stays the one that lookup() finds.
        """
        if not self.prefix_cache:
            return
        parent = self._key[blocks[first_block - 1]] if first_block else None
        if first_block and parent is None:
            self.register(chain_keys(token_ids, self.block_size), blocks, 0)
            return
        keys = chain_keys(token_ids, self.block_size, first_block=first_block, parent=parent)
        self.register(keys, blocks[first_block:], 0)

    def register(self, keys: Sequence[bytes], blocks: Sequence[int], first_block: int) -> None:
        """publish() for a caller that keeps the keys: `keys[i]` names the content of `blocks[i]`."""
        if not self.prefix_cache:
            return
        for i in range(first_block, min(len(keys), len(blocks))):
            block, key = blocks[i], keys[i]
            if not self._refs[block]:
                raise PoolError(f"publish: block {block} is not referenced, its content may change at any time")
            if self._key[block] != key:
                self._forget(block)
                self._key[block] = key
                self._by_key.setdefault(key, block)

    def quarantine(self, blocks: Sequence[int], until: float) -> None:
        """Turn the caller's reference to each block into a hold that lasts until release_quarantined(now >= until)."""
        for block in blocks:
            if self._refs[block] < 1:
                raise PoolError(f"quarantine: block {block} has no reference to take over (of {len(blocks)} blocks)")
            self._refs[block] -= 1
            self._held += not self._holds[block]
            self._holds[block] += 1
            heapq.heappush(self._until, (until, block))

    def release_quarantined(self, now: float) -> int:
        """End the holds that are due; returns how many blocks have become allocatable by it."""
        before = self.free
        while self._until and self._until[0][0] <= now:
            _, block = heapq.heappop(self._until)
            self._holds[block] -= 1
            self._held -= not self._holds[block]
            self._settle(block)
        return self.free - before

    def references(self, block: int) -> int:
        """References to one block, quarantine holds left out."""
        return self._refs[block]

    def _settle(self, block: int) -> None:
        if self._refs[block] or self._holds[block]:
            return
        if self._cached(block):
            self._lru[block] = None
        else:
            self._key[block] = None
            self._free.append(block)

    def _cached(self, block: int) -> bool:
        key = self._key[block]
        return key is not None and self._by_key.get(key) == block

    def _forget(self, block: int) -> None:
        if self._cached(block):
            del self._by_key[self._key[block]]  # type: ignore[arg-type]
        self._key[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and all counts agree. For tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        holds = [0] * self.num_blocks
        for _, block in self._until:
            holds[block] += 1
        assert holds == self._holds, "quarantine holds and their release times disagree"
        assert self._held == sum(1 for n in holds if n), "the count of quarantined blocks is off"
        for block in range(self.num_blocks):
            kept = self._refs[block] > 0 or holds[block] > 0
            states = (block in free) + (block in self._lru) + kept
            assert states == 1, f"block {block} is in {states} states"
            assert self._refs[block] >= 0, f"block {block} has {self._refs[block]} references"
            if block in free:
                assert self._key[block] is None, f"free block {block} still has a key"
            if block in self._lru:
                assert self._cached(block), f"block {block} is in the LRU but cannot be found"
        for key, block in self._by_key.items():
            assert self._key[block] == key, f"the cache's entry for block {block} has another key than the block"
