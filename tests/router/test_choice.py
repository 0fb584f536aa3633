"""Which worker takes a request: tables for each rule, properties for all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_router import choice
from forebay_router.candidate import Candidate, Health, Key
from forebay_router.choice import NoPair, Pair


def worker(name: str, **values: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "engine_id": f"{name}-1",
        "role": "prefill" if name.startswith("p") else "decode",
        "health": Health.READY,
        "compat_hash": "h",
        "velocity": 1000.0,
        "max_running": 10,
        "free_blocks": 100,
        "total_blocks": 100,
    }
    return Candidate(name=name, **{**defaults, **values})


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("p0", queued_tokens=500), worker("p1", queued_tokens=100)], "p1"),
        # A longer queue on a much faster worker is the shorter wait.
        ([worker("p0", queued_tokens=500, velocity=10_000.0), worker("p1", queued_tokens=100)], "p0"),
        # Without a velocity of its own a worker counts as the others do.
        ([worker("p0", queued_tokens=500, velocity=0.0), worker("p1", queued_tokens=100)], "p1"),
        ([worker("p0", queued_tokens=90, velocity=0.0), worker("p1", queued_tokens=5, velocity=0.0)], "p1"),
        # It has just changed roles and still decodes: prompts get what its mixed steps leave, here less than the queue.
        ([worker("p0", decoding=3, mixed_velocity=100.0), worker("p1", queued_tokens=800)], "p1"),
        ([worker("p0", decoding=3, mixed_velocity=100.0), worker("p1", queued_tokens=1000)], "p0"),
        ([worker("p0", velocity=0.0, decoding=3, mixed_velocity=100.0), worker("p1", queued_tokens=800)], "p1"),
        # Not known yet, or what it was while it decoded: its velocity counts.
        ([worker("p0", decoding=3), worker("p1", queued_tokens=100)], "p0"),
        ([worker("p0", mixed_velocity=100.0), worker("p1", queued_tokens=100)], "p0"),
        ([worker("p0", decoding=3, mixed_velocity=5000.0), worker("p1", velocity=900.0)], "p0"),
        ([worker("p0", health=Health.SUSPECT), worker("p1", queued_tokens=5000)], "p1"),
        ([worker("p0", health=Health.SUSPECT)], "p0"),
        ([worker("p0", health=Health.DEAD)], None),
        ([worker("p0", health=Health.DRAINING), worker("p1", health=Health.LOADING)], None),
        ([], None),
    ],
)
def test_prefill(workers: list[Candidate], expected: str | None) -> None:
    picked = choice.pick_prefill(workers, 100)
    assert (picked.name if picked else None) == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("d0", running=5), worker("d1", running=2)], "d1"),
        ([worker("d0", free_blocks=20), worker("d1", free_blocks=80)], "d1"),
        ([worker("d0", resident_tokens=1200), worker("d1", resident_tokens=200)], "d1"),
        # No room for the prompt's blocks, or no place in the batch: the other, however full it is.
        ([worker("d0", free_blocks=3), worker("d1", free_blocks=10, running=9)], "d1"),
        ([worker("d0", running=10), worker("d1", free_blocks=10, running=9, resident_tokens=1500)], "d1"),
        # All crowded: the emptiest.
        ([worker("d0", running=14), worker("d1", running=11)], "d1"),
        ([worker("d0", compat_hash="other"), worker("d1", running=9)], "d1"),
        ([worker("d0", compat_hash="other")], None),
    ],
)
def test_decode(workers: list[Candidate], expected: str | None) -> None:
    picked = choice.pick_decode(workers, 100, compat_hash="h")
    assert (picked.name if picked else None) == expected


def test_ties_take_turns() -> None:
    workers = [worker("p2"), worker("p0"), worker("p1", queued_tokens=2)]
    picked = [choice.pick_prefill(workers, 100, turn) for turn in range(6)]
    assert [p.name for p in picked if p] == ["p0", "p1", "p2", "p0", "p1", "p2"]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("p0"), worker("d0")], ("p0", "d0")),
        ([worker("p0")], "no_decode"),
        ([worker("d0")], "no_prefill"),
        ([], "no_prefill"),
        ([worker("p0"), worker("d0", compat_hash="x")], "no_compatible_pair"),
        # The shorter queue has no partner.
        ([worker("p0", compat_hash="x"), worker("p1", queued_tokens=900), worker("d0")], ("p1", "d0")),
        ([worker("p0"), worker("d0", health=Health.DEAD)], "no_decode"),
        # Role not set yet: not served in either.
        ([worker("p0", role=None), worker("d0")], "no_prefill"),
    ],
)
def test_pair(workers: list[Candidate], expected: object) -> None:
    pair = choice.pick_pair(workers, 100)
    assert (pair.kind if isinstance(pair, NoPair) else (pair.prefill.name, pair.decode.name)) == expected


@pytest.mark.parametrize(
    ("workers", "mixed", "expected"),
    [
        ([worker("p0"), worker("d0", running=9)], True, "d0"),
        ([worker("p0"), worker("d0", health=Health.DEAD)], True, "p0"),
        ([worker("p0"), worker("d0", health=Health.DEAD)], False, None),
        ([worker("p0"), worker("d0", health=Health.SUSPECT)], True, "p0"),
        ([worker("p0"), worker("d0", health=Health.SUSPECT)], False, "d0"),
        ([worker("x0", role=None)], True, "x0"),
        ([worker("x0", role=None)], False, None),
    ],
)
def test_any(workers: list[Candidate], mixed: bool, expected: str | None) -> None:
    picked = choice.pick_any(workers, 100, mixed=mixed)
    assert (picked.name if picked else None) == expected


def test_a_restarted_worker_is_another() -> None:
    old, new = worker("d0"), worker("d0", engine_id="d0-2")
    assert choice.pick_decode([old], 1, excluded={old.key}) is None
    assert choice.pick_decode([new], 1, excluded={old.key}) is new


candidates = st.builds(
    Candidate,
    name=st.sampled_from([f"w{i}" for i in range(6)]),
    engine_id=st.just("e"),
    role=st.sampled_from(["prefill", "decode", None]),
    health=st.sampled_from(list(Health)),
    compat_hash=st.sampled_from(["a", "b"]),
    queued_tokens=st.integers(0, 10**6),
    velocity=st.just(0.0) | st.floats(1, 1e5),
    running=st.integers(0, 100),
    max_running=st.sampled_from([0, 64]),
    resident_tokens=st.integers(0, 10**6),
    free_blocks=st.integers(0, 1000),
    total_blocks=st.sampled_from([0, 1000]),
)
fleets = st.lists(candidates, max_size=6, unique_by=lambda c: c.name)


@given(fleets, st.integers(0, 10**5), st.integers(0, 50), st.randoms())
def test_pair_properties(fleet: list[Candidate], tokens: int, turn: int, rng: Any) -> None:
    pair = choice.pick_pair(fleet, tokens, turn)
    shuffled = list(fleet)
    rng.shuffle(shuffled)
    assert choice.pick_pair(shuffled, tokens, turn) == pair
    fit = [c for c in fleet if c.health <= Health.SUSPECT]
    if isinstance(pair, Pair):
        assert pair.prefill.role == "prefill"
        assert pair.decode.role == "decode"
        assert pair.prefill in fit
        assert pair.decode in fit
        assert pair.prefill.compat_hash == pair.decode.compat_hash
    else:
        missing = {"no_prefill": "prefill", "no_decode": "decode"}.get(pair.kind)
        assert missing not in {c.role for c in fit if c.role}


@given(fleets, st.integers(0, 10**5), st.booleans())
def test_every_worker_is_tried_once_by_excluding(fleet: list[Candidate], tokens: int, mixed: bool) -> None:
    tried: set[Key] = set()
    while (picked := choice.pick_any(fleet, tokens, 0, tried, mixed=mixed)) is not None:
        assert picked.key not in tried
        tried.add(picked.key)
    able = {c.key for c in fleet if c.health <= Health.SUSPECT and (mixed or c.role == "decode")}
    assert tried == able


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # All else equal, the prompt's beginning decides.
        ([worker("p0"), worker("p1", cached_tokens=64), worker("p2", cached_tokens=32)], "p1"),
        # A queue shorter than what the cache saves is worth waiting for, a longer one is not.
        ([worker("p0"), worker("p1", cached_tokens=64, queued_tokens=40)], "p1"),
        ([worker("p0"), worker("p1", cached_tokens=64, queued_tokens=90)], "p0"),
        # More is cached than the prompt has tokens (an estimate): it takes no less than no time.
        ([worker("p0", queued_tokens=5), worker("p1", cached_tokens=5000, queued_tokens=200)], "p0"),
    ],
)
def test_a_cached_beginning_counts_as_the_time_it_saves(workers: list[Candidate], expected: str) -> None:
    for turn in range(4):
        picked = choice.pick_prefill(workers, 100, turn)
        assert picked is not None
        assert picked.name == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("d0", running=2), worker("d1", running=2, cached_tokens=64)], "d1"),
        ([worker("d0", running=2), worker("d1", running=3, cached_tokens=64)], "d1"),
        ([worker("d0", running=2), worker("d1", running=4, cached_tokens=64)], "d0"),
        ([worker("d0", running=9), worker("d1", running=10, cached_tokens=64)], "d0"),
    ],
)
def test_decode_prefers_what_is_cached_within_bounds(workers: list[Candidate], expected: str) -> None:
    picked = choice.pick_decode(workers, 100)
    assert picked is not None
    assert picked.name == expected


@given(st.integers(1, 8), st.integers(0, 3000), st.integers(20, 400), st.integers(0, 2000))
def test_one_beginning_for_all_makes_no_favourite(workers: int, shared: int, own: int, spread: int) -> None:
    """Prompts with one beginning arrive at once: no worker's queue is more than the beginning and a prompt longer than
    any other's."""
    queues = [0] * workers
    cached = [0] * workers
    for i in range(60):
        tokens = shared + own + (i * 37) % (spread + 1)
        candidates = [
            worker(f"p{n}", queued_tokens=queues[n], cached_tokens=cached[n], velocity=1000.0) for n in range(workers)
        ]
        picked = choice.pick_prefill(candidates, tokens, i)
        assert picked is not None
        n = int(picked.name[1:])
        queues[n] += picked.uncached(tokens)
        cached[n] = shared
        limit = shared + own + spread + max(5, 0.05 * max(queues)) + 1
        assert max(queues) - min(queues) <= limit
