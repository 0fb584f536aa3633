"""The block pool: reference rules by table, and its invariants under random operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay_engine.kv.blocks import BlockPool, PoolError, chain_keys

SIZE = 4


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a finished prompt: allocated, published, still referenced."""
    blocks = pool.allocate(-(-len(tokens) // pool.block_size))
    assert blocks is not None
    pool.publish(tokens, blocks, 0)
    return blocks


class TestAllocate:
    def test_gives_all_blocks_once_then_none(self) -> None:
        pool = BlockPool(5, SIZE)
        assert pool.allocate(6) is None
        assert pool.free == 5
        first, second = pool.allocate(2), pool.allocate(3)
        assert sorted((first or []) + (second or [])) == [0, 1, 2, 3, 4]
        assert pool.allocate(1) is None
        assert pool.allocate(0) == []
        pool.check()

    def test_ids_ascend_so_that_neighbours_merge(self) -> None:
        pool = BlockPool(8, SIZE)
        a = filled(pool, list(range(16)))
        b = filled(pool, list(range(100, 116)))
        pool.free_blocks(a)
        pool.free_blocks(b)
        again = pool.allocate(4)
        assert again == sorted(again or [])

    def test_evicts_the_oldest_prefix_first_and_its_tail_before_its_head(self) -> None:
        pool = BlockPool(4, SIZE)
        old, new = list(range(8)), list(range(50, 58))
        old_blocks, new_blocks = filled(pool, old), filled(pool, new)
        pool.free_blocks(old_blocks)
        pool.free_blocks(new_blocks)
        assert pool.allocate(1) == [old_blocks[1]]
        assert pool.lookup(old) == old_blocks[:1]
        assert pool.lookup(new) == new_blocks
        pool.check()


class TestPrefixCache:
    @pytest.mark.parametrize(
        ("cached", "asked", "hit"),
        [
            ([], [1, 2, 3, 4], 0),
            ([1, 2, 3], [1, 2, 3, 4], 0),
            ([1, 2, 3, 4], [1, 2, 3, 4], 1),
            ([1, 2, 3, 4], [1, 2, 3], 0),
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8], 1),
            ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], 2),
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 3, 4, 5, 6, 7, 8], 0),  # an equal block after another prefix is no hit
            ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 0], 1),
        ],
    )
    def test_longest_prefix_of_full_blocks(self, cached: list[int], asked: list[int], hit: int) -> None:
        pool = BlockPool(8, SIZE)
        blocks = filled(pool, cached)
        assert pool.lookup(asked) == blocks[:hit]
        pool.free_blocks(blocks)
        assert pool.lookup(asked) == blocks[:hit]

    def test_publishing_bit_by_bit_equals_publishing_at_once(self) -> None:
        tokens = list(range(16))
        pool = BlockPool(8, SIZE)
        blocks = pool.allocate(4)
        assert blocks is not None
        for n in range(1, 5):
            pool.publish(tokens[: n * SIZE], blocks, n - 1)
            assert pool.lookup(tokens) == blocks[:n]
        assert pool.match(chain_keys(tokens, SIZE)) == blocks

    def test_an_equal_block_keeps_the_older_one(self) -> None:
        pool = BlockPool(8, SIZE)
        tokens = [1, 2, 3, 4]
        older, younger = filled(pool, tokens), filled(pool, tokens)
        assert pool.lookup(tokens) == older
        pool.free_blocks(younger)
        assert pool.cached == 0
        assert pool.free == 7
        pool.check()

    def test_off_means_no_hit_and_no_cached_block(self) -> None:
        pool = BlockPool(4, SIZE, prefix_cache=False)
        blocks = filled(pool, [1, 2, 3, 4])
        pool.free_blocks(blocks)
        assert pool.lookup([1, 2, 3, 4]) == []
        assert pool.cached == 0
        assert pool.free == 4

    def test_a_refilled_block_is_not_found_any_more(self) -> None:
        pool = BlockPool(1, SIZE)
        pool.free_blocks(filled(pool, [1, 2, 3, 4]))
        assert pool.allocate(1) == [0]
        assert pool.lookup([1, 2, 3, 4]) == []


class TestReferences:
    def test_a_shared_block_is_free_only_after_its_last_reference(self) -> None:
        pool = BlockPool(1, SIZE)
        blocks = filled(pool, [1, 2, 3, 4])
        pool.acquire(pool.lookup([1, 2, 3, 4]))
        pool.free_blocks(blocks)
        assert pool.allocate(1) is None
        pool.free_blocks(blocks)
        assert pool.allocate(1) == blocks

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda pool: pool.free_blocks([1]),
            lambda pool: pool.acquire([1]),
            lambda pool: pool.quarantine([1], 5.0),
            lambda pool: pool.publish([1, 2, 3, 4], [1], 0),
        ],
        ids=["free", "acquire", "quarantine", "publish"],
    )
    def test_misuse_of_a_free_block_is_an_error(self, misuse: Callable[[BlockPool], object]) -> None:
        pool = BlockPool(2, SIZE)
        with pytest.raises(PoolError, match="block 1"):
            misuse(pool)
        pool.check()


class TestQuarantine:
    def test_not_handed_out_before_its_time(self) -> None:
        pool = BlockPool(2, SIZE)
        blocks = filled(pool, [1, 2, 3, 4, 5])
        pool.quarantine(blocks, until=10.0)
        assert (pool.free, pool.quarantined) == (0, 2)
        assert pool.release_quarantined(9.999) == 0
        assert pool.allocate(1) is None
        assert pool.release_quarantined(10.0) == 2
        assert pool.quarantined == 0
        assert pool.allocate(2) is not None

    def test_its_intact_content_may_be_shared_meanwhile(self) -> None:
        pool = BlockPool(1, SIZE)
        blocks = filled(pool, [1, 2, 3, 4])
        pool.quarantine(blocks, until=10.0)
        pool.acquire(pool.lookup([1, 2, 3, 4]))
        assert pool.release_quarantined(10.0) == 0
        assert pool.allocate(1) is None
        pool.free_blocks(blocks)
        assert pool.allocate(1) == blocks

    def test_two_holds_on_one_block_end_one_by_one(self) -> None:
        pool = BlockPool(1, SIZE)
        blocks = filled(pool, [1, 2, 3, 4])
        pool.acquire(blocks)
        pool.quarantine(blocks, until=5.0)
        pool.quarantine(blocks, until=7.0)
        assert pool.quarantined == 1
        assert pool.release_quarantined(5.0) == 0
        assert pool.release_quarantined(7.0) == 1


def test_keys_depend_on_every_token_before() -> None:
    base = chain_keys(list(range(12)), SIZE)
    changed = chain_keys([99, *range(1, 12)], SIZE)
    assert not set(base) & set(changed)
    assert chain_keys(list(range(12)), SIZE, first_block=2, parent=base[1]) == base[2:]
    with pytest.raises(ValueError, match="block 2"):
        chain_keys(list(range(12)), SIZE, first_block=2)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, grow, end and expire in any order; the model knows what each block holds and for whom."""

    @initialize(num_blocks=st.integers(1, 12), prefix_cache=st.booleans())
    def start(self, num_blocks: int, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks, SIZE, prefix_cache=prefix_cache)
        self.now = 0.0
        self.sequences: list[tuple[list[int], list[int]]] = []  # (tokens, blocks)
        self.holds: list[tuple[float, int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the full prefix that its content stands for

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens: list[int]) -> None:
        hits = self.pool.lookup(tokens)
        for i, block in enumerate(hits):
            assert self.content[block] == tuple(tokens[: (i + 1) * SIZE]), "a hit on another prefix's block"
        need = -(-len(tokens) // SIZE) - len(hits)
        free = self.pool.free
        spare = free - self.pool.unreferenced(hits)
        self.pool.acquire(hits)
        assert self.pool.free == spare
        fresh = self.pool.allocate(need)
        assert (fresh is None) == (need > spare)
        if fresh is None:
            self.pool.free_blocks(hits)
            assert self.pool.free == free
            return
        for block in fresh:
            assert all(block not in blocks for _, blocks in self.sequences), "a block of a living sequence"
            assert all(block != held for _, held in self.holds), "a block in quarantine"
            self.content.pop(block, None)
        blocks = hits + fresh
        for i in range(len(hits), len(tokens) // SIZE):
            self.content[blocks[i]] = tuple(tokens[: (i + 1) * SIZE])
        self.pool.publish(tokens, blocks, len(hits))
        self.sequences.append((tokens, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), delay=st.one_of(st.none(), st.integers(0, 5)))
    def end(self, data: st.DataObject, delay: int | None) -> None:
        _, blocks = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if delay is None:
            self.pool.free_blocks(blocks)
        else:
            self.pool.quarantine(blocks, self.now + delay)
            self.holds += [(self.now + delay, block) for block in blocks]

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.pool.release_quarantined(self.now)
        self.holds = [hold for hold in self.holds if hold[0] > self.now]

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        kept = {block for _, blocks in self.sequences for block in blocks} | {block for _, block in self.holds}
        assert self.pool.free == self.pool.num_blocks - len(kept)
        assert self.pool.quarantined == len({block for _, block in self.holds})
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == sum(blocks.count(block) for _, blocks in self.sequences)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
