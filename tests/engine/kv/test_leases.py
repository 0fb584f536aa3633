"""Leases: exact borders, epochs, and that each lease's blocks are handed back exactly once."""

from __future__ import annotations

import mmap
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay_engine.kv.lease_words import COUNT, LeaseWords, lease_mark
from forebay_engine.kv.leases import Lease, LeaseTable

LEASE = 30.0


def granted(table: LeaseTable, request_id: str = "a", now: float = 0.0) -> Lease:
    table.begin(request_id)
    return table.grant(request_id, [1, 2, 3], 40, now)


class TestBorders:
    @pytest.mark.parametrize(("now", "alive"), [(0.0, True), (29.999, True), (30.0, False), (31.0, False)])
    def test_a_lease_holds_until_its_end_and_not_at_it(self, now: float, alive: bool) -> None:
        table = LeaseTable(LEASE)
        lease = granted(table)
        assert table.progress("a", now)[0] == ("leased" if alive else "unknown")
        assert (table.complete("a", lease.epoch, now) == lease) is alive
        assert [x.blocks for x in table.expire(now)] == ([] if alive else [(1, 2, 3)])
        assert table.held_blocks == 0

    def test_a_heartbeat_gives_a_full_period_from_now(self) -> None:
        table = LeaseTable(LEASE)
        lease = granted(table)
        assert table.heartbeat([("a", lease.epoch)], 29.0) == (["a"], [])
        assert table.expire(58.999) == []
        assert table.progress("a", 58.0)[4] == pytest.approx(1.0)
        assert table.heartbeat([("a", lease.epoch)], 59.0) == ([], ["a"])
        assert len(table.expire(59.0)) == 1

    def test_a_heartbeat_with_an_older_clock_reading_does_not_shorten(self) -> None:
        table = LeaseTable(LEASE)
        lease = granted(table, now=10.0)
        table.heartbeat([("a", lease.epoch)], 20.0)
        table.heartbeat([("a", lease.epoch)], 19.0)
        assert table.complete("a", lease.epoch, 49.999) is not None


class TestEpochs:
    def test_complete_needs_the_lease_of_that_epoch(self) -> None:
        table = LeaseTable(LEASE)
        lease = granted(table)
        assert table.complete("a", lease.epoch + 1, 0.0) is None
        assert table.complete("b", lease.epoch, 0.0) is None
        assert table.complete("a", lease.epoch, 0.0) == lease
        assert table.complete("a", lease.epoch, 0.0) is None

    def test_a_running_prefill_shows_its_blocks_under_the_epoch_of_its_lease_to_come(self) -> None:
        table = LeaseTable(LEASE)
        epoch = table.begin("a")
        assert table.progress("a", 0.0) == ("running", epoch, (), 0, 0.0)
        table.advance("a", [7, 8])
        assert table.progress("a", 0.0) == ("running", epoch, (7, 8), 0, 0.0)
        assert table.heartbeat([("a", epoch)], 0.0) == (["a"], [])
        assert table.complete("a", epoch, 0.0) is None
        assert table.grant("a", [7, 8, 9], 40, 0.0).epoch == epoch

    def test_preemption_breaks_what_early_readers_have(self) -> None:
        table = LeaseTable(LEASE)
        first = table.begin("a")
        table.advance("a", [7, 8])
        second = table.restart("a")
        assert second != first
        assert table.progress("a", 0.0) == ("running", second, (), 0, 0.0)
        assert table.grant("a", [1], 10, 0.0).epoch == second
        assert table.complete("a", first, 0.0) is None

    def test_restart_of_what_is_no_held_prefill_leaves_nothing_behind(self) -> None:
        table = LeaseTable(LEASE)
        table.restart("plain decode")
        assert table.progress("plain decode", 0.0)[0] == "unknown"

    def test_an_id_that_comes_back_leaves_its_earlier_lease_standing(self) -> None:
        table = LeaseTable(LEASE)
        first = granted(table)
        second = table.begin("a")
        assert table.progress("a", 1.0)[:2] == ("running", second)
        table.grant("a", [9], 10, 1.0)
        assert table.complete("a", first.epoch, 2.0) == first
        assert table.progress("a", 2.0)[:3] == ("leased", second, (9,))


class TestCancel:
    def test_returns_the_lease_and_breaks_it(self) -> None:
        table = LeaseTable(LEASE)
        lease = granted(table)
        assert table.cancel("a", 1.0) == lease
        assert table.cancel("a", 1.0) is None
        assert table.complete("a", lease.epoch, 1.0) is None
        assert table.expire(100.0) == []

    def test_before_the_grant_leaves_a_lease_that_the_second_cancel_finds(self) -> None:
        table = LeaseTable(LEASE)
        early = table.begin("a")
        assert table.cancel("a", 0.0) is None
        assert table.progress("a", 0.0)[0] == "unknown"
        lease = table.grant("a", [1], 10, 0.0)
        assert lease.epoch != early
        assert table.cancel("a", 0.0) == lease

    def test_drop_forgets_a_prefill_but_never_a_lease(self) -> None:
        table = LeaseTable(LEASE)
        table.begin("a")
        table.drop("a")
        assert table.progress("a", 0.0)[0] == "unknown"
        lease = granted(table, "b")
        table.drop("b")
        assert table.complete("b", lease.epoch, 0.0) == lease


def test_held_blocks_counts_a_shared_block_once() -> None:
    table = LeaseTable(LEASE)
    first = table.grant("a", [1, 2], 20, 0.0)
    table.grant("b", [1, 3], 20, 0.0)
    assert table.held_blocks == 3
    table.complete("a", first.epoch, 1.0)
    assert table.held_blocks == 2


def test_two_threads_never_both_get_one_lease() -> None:
    """complete and cancel race for each lease: exactly one of them gets it, or its blocks would be freed twice."""
    table = LeaseTable(LEASE)
    leases = [granted(table, f"r{i}") for i in range(500)]
    won: dict[str, list[Lease]] = {"complete": [], "cancel": []}
    gate = threading.Barrier(2)

    def complete() -> None:
        gate.wait(10)
        won["complete"] = [x for lease in leases if (x := table.complete(lease.request_id, lease.epoch, 0.0))]

    def cancel() -> None:
        gate.wait(10)
        won["cancel"] = [x for lease in reversed(leases) if (x := table.cancel(lease.request_id, 0.0))]

    threads = [threading.Thread(target=complete), threading.Thread(target=cancel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    epochs = [lease.epoch for lease in won["complete"] + won["cancel"]]
    assert sorted(epochs) == sorted(lease.epoch for lease in leases)
    assert table.held_blocks == 0


def seen(words: LeaseWords, engine_id: str, request_id: str, epoch: int) -> bool:
    word = lease_mark(engine_id, request_id, epoch).word
    return int.from_bytes(words.read(epoch % COUNT), "little") == word


def test_a_word_is_of_one_engine_one_request_and_one_epoch() -> None:
    words = LeaseWords("e")
    words.set("r", 7)
    assert seen(words, "e", "r", 7)
    assert not any(seen(words, *other) for other in (("f", "r", 7), ("e", "s", 7), ("e", "r", 7 + COUNT)))


def test_two_leases_that_meet_at_one_place_never_show_one_for_the_other() -> None:
    words = LeaseWords("e")
    table = LeaseTable(LEASE, words)
    old = table.grant("old", [1], 4, 0.0)
    for _ in range(COUNT - 1):
        table.begin("other")
    table.drop("other")
    new = table.grant("new", [2], 4, 0.0)
    assert new.epoch == old.epoch + COUNT
    assert (seen(words, "e", "old", old.epoch), seen(words, "e", "new", new.epoch)) == (False, True)
    table.cancel("old", 0.0)
    assert seen(words, "e", "new", new.epoch)


@pytest.mark.parametrize("how", ["complete", "cancel", "expire"])
def test_a_word_is_gone_before_anyone_can_free_the_blocks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = LeaseWords("e")
    table = LeaseTable(LEASE, words)
    lease = table.grant("r", [1], 4, 0.0)
    cleared_under_lock = []
    clear = words.clear

    def spy(request_id: str, epoch: int) -> None:
        cleared_under_lock.append(table._lock.locked())
        clear(request_id, epoch)

    monkeypatch.setattr(words, "clear", spy)
    match how:
        case "complete":
            table.complete("r", lease.epoch, 1.0)
        case "cancel":
            table.cancel("r", 1.0)
        case "expire":
            table.expire(lease.expires)
    assert cleared_under_lock == [True]
    assert not seen(words, "e", "r", lease.epoch)


def test_no_word_stands_once_the_arena_is_given_back() -> None:
    words = LeaseWords("e")
    table = LeaseTable(LEASE, words)
    early = table.grant("early", [1], 4, 0.0)
    words.close()
    late = table.grant("late", [2], 4, 0.0)
    assert not seen(words, "e", "early", early.epoch)
    assert not seen(words, "e", "late", late.epoch)
    assert words.address % mmap.PAGESIZE == 0


IDS = st.sampled_from(["a", "b", "c"])


class LeaseMachine(RuleBasedStateMachine):
    """Random calls against a plain model; ends check that every granted lease came back exactly once."""

    @initialize()
    def start(self) -> None:
        self.words = LeaseWords("engine")
        self.table = LeaseTable(10, self.words)
        self.now = 0.0
        self.epochs: list[int] = []
        self.standing: dict[int, tuple[str, float]] = {}  # epoch -> (id, expires)
        self.newest: dict[str, int] = {}

    def _note(self, epoch: int) -> None:
        assert epoch not in self.epochs, "an epoch was used twice"
        self.epochs.append(epoch)

    @rule(request_id=IDS)
    def begin(self, request_id: str) -> None:
        self._note(self.table.begin(request_id))

    @rule(request_id=IDS, blocks=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def grant(self, request_id: str, blocks: list[int]) -> None:
        lease = self.table.grant(request_id, blocks, len(blocks) * 4, self.now)
        assert lease.epoch not in self.standing
        self.standing[lease.epoch] = (request_id, lease.expires)
        self.newest[request_id] = lease.epoch
        assert lease.expires == self.now + 10

    @rule(request_id=IDS, pick=st.integers(0, 30))
    def complete(self, request_id: str, pick: int) -> None:
        epoch = list(self.standing)[pick % len(self.standing)] if self.standing else pick
        lease = self.table.complete(request_id, epoch, self.now)
        owner, expires = self.standing.get(epoch, ("", 0.0))
        assert (lease is not None) == (owner == request_id and self.now < expires)
        if lease is not None:
            del self.standing[epoch]

    @rule(request_id=IDS)
    def cancel(self, request_id: str) -> None:
        lease = self.table.cancel(request_id, self.now)
        newest = self.newest.get(request_id)
        assert (lease is not None) == (newest in self.standing)
        if lease is not None:
            assert lease.epoch == newest
            del self.standing[lease.epoch]

    @rule(request_id=IDS, pick=st.integers(0, 30))
    def heartbeat(self, request_id: str, pick: int) -> None:
        epoch = list(self.standing)[pick % len(self.standing)] if self.standing else pick
        extended, _ = self.table.heartbeat([(request_id, epoch)], self.now)
        owner, expires = self.standing.get(epoch, ("", 0.0))
        if owner == request_id:
            assert bool(extended) == (self.now < expires)
            if extended:
                self.standing[epoch] = (owner, self.now + 10)

    @rule(seconds=st.integers(0, 6), expire=st.booleans())
    def pass_time(self, seconds: int, expire: bool) -> None:
        self.now += seconds
        if expire:
            ended = {lease.epoch for lease in self.table.expire(self.now)}
            assert ended == {epoch for epoch, (_, expires) in self.standing.items() if expires <= self.now}
            for epoch in ended:
                del self.standing[epoch]

    @invariant()
    def counted(self) -> None:
        if not self.standing:
            assert self.table.held_blocks == 0

    @invariant()
    def shown(self) -> None:
        """A reader sees the words of exactly the leases that nobody has taken out of the table."""
        shown = {place for place in range(COUNT) if any(self.words.read(place))}
        assert shown == set(self.standing)
        for epoch, (request_id, _) in self.standing.items():
            assert seen(self.words, "engine", request_id, epoch)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
