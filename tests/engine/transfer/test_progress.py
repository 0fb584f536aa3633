"""How often a transport is driven, by an injected clock."""

from __future__ import annotations

import threading

import pytest

from forebay_engine.transfer.progress import (
    ACTIVE_SECONDS,
    BUSY_SECONDS,
    IDLE_SECONDS,
    LEASED_SECONDS,
    LOG_SECONDS,
    WORK_SECONDS,
    ProgressThread,
)


class Scene:
    """`work` is how long the next calls of progress() take."""

    def __init__(self, *, expecting: bool, leased: bool) -> None:
        self.now = 100.0
        self.work = 0.0
        self.calls = 0
        self.expecting = expecting
        self.leased = leased
        self.thread = ProgressThread(
            self.progress, expecting=lambda: self.expecting, leased=lambda: self.leased, clock=lambda: self.now
        )

    def progress(self) -> None:
        self.calls += 1
        self.now += self.work


@pytest.mark.parametrize(
    ("expecting", "leased", "pause"),
    [
        (False, False, IDLE_SECONDS),
        (True, False, BUSY_SECONDS),
        (False, True, LEASED_SECONDS),
        (True, True, BUSY_SECONDS),
    ],
)
def test_the_pause_is_what_is_to_be_expected(expecting: bool, leased: bool, pause: float) -> None:
    scene = Scene(expecting=expecting, leased=leased)
    assert [scene.thread.step() for _ in range(3)] == [pause] * 3
    assert scene.calls == 3


def test_a_peer_found_reading_is_served_without_delay_until_it_has_stopped() -> None:
    scene = Scene(expecting=False, leased=True)
    scene.work = 2 * WORK_SECONDS
    assert scene.thread.step() == BUSY_SECONDS
    scene.work = 0.0
    scene.now += ACTIVE_SECONDS / 2
    assert scene.thread.step() == BUSY_SECONDS
    scene.work = 2 * WORK_SECONDS
    scene.thread.step()
    scene.work = 0.0
    scene.now += ACTIVE_SECONDS * 0.9
    assert scene.thread.step() == BUSY_SECONDS
    scene.now += ACTIVE_SECONDS
    assert scene.thread.step() == LEASED_SECONDS


def test_work_for_nobody_s_lease_keeps_the_thread_idle() -> None:
    scene = Scene(expecting=False, leased=False)
    scene.work = 1.0
    assert scene.thread.step() == IDLE_SECONDS


def test_a_call_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that ended with it would leave every later peer over TCP without an answer, in silence."""
    calls, again = 0, threading.Event()

    def progress() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            again.set()
        raise RuntimeError("backend")

    thread = ProgressThread(progress, expecting=lambda: True, leased=lambda: False)
    thread.start()
    try:
        assert again.wait(30)
    finally:
        thread.stop()
    assert caplog.text.count("driving the KV transport failed") == 1


def test_calls_that_go_on_failing_are_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0

    def progress() -> None:
        raise RuntimeError("backend")

    thread = ProgressThread(progress, expecting=lambda: True, leased=lambda: True, clock=lambda: now)
    for _ in range(4):
        assert thread.step() == IDLE_SECONDS
        now += LOG_SECONDS / 2
    assert caplog.text.count("driving the KV transport failed") == 2
