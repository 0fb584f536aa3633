"""One container as a process: start, probe, restart with back-off, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from forebay_operator.local import launch, logs
from forebay_operator.local.backoff import Backoff
from forebay_operator.local.containers import Container
from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.probes import Probe, Result, Verdict, http_get
from forebay_wire import exit_codes
from forebay_wire.headers import LOAD

_EXITED = "exited with code"
_OWN_BIN = str(Path(sys.executable).parent)


def search_path() -> str:
    """Where commands are looked for: beside this interpreter first, so that one installation fits together."""
    return os.pathsep.join((_OWN_BIN, os.environ.get("PATH", os.defpath)))


def find_command(command: str) -> str:
    """Raises LocalError with the remedy when there is no such command."""
    found = shutil.which(command, path=search_path())
    if found is None:
        raise LocalError(f"the command {command} is not there; install it with: pip install 'forebay[engine]'")
    return found


def launcher(command: list[str]) -> list[str]:
    """The command line that runs `command` so that it ends when this process does, even by SIGKILL."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]


class Runner:
    """Keeps one container's process running until `stop`. Everything runs on one event loop, in the main thread:
    the kernel ties a child's death signal to the thread that forked it."""

    def __init__(
        self,
        container: Container,
        *,
        log: Path,
        session: aiohttp.ClientSession,
        on_event: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        settled: Callable[[], bool] = lambda: True,
    ) -> None:
        """`settled`: whether what this container runs by has served before. While it has not, the exit code CONFIG ends
        `run` with an InputError; afterwards whatever ends is started again."""
        self.container = container
        self.log = log
        self.state = "Starting"
        """Starting | Running | BackOff | Stopping | Stopped"""

        self.ready = False
        self.restarts = 0
        self.last_exit: str | None = None
        self.last_error: str | None = None
        """What it said last before it ended, else how it ended; kept while it runs again."""

        self.pid: int | None = None
        self.last_load: str | None = None
        """The x-forebay-load header of the last probe that had one."""

        self._session = session
        self._on_event = on_event
        self._on_change = on_change
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._settled = settled
        self._exit_code: int | None = None
        self._stop = asyncio.Event()
        self._grace = container.grace_seconds
        self._killed = asyncio.Event()

    def stop(self, grace: float) -> None:
        """SIGTERM now, SIGKILL after `grace` seconds; `run` returns when the process is gone."""
        self._grace = grace
        self._stop.set()

    def kill(self) -> None:
        """SIGKILL to the process and its children, without waiting for any drain."""
        self._killed.set()
        self._stop.set()

    async def run(self) -> None:
        """Raises InputError, see `settled`."""
        name = self.container.name
        bounding = asyncio.create_task(logs.keep_bounded(self.log))
        try:
            while not self._stop.is_set():
                started, written = self._clock(), logs.size(self.log)
                reason = await self._once()
                self.last_exit = reason
                if self._stop.is_set():
                    break
                # What ends by itself mostly says why, in its last line.
                said = logs.last_line(self.log, written) if reason.startswith(_EXITED) else ""
                self.last_error = said or reason
                if self._exit_code == exit_codes.CONFIG and not self._settled():
                    raise InputError(f"{name} can't start: {self.last_error} (log: {self.log})")
                wait = self._backoff.after(self._clock() - started)
                self.restarts += 1
                self._set_state("BackOff")
                self._on_event(
                    f"{name} {reason}; restart {self.restarts} in {wait:g} s (log: {self.log}){said and f': {said}'}"
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait)
        finally:
            bounding.cancel()
            self._set_state("Stopped")

    async def _once(self) -> str:
        """Run the process once; says how it ended."""
        self._exit_code = None
        try:
            process = await self._spawn()
        except (OSError, LocalError) as error:
            return f"could not be started: {error}"
        self.pid = process.pid
        self.last_load = None
        self._set_state("Starting")
        exited = asyncio.create_task(process.wait())
        watching = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({exited, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                self._exit_code = exited.result()
                return _exit_text(self._exit_code)
            if watching.done():
                reason, grace = watching.result()
                self._on_event(f"{self.container.name} {reason}; ending it")
                self.ready = False
                self._on_change()
                await self._terminate(process, exited, self.container.grace_seconds if grace is None else grace)
                return f"was ended: {reason}"
            watching.cancel()
            self.ready = False
            self._set_state("Stopping")
            await self._terminate(process, exited, self._grace)
            return _exit_text(exited.result())
        finally:
            watching.cancel()
            stopping.cancel()
            self.ready = False
            # Whatever the process started and left behind: they share its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(exited)
            self.pid = None
            self._on_change()

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = [find_command(self.container.argv[0]), *self.container.argv[1:]]
        logs.bound(self.log, logs.LIMIT_BYTES)
        with logs.open_log(self.log) as log:
            # A group of its own, so that Ctrl-C in the terminal reaches the supervisor alone.
            return await asyncio.create_subprocess_exec(
                *launcher(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.container.env),
                start_new_session=True,
            )

    async def _terminate(self, process: asyncio.subprocess.Process, exited: asyncio.Task[int], grace: float) -> None:
        if not self._killed.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            killed = asyncio.create_task(self._killed.wait())
            await asyncio.wait({exited, killed}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
        if not exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await exited

    async def _watch(self) -> tuple[str, float | None]:
        """Probe until the process must be ended: why, and the grace it gets (None: the pod's)."""
        startup = self.container.startup
        if startup is not None and not await self._until_verdict(startup):
            return f"did not start: {startup.path} failed {startup.failure_threshold} times in a row", startup.grace
        self._set_state("Running")
        readiness = asyncio.create_task(self._follow_readiness())
        try:
            liveness = self.container.liveness
            if liveness is None:
                await readiness
                raise AssertionError("readiness is followed for ever")
            why = await self._until_dead(liveness)
            return f"is not alive: {liveness.path} failed {liveness.failure_threshold} times ({why})", liveness.grace
        finally:
            readiness.cancel()

    async def _until_verdict(self, probe: Probe) -> bool:
        verdict = Verdict(probe)
        await asyncio.sleep(probe.initial_delay)
        while True:
            healthy = verdict.add((await self._get(probe)).ok)
            if healthy is not None:
                return healthy
            await asyncio.sleep(probe.period)

    async def _until_dead(self, probe: Probe) -> str:
        verdict = Verdict(probe)
        await asyncio.sleep(probe.initial_delay)
        while True:
            result = await self._get(probe)
            if verdict.add(result.ok) is False:
                return result.why
            await asyncio.sleep(probe.period)

    async def _follow_readiness(self) -> None:
        probe = self.container.readiness
        if probe is None:
            self._set_ready(True)
            await asyncio.Event().wait()
            return
        verdict = Verdict(probe)
        await asyncio.sleep(probe.initial_delay)
        while True:
            result = await self._get(probe)
            self._set_ready(verdict.add(result.ok) is True)
            await asyncio.sleep(probe.period)

    async def _get(self, probe: Probe) -> Result:
        result = await http_get(self._session, self.container.host, probe)
        self.last_load = result.headers.get(LOAD, self.last_load)
        return result

    def _set_ready(self, ready: bool) -> None:
        if ready is not self.ready:
            self.ready = ready
            self._on_event(f"{self.container.name} is {'ready' if ready else 'not ready any more'}")
            self._on_change()

    def _set_state(self, state: str) -> None:
        self.state = state
        self._on_change()


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": search_path(), **own}


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"{_EXITED} {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
