"""What the router remembers of a worker's prefix cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay_router.prefixes import PrefixCache
from forebay_wire.prefix import PrefixEntry

ROOM = 10_000


def chain(*keys: int, tokens: int = 100) -> list[PrefixEntry]:
    return [PrefixEntry(key, tokens * (i + 1)) for i, key in enumerate(keys)]


def test_the_longest_known_beginning_counts() -> None:
    cache = PrefixCache()
    cache.learn(chain(1, 2, 3), ROOM)
    assert cache.cached([1, 2, 3, 4, 5]) == 300
    assert cache.cached([1, 2, 9]) == 200
    assert cache.cached([9, 8]) == 0
    assert cache.cached([]) == 0


def test_a_shared_beginning_is_held_once() -> None:
    cache = PrefixCache()
    cache.learn(chain(1, 2, 3), ROOM)
    cache.learn(chain(1, 2, 7), ROOM)
    assert cache.tokens == 400


def test_what_is_used_least_goes_first_and_longest_first() -> None:
    cache = PrefixCache()
    cache.learn(chain(1, 2, 3), 500)
    cache.learn(chain(10, 20), 500)
    assert cache.tokens == 500
    cache.learn(chain(1, 2), 500)
    cache.learn(chain(30, tokens=150), 500)
    assert cache.cached([1, 2, 3]) == 200, "the unused end of the first prompt went"
    assert cache.cached([10, 20]) == 100
    assert cache.cached([30]) == 150


# Trees of prompts: a key is its path, as hash chains are.
paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


@given(paths, st.integers(200, 2000), st.integers(3, 40))
def test_bounded_and_unbroken(prompts: list[list[int]], room: int, max_keys: int) -> None:
    cache = PrefixCache(max_keys)
    for path in prompts:
        keys = [hash(tuple(path[: i + 1])) for i in range(len(path))]
        cache.learn(chain(*keys), room)
        assert len(cache) <= max_keys
        assert cache.tokens <= room
        for other in prompts:
            names = [hash(tuple(other[: i + 1])) for i in range(len(other))]
            known = [cache.cached([name]) > 0 for name in names]
            # No beginning is known without every shorter one, and the binary search finds the last.
            assert known == sorted(known, reverse=True)
            assert cache.cached(names) == 100 * sum(known)
        if len(path) <= max_keys and 100 * len(path) <= room:
            assert cache.cached(keys) == 100 * len(path)
