"""Runs the containers of one model: processes, roles, control socket, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp
import psutil

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.ratio import Ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.decide import Fleet as PoolFleet
from forebay_operator.decide import Split
from forebay_operator.homes import Homes
from forebay_operator.local import roles
from forebay_operator.local.backoff import Backoff
from forebay_operator.local.containers import Container
from forebay_operator.local.errors import LocalError
from forebay_operator.local.load import RouterLoad, parse_report, parse_router_load
from forebay_operator.local.places import Room
from forebay_operator.local.process import Runner
from forebay_operator.local.rescaling import Rescaling
from forebay_operator.local.sizes import leavers, new_role
from forebay_operator.local.state import StateFolder
from forebay_operator.local.status import ContainerStatus, UpStatus
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.router_report import BadReport, ReportedWorker, RouterReport
from forebay_operator.observe.router_report import parse_report as parse_router_report
from forebay_wire.discovery import WorkerEntry, WorkersFile
from forebay_wire.load import LoadReport
from forebay_wire.urls import host_port

LAST_GRACE_SECONDS = 10.0
"""For workers after the router has gone, when the drain deadline has passed already: nothing runs on them."""


IDLE_SECONDS = 2.0
"""A report older than this does not say that a worker is idle."""


@dataclass(frozen=True, slots=True)
class Outcome:
    drained: bool
    """False: the deadline passed or a second signal came, and what still ran was killed."""


class Supervisor:
    """One `up`. Create and run it on the main thread's event loop (see Runner)."""

    def __init__(
        self,
        model: DisaggregatedModel,
        containers: Sequence[Container],
        state: StateFolder,
        *,
        token: str,
        on_event: Callable[[str], None],
        backoff: Callable[[], Backoff] = Backoff,
        room: Room | None = None,
    ) -> None:
        """`room`: for workers that come later; None: the pools keep their sizes."""
        self.model = model
        self.state = state
        self._containers = list(containers)
        self._room = room
        self._token = token
        self._tell = on_event
        self._backoff = backoff
        self._roles: dict[str, str] = {c.name: c.pool for c in containers if c.pool is not None}
        self._runners: list[Runner] = []
        self._tasks: dict[Runner, asyncio.Task[None]] = {}
        self._failed: asyncio.Event = asyncio.Event()
        """One of the tasks ended by an error."""

        self._session: aiohttp.ClientSession | None = None
        self._joining: dict[Runner, float] = {}
        """Workers that pools grew by and that have never been ready, and when they were asked for."""

        self._leaving: dict[Runner, float] = {}
        """Workers that pools shrink by, and by when they have to be idle. No router sends them anything new."""

        self._stop = asyncio.Event()
        self._killed = False
        self._draining = False
        self._was_ready = False
        self._load = RouterLoad()
        self._recorded: dict[int, float] = {}
        self._rescaling: Rescaling | None = None
        self._moves = 0
        self._resizes = 0

    def request_down(self, *, now: bool = False) -> None:
        """Drain and end; a second request, or `now`, kills."""
        if now or self._stop.is_set():
            self._killed = True
            for runner in self._runners:
                runner.kill()
        self._stop.set()

    async def run(self) -> Outcome:
        """Until a drain asked for by `request_down` is over. No process is left when it returns or raises.

        Raises InputError, before everything was ready once, when a container says that it can never start.
        """
        self._write_workers()
        # A connection for each probe, as the kubelet does: one kept alive would hold up the drain of what it probes.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            self._session = session
            for container in self._containers:
                self._run(container)
            polling = asyncio.create_task(self._poll(session))
            stopping = asyncio.create_task(self._stop.wait())
            failing = asyncio.create_task(self._failed.wait())
            try:
                await asyncio.wait({polling, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
                # A runner or the poller ends early only by an error of ours, or one that no restart mends: raise it.
                for done in (*self._tasks.values(), polling):
                    if done.done() and (error := done.exception()) is not None:
                        raise error
                await self._drain()
            finally:
                for runner in self._runners:
                    runner.kill()
                for task in (polling, stopping, failing):
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), polling, stopping, failing, return_exceptions=True)
        return Outcome(drained=not self._killed)

    def _run(self, container: Container) -> Runner:
        assert self._session is not None
        runner = Runner(
            container,
            log=self.state.logs / f"{container.name}.log",
            session=self._session,
            on_event=self._event,
            on_change=self._changed,
            backoff=self._backoff(),
            settled=lambda: self._was_ready,
        )
        self._runners.append(runner)
        task = self._tasks[runner] = asyncio.create_task(runner.run())
        task.add_done_callback(self._ended)
        return runner

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed.set()

    def switch_ratio(self, asked: Ratio) -> tuple[Ratio, dict[str, str]]:
        """Change roles so that `asked` holds; what runs on a switched worker finishes there. Raises RatioRefused."""
        workers = self._staying()
        target = roles.fit_ratio(asked, len(workers), self.model)
        switched = roles.switch(workers, target)
        if switched:
            before = dict(self._roles)
            self._roles.update(switched)
            try:
                self._write_workers()
            except LocalError:
                self._roles = before  # as the router goes on to see them
                raise
            self._event(f"roles are {target} now: " + ", ".join(f"{n} serves {r}" for n, r in switched.items()))
        return target, switched

    def resize(self, homes: Split, targets: Split) -> None:
        """Bring the home pools to these sizes and the roles to these targets: workers start, or the least loaded ones
        finish what they run and end. Raises LocalError when this machine has no room for more."""
        if self._room is None or self._draining:
            return
        try:
            for pool in POOLS:
                self._resize_pool(pool, getattr(homes, pool), targets)
            with contextlib.suppress(roles.RatioRefused):
                # Too few are ready: then the law goes on from the split that there is.
                self._roles.update(roles.switch(self._staying(), Ratio(targets.prefill, targets.decode)))
        finally:
            self._write_workers()

    def _resize_pool(self, pool: Pool, wanted: int, targets: Split) -> None:
        assert self._room is not None
        have = sum(worker.pool == pool for worker in self._staying())
        for _ in range(wanted - have):
            container = self._room.take(pool, list(self._roles))
            self._roles[container.name] = new_role(self._split(), targets, pool)
            self._containers.append(container)
            self._joining[self._run(container)] = asyncio.get_running_loop().time()
            self._event(f"{container.name} joins pool {pool}")
        for name in leavers(self._staying(), pool, max(0, have - wanted)):
            self._dismiss(name)

    def _dismiss(self, name: str) -> None:
        runner = next(r for r in self._runners if r.container.name == name)
        self._leaving[runner] = asyncio.get_running_loop().time() + self.model.spec.drain.timeout_seconds
        self._joining.pop(runner, None)
        self._event(f"{name} finishes its requests and leaves pool {runner.container.pool}")

    def _end_leavers(self, report: RouterReport | None) -> None:
        """Those that are idle by the router's word, or late, get their SIGTERM."""
        now = asyncio.get_running_loop().time()
        known = {} if report is None else {worker.name: worker for worker in report.workers}
        for runner, deadline in list(self._leaving.items()):
            if runner.state in ("Stopping", "Stopped"):
                continue
            if now >= deadline or runner.pid is None or _idle(known.get(runner.container.name)):
                runner.stop(LAST_GRACE_SECONDS)
                self._tasks[runner].add_done_callback(partial(self._left, runner))

    def _left(self, runner: Runner, _: asyncio.Task[None]) -> None:
        if self._draining or runner not in self._leaving:
            return
        container = runner.container
        del self._leaving[runner], self._tasks[runner]
        self._runners.remove(runner)
        self._containers.remove(container)
        self._roles.pop(container.name, None)
        if self._room is not None:
            self._room.give_back(container)
        self._event(f"{container.name} has left")
        # Should this fail, the router finds out by itself that it is gone.
        with contextlib.suppress(LocalError):
            self._write_workers()

    def homes(self) -> Homes | None:
        """The pools as the law may size them; None: it may not."""
        if self._room is None or self._rescaling is None:
            return None
        now, clock = asyncio.get_running_loop().time(), self._rescaling.clock()
        fleets, counts = {}, {}
        for pool in POOLS:
            staying = [r for r in self._runners if r.container.pool == pool and r not in self._leaving]
            leaving = sum(r.container.pool == pool for r in self._leaving)
            waiting = [now - self._joining[r] for r in staying if r in self._joining]
            since = clock - max(waiting) if waiting else None
            counts[pool] = len(staying)
            fleets[pool] = PoolFleet(len(staying), sum(r.ready for r in staying), since, leaving)
        return Homes(fleets, self._room.limits(counts))

    def _staying(self) -> list[roles.WorkerRole]:
        return [
            roles.WorkerRole(
                name=runner.container.name,
                pool=runner.container.pool,
                role=self._roles[runner.container.name],
                load=self._work(runner),
                ready=runner.ready,
            )
            for runner in self._runners
            if runner.container.pool is not None and runner not in self._leaving
        ]

    def _split(self) -> Split:
        """Roles of the workers that stay."""
        leaving = {runner.container.name for runner in self._leaving}
        held = [role for name, role in self._roles.items() if name not in leaving]
        return Split(held.count("prefill"), held.count("decode"))

    def status(self) -> UpStatus:
        containers = [self._container_status(runner) for runner in self._runners]
        moving = {runner.container.name for runner in (*self._joining, *self._leaving)}
        ready = bool(containers) and all(c.ready for c in containers if c.name not in moving)
        running = "Ready" if ready else "Degraded" if self._was_ready else "Starting"
        router = self._router()
        homes = [worker.pool for worker in self._staying()]
        return UpStatus(
            name=self.state.name,
            model=self.model.metadata.name,
            served_name=self.model.spec.model.served_name,
            endpoint=f"http://{host_port(router.host, router.port)}/v1",
            phase="Draining" if self._draining else running,
            ready=ready and not self._draining,
            ratio=str(self._split()),
            pools=f"{homes.count('prefill')}:{homes.count('decode')}",
            pid=os.getpid(),
            containers=containers,
            ttft_p95_ms=self._load.ttft_p95_ms,
            tpot_p95_ms=self._load.tpot_p95_ms,
            attainment=self._load.attainment,
            in_flight=self._load.in_flight,
            mode=self.model.spec.scaling.mode,
            target=self._target(),
            decision=self._rescaling.decision() if self._rescaling else None,
            moves=self._moves,
            resizes=self._resizes,
            flaps=self._rescaling.pilot.flaps if self._rescaling else 0,
        )

    def _target(self) -> str:
        recommended = self._rescaling.recommended() if self._rescaling else None
        return recommended or str(self._split())

    async def _drain(self) -> None:
        """The router first: it takes no new request and ends when its last stream has; the workers stay for those.
        Then the workers, which have nothing left but leases."""
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.model.spec.drain.timeout_seconds
        self._event("draining: running requests finish; once more Ctrl-C ends at once")
        for is_router in (True, False):
            group = [runner for runner in self._runners if (runner.container.pool is None) is is_router]
            left = max(deadline - loop.time(), 0.0 if is_router else LAST_GRACE_SECONDS)
            for runner in group:
                runner.stop(left)
            # A runner whose process outlives its grace kills it, so this ends.
            await asyncio.gather(*(self._tasks[runner] for runner in group))
            if loop.time() >= deadline and is_router:
                self._killed = True
                self._event("the drain deadline (spec.drain.timeoutSeconds) passed; what still ran was ended")

    async def _poll(self, session: aiohttp.ClientSession) -> None:
        """Each second, what the router says: for people, and for the law, which may switch roles on it. While the
        router is away, the workers' own reports (from probes) have to do."""
        router = self._router()
        address = host_port(router.host, router.port)
        law = self._rescaling = Rescaling(
            self.model,
            self.state,
            session,
            token=self._token,
            switch=self._rescale,
            resize=self._resize,
            tell=self._event,
        )
        try:
            while True:
                await law.try_to_step(self._fleet(address), self.homes())
                raw = law.source.raw.get(address, b"")
                self._load = parse_router_load(raw)
                if self._leaving:
                    self._end_leavers(_report(raw))
                await asyncio.sleep(law.until_next_look())
        finally:
            await law.source.close()
            law.save()

    def _rescale(self, ratio: Ratio) -> None:
        """The law's: what people ask for goes the same way."""
        if self._draining:
            return
        _, switched = self.switch_ratio(ratio)
        self._moves += bool(switched)

    def _resize(self, homes: Split, targets: Split) -> None:
        """The law's."""
        self.resize(homes, targets)
        self._resizes += 1

    def _fleet(self, router: str) -> Fleet:
        return Fleet(
            tuple(
                Member(
                    name=runner.container.name,
                    target="prefill" if self._roles[runner.container.name] == "prefill" else "decode",
                    address=host_port(runner.container.host, runner.container.port) if runner.ready else "",
                    serving=runner.ready,
                    ready=runner.ready,
                )
                for runner in self._runners
                if runner.container.pool is not None and runner not in self._leaving
            ),
            (router,),
        )

    def _router(self) -> Container:
        return next(c for c in self._containers if c.pool is None)

    def _report(self, runner: Runner) -> LoadReport | None:
        if runner.pid is None:
            return None
        return self._load.workers.get(runner.container.name) or parse_report(runner.last_load)

    def _work(self, runner: Runner) -> int:
        report = self._report(runner)
        return report.running + report.waiting if report else 0

    def _container_status(self, runner: Runner) -> ContainerStatus:
        container, report = runner.container, self._report(runner)
        usage = None
        if report is not None and report.total_blocks > 0:
            usage = round(1 - report.free_blocks / report.total_blocks, 4)
        return ContainerStatus(
            name=container.name,
            pool=container.pool,
            role=self._roles.get(container.name),
            state="Draining" if runner in self._leaving and runner.state == "Running" else runner.state,
            ready=runner.ready,
            port=container.port,
            pid=runner.pid,
            restarts=runner.restarts,
            last_exit=runner.last_exit,
            last_error=runner.last_error,
            log=str(runner.log),
            running=report.running if report else None,
            waiting=report.waiting if report else None,
            kv_usage=usage,
            kv_bytes_received=report.kv_bytes_received if report else None,
            transport=report.transport if report else None,
        )

    def _write_workers(self) -> None:
        leaving = {runner.container.name for runner in self._leaving}
        entries = [
            WorkerEntry(
                name=c.name, host=c.host, port=c.port, pool=c.pool, role=self._roles[c.name], draining=c.name in leaving
            )
            for c in self._containers
            if c.pool is not None
        ]
        self.state.write_workers(WorkersFile(entries))

    def _changed(self) -> None:
        for runner in [runner for runner in self._joining if runner.ready]:
            del self._joining[runner]
        self._was_ready |= all(runner.ready for runner in self._runners)
        self._record_processes()

    def _record_processes(self) -> None:
        """Keep the list of process ids that the next `up` of this name looks through should this one be killed."""
        pids = {runner.pid for runner in self._runners if runner.pid is not None}
        if pids == self._recorded.keys():
            return
        processes = {pid: started for pid, started in self._recorded.items() if pid in pids}
        for pid in pids - processes.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[pid] = psutil.Process(pid).create_time()
        self._recorded = processes
        # Without the list (disk full, say) the next `up` may find a port taken for a moment: no reason to end.
        with contextlib.suppress(LocalError):
            self.state.record_processes(processes)

    def _event(self, text: str) -> None:
        # The terminal may be gone; the processes and their streams go on.
        with contextlib.suppress(OSError):
            self._tell(text)


def _report(raw: bytes) -> RouterReport | None:
    try:
        return parse_router_report(raw)
    except BadReport:
        return None


def _idle(worker: ReportedWorker | None) -> bool:
    """The router sends it nothing new, nothing runs there, and nobody will pull KV from it."""
    if worker is None or worker.load is None or worker.state != "draining" or worker.age_seconds is None:
        return False
    load = worker.load
    fresh = worker.age_seconds <= IDLE_SECONDS
    return fresh and not (load.running or load.waiting or load.waiting_pulls or load.held_blocks)
