"""A worker's life: listen, load, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from forebay_engine.core.handle import CoreDied, CoreHandle
from forebay_engine.errors import ModelError
from forebay_engine.server.app import build_app
from forebay_engine.server.listen import Listener
from forebay_engine.server.state import WorkerState
from forebay_engine.settings import WorkerSettings
from forebay_engine.text.simulated import SimulatedTokenizer
from forebay_engine.text.tokenizer import FolderTokenizer, Tokenizer
from forebay_wire import exit_codes
from forebay_wire.connections import ConnectionLimits
from forebay_wire.secret import BadSecretFile, read_token

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

PING_SECONDS = 2.0
"""An idle core's death is noticed within about this."""

STALLED_PINGS = 2
"""Unanswered pings in a row after which no request is taken, until one is answered: it would wait for nothing. One is
late after a standstill of the whole machine."""

MISSED_PINGS = 8
"""Unanswered pings in a row after which the core counts as dead: half a minute. No step holds its loop up, so one that
stays silent is wedged, and a wedged one would keep its place in the pool for ever."""

HOLD_SETTLE_SECONDS = 1.5
"""Longer than the core's slowest report: a lease just handed out shows in its count of held blocks by then."""

_DRAIN_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
_LAST_ERRORS_SECONDS = 2.0
"""For running requests to be told that the core died."""


class CannotServe(Exception):
    """What a person must mend before this worker can run: shown as one line. Exit code 2 for what may pass by itself (a
    port in use), CONFIG for what no new start mends."""

    def __init__(self, text: str, code: int = EXIT_USAGE) -> None:
        super().__init__(text)
        self.code = code


def make_tokenizer(settings: WorkerSettings) -> Tokenizer:
    """Raises ModelError."""
    if settings.model_dir is not None:
        return FolderTokenizer(settings.model_dir)
    return SimulatedTokenizer()


async def serve(
    settings: WorkerSettings,
    core: CoreHandle,
    *,
    limits: ConnectionLimits | None = None,
) -> int:
    """Run a worker until it is told to stop; returns its exit code. Raises CannotServe.

    SIGTERM and SIGINT drain: new requests are refused, running ones finish (or are handed on, by the drain policy) and
    leased KV is waited for, up to the drain timeout. A second signal ends at once.
    """
    try:
        secret = read_token(settings.token_file) if settings.token_file is not None else None
        tokenizer = make_tokenizer(settings)
    except (BadSecretFile, ModelError) as error:
        raise CannotServe(str(error), exit_codes.CONFIG) from error
    state = WorkerState(settings, core, tokenizer, secret)
    listener = Listener(build_app(state, limits))
    signals = _Signals()
    try:
        # Before the model is loaded: /health says alive and /ready says why not yet.
        await listener.start(settings.host, settings.port)
    except OSError as error:
        raise CannotServe(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port"
        ) from error
    state.port = listener.port
    log.info("listening on %s:%d, loading the model", settings.host, listener.port)
    try:
        return await _life(state, signals)
    finally:
        state.closing.set()
        await listener.close()
        state.encoders.shutdown(wait=False, cancel_futures=True)
        signals.restore()
        await _close_core(core)


class _Signals:
    """Stop signals, counted."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def restore(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _life(state: WorkerState, signals: _Signals) -> int:
    starting = asyncio.create_task(_start(state))
    stopping = asyncio.create_task(signals.first.wait())
    dying = asyncio.create_task(_watch_core(state, starting))
    tasks = [starting, stopping, dying]
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            starting.result()  # raises CannotServe, CoreDied
            await asyncio.wait([stopping, dying], return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            return await _dead(state)
        if state.info is None:
            return EXIT_OK  # told to stop while loading: nothing to finish
        draining = asyncio.create_task(_drain(state))
        leaving = asyncio.create_task(signals.second.wait())
        tasks += [draining, leaving]
        await asyncio.wait([draining, leaving, dying], return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            return await _dead(state)
        if not draining.done():
            log.warning("second signal: leaving with %d requests running", state.in_flight)
            return EXIT_FAILED
        return EXIT_OK
    except CoreDied as error:
        log.error("the engine died while loading: %s", error)
        return EXIT_FAILED
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(state: WorkerState) -> None:
    began = state.monotonic()
    try:
        info = await state.core.start()
    except ModelError as error:
        raise CannotServe(str(error), exit_codes.CONFIG) from error
    state.loaded_unix = int(state.wall())
    state.info = info
    log.info(
        "ready: model=%s max_model_len=%d blocks=%d x %d tokens dtype=%s transport=%s load_s=%.1f",
        state.settings.served_name,
        info.max_model_len,
        info.total_blocks,
        info.block_size,
        info.dtype,
        info.transport,
        state.monotonic() - began,
    )


async def _watch_core(state: WorkerState, starting: asyncio.Task[None]) -> None:
    """Returns when the core is dead, whoever noticed: a request, or the ping that covers idle times."""
    await asyncio.wait([starting])
    missed = 0
    while not state.died.is_set():
        try:
            async with asyncio.timeout(PING_SECONDS):
                await state.died.wait()
        except TimeoutError:
            missed = 0 if await _ping(state) else missed + 1
            state.stalled = missed >= STALLED_PINGS
            if missed >= MISSED_PINGS:
                log.error("the engine answered none of %d pings", missed)
                state.died.set()


async def _ping(state: WorkerState) -> bool:
    """Whether the core answered; its death is noted at once."""
    try:
        async with asyncio.timeout(PING_SECONDS):
            await state.core.heartbeat([])
    except CoreDied as error:
        log.error("the engine died: %s", error)
        state.died.set()
    except TimeoutError:
        log.warning("the engine did not answer a ping within %.0f s", PING_SECONDS)
        return False
    return True


async def _dead(state: WorkerState) -> int:
    """Let running requests send their error, then leave, so that the worker is restarted whole."""
    log.error("the engine has died with %d requests running; leaving", state.in_flight)
    for _ in range(round(_LAST_ERRORS_SECONDS / _DRAIN_POLL_SECONDS)):
        if not state.in_flight:
            break
        await asyncio.sleep(_DRAIN_POLL_SECONDS)
    return EXIT_FAILED


async def _drain(state: WorkerState) -> None:
    """Returns when nothing runs and no KV is waiting to be pulled, at the drain timeout at latest."""
    timeout = state.settings.drain_timeout_seconds
    state.set_draining(True)
    log.info("draining: %d requests running, %d blocks held", state.in_flight, state.core.stats.held_blocks)
    if state.settings.drain_policy == "move":
        state.hand_on()
    deadline = state.monotonic() + timeout
    while (now := state.monotonic()) < deadline:
        settled = now - state.last_hold >= HOLD_SETTLE_SECONDS
        if state.in_flight == 0 and settled and state.core.stats.held_blocks == 0:
            log.info("drained")
            return
        await asyncio.sleep(_DRAIN_POLL_SECONDS)
    log.warning(
        "drain timeout after %.0f s: %d requests running, %d blocks held",
        timeout,
        state.in_flight,
        state.core.stats.held_blocks,
    )


async def _close_core(core: CoreHandle) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await core.close()
    except TimeoutError:
        log.warning("the engine did not close within %.0f s", _CLOSE_SECONDS)
    except CoreDied:
        pass  # closed already, its own way


def fail(error: CannotServe | ModelError) -> int:
    """Say in one line on stderr what must be mended; returns the exit code."""
    print(f"forebay-engine: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
    return error.code if isinstance(error, CannotServe) else exit_codes.CONFIG
