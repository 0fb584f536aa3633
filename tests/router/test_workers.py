"""What the router believes of a worker: reports, what was sent since, and signs of life."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_router.candidate import Health
from forebay_router.discovery import Endpoint
from forebay_router.workers import TICKET_SECONDS, Worker, Workers
from forebay_wire.load import LoadReport
from forebay_wire.prefix import PrefixEntry


def make(now: float = 0.0) -> Worker:
    return Worker(Endpoint("d0", "127.0.0.1", 1, "decode", "decode"), suspect_after=2.0, wedged_after=45.0, now=now)


def report(epoch: int, engine_id: str = "e1", **values: Any) -> LoadReport:
    defaults = {"ready": True, "free_blocks": 100, "total_blocks": 100, "max_running": 8}
    return LoadReport(engine_id=engine_id, epoch=epoch, **{**defaults, **values})


def test_health_over_a_life() -> None:
    worker = make()
    assert worker.health(0.0) == Health.UNKNOWN
    worker.on_report(report(1, ready=False), 0.0, from_stream=True)
    assert worker.health(0.1) == Health.LOADING
    worker.on_report(report(2), 1.0, from_stream=True)
    assert worker.health(3.0) == Health.READY
    assert worker.health(3.1) == Health.SUSPECT
    worker.on_report(report(3), 4.0, from_stream=True)
    assert worker.health(4.0) == Health.READY
    worker.on_report(report(4, draining=True), 4.2, from_stream=True)
    assert worker.health(4.2) == Health.DRAINING
    worker.on_stream_lost()
    assert worker.health(4.3) == Health.DEAD
    # A draining worker may close its load stream before its last answer ends.
    assert not worker.suspect(100.0)
    worker.on_report(report(1, "e2"), 5.0, from_stream=True)
    assert worker.health(5.0) == Health.READY


def test_a_reset_marks_until_the_next_report() -> None:
    worker = make()
    worker.on_report(report(1), 0.0, from_stream=True)
    worker.on_failure(refused=False)
    assert worker.health(0.0) == Health.DEAD
    worker.on_report(report(2), 0.1, from_stream=False)
    assert worker.health(0.1) == Health.DEAD  # the header of an answer under way is no sign that new ones are taken
    worker.on_report(report(3), 0.2, from_stream=True)
    assert worker.health(0.2) == Health.READY


def test_prefixes_are_a_process_s_own() -> None:
    worker = make()
    entries = [PrefixEntry(11, 64), PrefixEntry(12, 128)]
    worker.has_prefixes(entries, "e1")
    assert worker.candidate(0.0, [11, 12]).cached_tokens == 0, "no process is known yet"
    worker.on_report(report(1), 0.0, from_stream=True)
    worker.has_prefixes(entries, "e1")
    assert worker.candidate(0.0, [11, 12, 13]).cached_tokens == 128
    assert worker.candidate(0.0).cached_tokens == 0
    worker.on_report(report(1, "e2"), 1.0, from_stream=True)
    worker.has_prefixes(entries, "e1")
    assert worker.candidate(1.0, [11, 12]).cached_tokens == 0, "the restarted one has an empty cache"


def test_a_refusal_asks_for_a_new_load_stream() -> None:
    worker = make()
    worker.on_report(report(1), 0.0, from_stream=True)
    worker.on_failure(refused=True)
    assert worker.reconnect.is_set()
    assert worker.health(0.0) == Health.DEAD


def test_work_without_progress_is_suspect() -> None:
    worker = make()
    for second in range(60):
        worker.on_report(report(second, running=1, generated_tokens_total=7), float(second), from_stream=True)
        assert worker.suspect(float(second)) is (second > 45)
    worker.on_report(report(60, running=1, generated_tokens_total=8), 60.0, from_stream=True)
    assert not worker.suspect(60.0)


def test_a_worker_that_takes_no_requests_any_more_owes_the_running_ones() -> None:
    worker = make()
    worker.on_report(report(1, ready=False), 0.0, from_stream=True)
    worker.on_report(report(2, running=1), 5.0, from_stream=True)
    assert worker.silent_since(5.1) is None
    worker.on_report(report(3, running=1, ready=False), 6.0, from_stream=True)
    worker.on_report(report(4, running=1, ready=False), 6.2, from_stream=True)
    assert worker.silent_since(6.3) == 5.0
    worker.on_report(report(5, running=1, ready=False, draining=True), 6.4, from_stream=True)
    assert worker.silent_since(6.5) is None
    worker.on_report(report(6, running=1), 6.6, from_stream=True)
    assert worker.silent_since(6.7) is None


def test_idle_is_not_wedged() -> None:
    worker = make()
    for second in range(100):
        worker.on_report(report(second), float(second), from_stream=True)
    assert not worker.suspect(99.0)


def test_old_reports_are_dropped() -> None:
    worker = make()
    assert worker.on_report(report(5, running=5), 0.0, from_stream=True)
    assert not worker.on_report(report(4, running=4), 0.0, from_stream=False)
    assert worker.on_report(report(1, "e2", running=1), 0.0, from_stream=True)
    assert not worker.on_report(report(9, "e1", running=9), 0.0, from_stream=False)
    assert worker.report is not None
    assert worker.report.running == 1


def test_load_is_the_report_plus_what_was_sent_since() -> None:
    worker = make()
    worker.on_report(report(1, seen=3, queued_prefill_tokens=50, running=1), 0.0, from_stream=True)
    worker.send(0.1, prefill_tokens=100)
    worker.send(0.1, prefill_tokens=200)
    candidate = worker.candidate(0.1)
    assert (candidate.queued_tokens, candidate.running) == (350, 3)
    worker.on_report(report(2, seen=4, queued_prefill_tokens=140, running=2), 0.2, from_stream=True)
    candidate = worker.candidate(0.2)
    assert (candidate.queued_tokens, candidate.running) == (340, 3)
    worker.on_report(report(3, seen=5, queued_prefill_tokens=330, running=3), 0.4, from_stream=True)
    assert worker.candidate(0.4).queued_tokens == 330


def test_a_reservation_is_covered_by_a_report_after_its_answer() -> None:
    worker = make()
    worker.on_report(report(1), 0.0, from_stream=True)
    ticket = worker.send(0.0, decode_tokens=160, counted=False)
    assert worker.candidate(0.0).free_blocks == 90
    worker.on_report(report(2, seen=1), 0.2, from_stream=True)
    assert worker.candidate(0.2).free_blocks == 90
    ticket.answered_at = 0.3
    worker.on_report(report(3, seen=1), 0.32, from_stream=True)
    assert worker.candidate(0.32).free_blocks == 90
    worker.on_report(report(4, seen=1, free_blocks=90), 0.4, from_stream=True)
    assert worker.candidate(0.4).free_blocks == 90


@given(st.lists(st.tuples(st.sampled_from(["send", "withdraw", "report"]), st.integers(0, 5)), max_size=40))
def test_what_was_sent_is_forgotten_in_time(steps: list[tuple[str, int]]) -> None:
    """Whatever a worker counts, no ticket outlives its time, and none goes negative."""
    worker, now, epoch, seen, tickets = make(), 0.0, 0, 0, []
    for step, value in steps:
        now += 0.1
        if step == "send":
            tickets.append(worker.send(now, prefill_tokens=value, decode_tokens=value))
        elif step == "withdraw" and tickets:
            worker.withdraw(tickets[value % len(tickets)])
        else:
            epoch, seen = epoch + 1, seen + value
            worker.on_report(report(epoch, seen=seen), now, from_stream=True)
        assert all(count >= 0 for count in worker.pending)
    worker.on_report(report(epoch + 1, seen=seen), now + TICKET_SECONDS + 0.1, from_stream=True)
    assert worker.pending == (0, 0, 0)


async def test_the_view_changes() -> None:
    followed: list[Worker] = []

    def follow(worker: Worker) -> asyncio.Task[None]:
        followed.append(worker)
        return asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type]

    workers = Workers(follow, lambda: 0.0, suspect_after=2.0, wedged_after=45.0)
    workers.apply([Endpoint("a", "h", 1, "prefill", "prefill"), Endpoint("b", "h", 2, "decode", None)])
    a, b = workers["a"], workers["b"]
    workers.apply([Endpoint("a", "h", 1, "prefill", "decode"), Endpoint("b", "h", 3, "decode", "decode")])
    assert workers["a"] is a
    assert a.role == "decode"
    assert workers["b"] is not b
    assert not b.listed
    assert len(followed) == 3
    workers.apply([])
    assert len(workers) == 0
    await workers.close()


@pytest.mark.parametrize(("host", "url"), [("10.0.0.1", "http://10.0.0.1:9"), ("fd00::1", "http://[fd00::1]:9")])
def test_url(host: str, url: str) -> None:
    endpoint = Endpoint("a", host, 9, "prefill", None)
    assert Worker(endpoint, suspect_after=1, wedged_after=1, now=0).url == url


async def test_a_role_s_first_worker_is_to_come_for_a_while() -> None:
    now = 0.0
    workers = Workers(
        lambda worker: asyncio.create_task(asyncio.sleep(0)), lambda: now, suspect_after=2, wedged_after=9
    )
    workers.apply([Endpoint("p0", "127.0.0.1", 1, "prefill", "prefill"), Endpoint("d0", "127.0.0.1", 2, "d", "decode")])
    assert not workers.to_come("prefill", 5), "nobody is ready: whoever comes first starts the time"
    now = 100.0
    workers["d0"].on_report(report(1), now, from_stream=True)
    workers["p0"].on_report(report(1, ready=False), now, from_stream=True)
    assert workers.to_come("prefill", 5)
    assert not workers.to_come("decode", 5)
    now = 105.0
    assert not workers.to_come("prefill", 5)
    now = 101.0
    workers["p0"].on_report(report(2), now, from_stream=True)
    workers["p0"].on_report(report(3, ready=False), now, from_stream=True)
    assert not workers.to_come("prefill", 5), "it was there"
    workers.apply([Endpoint("d0", "127.0.0.1", 2, "d", "decode")])
    assert not workers.to_come("prefill", 5), "none is listed"
    await workers.close()
