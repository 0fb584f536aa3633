"""The `forebay-operator` command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import kopf

from forebay_operator import handlers
from forebay_operator.act.actuator import Actuator
from forebay_operator.act.apply import Applier, ApplyCache
from forebay_operator.api import labels
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.events import Recorder
from forebay_operator.health import HealthServer
from forebay_operator.kube import MODELS, POD_MONITORS, ApiError, Kube, KubeClient, NotFound, Resource
from forebay_operator.leader import LeaderElector
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.discovery import has_pod_monitors
from forebay_operator.observe.gather import Gatherer, Nodes
from forebay_operator.observe.load import HttpWorkers, Workers
from forebay_operator.observe.sources import Sources
from forebay_operator.queue import WorkQueue
from forebay_operator.reconcile import Key, Reconciler, StatusBuilder
from forebay_operator.rescaler import Rescaler
from forebay_operator.settings import Settings
from forebay_operator.status.build import build_status
from forebay_operator.watching import WatchHealth
from forebay_wire import VERSION

log = logging.getLogger("forebay_operator")

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class LeaseLost(Exception):
    pass


class OtherKinds(Exception):
    """The cluster has an optional kind now that it had not when this process began, or the other way round."""


class Stopped(Exception):
    """SIGTERM or SIGINT came while kopf ran: it takes over the handlers of both."""


def parse_args(argv: Sequence[str] | None = None) -> Settings:
    """Settings from the command line. Exits with 2 and one line on a bad one."""
    parser = argparse.ArgumentParser(
        prog="forebay-operator",
        description="Runs DisaggregatedModels: prefill and decode workers, routers, and the ratio between them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="serve models of this namespace only; may be given several times. Without it: of all namespaces",
    )
    parser.add_argument("--operator-namespace", default=_own_namespace(), help="where the operator's Lease is")
    parser.add_argument("--lease-name", default="forebay-operator")
    parser.add_argument("--host", default="0.0.0.0", help="of /healthz, /readyz and /metrics")  # noqa: S104
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--workers", type=int, default=8, help="models reconciled at once")
    parser.add_argument("--engine-image", help="for models that name none")
    parser.add_argument("--router-image", help="for models that name none")
    parser.add_argument("--monitoring-namespace", help="where Prometheus runs: NetworkPolicies let it in")
    parser.add_argument(
        "--api-server-port",
        action="append",
        type=int,
        metavar="PORT",
        help="that NetworkPolicies let routers reach; may be given several times (default: 443 and 6443)",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    args = parser.parse_args(argv)
    if not 1 <= args.workers <= 256:
        parser.error(f"--workers is {args.workers}; must be from 1 to 256")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port is {args.port}; must be from 0 to 65535")
    ports = tuple(args.api_server_port or Surroundings().api_server_ports)
    for port in ports:
        if not 1 <= port <= 65535:
            parser.error(f"--api-server-port is {port}; must be from 1 to 65535")
    return Settings(
        namespace=args.operator_namespace,
        identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}",
        namespaces=tuple(args.namespace),
        lease_name=args.lease_name,
        host=args.host,
        port=args.port,
        workers=args.workers,
        log_level=args.log_level,
        surroundings=Surroundings(
            operator_namespace=args.operator_namespace,
            monitoring_namespace=args.monitoring_namespace,
            api_server_ports=ports,
            engine_image=args.engine_image,
            router_image=args.router_image,
        ),
    )


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return NAMESPACE_FILE.read_text().strip()
    return os.environ.get("POD_NAMESPACE", "default")


class Operator:
    """All parts of one operator process, wired. `run` is its life."""

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        workers: Workers,
        status: StatusBuilder,
        metrics: OperatorMetrics,
        elector: LeaderElector,
        *,
        pod_monitors: bool,
        authenticate: handlers.Login = handlers.login,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self._settings = settings
        self._clock = clock
        self._elector = elector
        self._metrics = metrics
        self._authenticate = authenticate
        self._kube = kube
        self._pod_monitors = pod_monitors
        self.watches = WatchHealth(settings.watch_stale_after)
        cache = ApplyCache()
        applier = Applier(kube, cache)
        nodes = Nodes(kube, clock, readable=not settings.namespaces)
        offset = time.time() - clock()
        # Wall time, since it is kept over restarts, but without the jumps of a clock that is set.
        self._sources = Sources(kube, lambda: offset + clock())
        self.rescaler = Rescaler(
            self._sources.make, clock=lambda: offset + clock(), wake=lambda key: self.queue.add(key), counts=metrics
        )
        self.reconciler = Reconciler(
            kube,
            Gatherer(kube, workers, nodes),
            applier,
            Actuator(kube, applier, workers),
            Recorder(kube, settings.identity),
            status,
            metrics,
            surroundings=replace(settings.surroundings, pod_monitors=pod_monitors),
            resync=settings.resync,
            rng=random.Random(),
            wrote=lambda key, version: self.watches.wrote(key, version, clock()),
            gone=lambda key: self.watches.gone(key),
            rescaler=self.rescaler,
        )
        self.queue: WorkQueue[Key] = WorkQueue(
            self.reconciler.reconcile,
            workers=settings.workers,
            timeout=settings.reconcile_timeout,
            clock=clock,
            rng=random.Random(),
            observer=metrics,
        )
        metrics.watch_queue(self.queue.due, clock)
        self._cache = cache
        self._watching = handlers.Watches(self.queue, cache, self.watches, clock, on_nodes=nodes.changed)
        self.watched = asyncio.Event()
        """Set once kopf watches."""

    def alive(self) -> str | None:
        """For the liveness probe: what a restart would cure."""
        now = self._clock()
        age = now - self.queue.last_turn
        if self._elector.is_leader() and age > 2 * self._settings.reconcile_timeout:
            return f"no worker of the queue has looked for work for {age:.0f} s"
        return self.watches.stale(now)

    async def run(self) -> bool:
        """Stand by, lead, work. Returns when a signal came, and True when it is to begin anew for other kinds; raises a
        group with LeaseLost or what ended a part."""
        anew = False
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lead())
                group.create_task(self._look_for_kinds())
                await self._elector.acquired()
                self._metrics.leading(True)
                group.create_task(self.queue.run())
                group.create_task(self.rescaler.run())
                group.create_task(self._watch())
                group.create_task(self._relist())
        except* Stopped:
            pass
        except* OtherKinds:
            anew = True
        finally:
            await self._sources.close()
        return anew

    async def _lead(self) -> None:
        await self._elector.run()
        self._metrics.leading(False)
        raise LeaseLost(f"lost the Lease {self._settings.namespace}/{self._settings.lease_name}")

    async def _relist(self) -> None:
        """What is watched for foreign changes alone is also listed now and then: level-triggered, as models are."""
        kinds = (*handlers.PASSIVE, *((POD_MONITORS,) if self._pod_monitors else ()))
        while True:
            await asyncio.sleep(self._settings.resync)
            for resource in kinds:
                for namespace in self._settings.namespaces or (None,):
                    await self._list_again(resource, namespace)

    async def _list_again(self, resource: Resource, namespace: str | None) -> None:
        kind = (resource.api_version, resource.kind)
        names = [key for key in self._cache.names() if key[:2] == kind and namespace in (None, key[2])]
        try:
            found = await self._kube.list(resource, namespace, selector=labels.MODEL)
        except ApiError as error:
            # Of this namespace alone: it may be gone, and its rights with it.
            log.info("listing children, again in %g s: %s", self._settings.resync, error)
        else:
            self._watching.listed(found, names)

    async def _served(self) -> None:
        """Until the API server knows our own kind. kopf looks for kinds once, and would wait for one that comes later
        without end and without a word. One namespace that answers will do: another may be gone, and its rights with
        it."""
        told = False
        while True:
            for namespace in self._settings.namespaces or (None,):
                try:
                    await self._kube.list(MODELS, namespace, fields="metadata.name=none")
                except NotFound:
                    if not told:
                        log.warning("the cluster does not know DisaggregatedModels; waiting for their CRD")
                    told = True
                except ApiError as error:
                    log.info("looking for DisaggregatedModels: %s", error)
                else:
                    return
            await asyncio.sleep(self._settings.lease.retry)

    async def _watch(self) -> None:
        await self._served()
        stop = asyncio.Event()
        namespaces = self._settings.namespaces
        try:
            await kopf.operator(
                registry=handlers.registry(
                    self._watching,
                    nodes=not namespaces,
                    pod_monitors=self._pod_monitors,
                    authenticate=self._authenticate,
                ),
                settings=handlers.settings(),
                # Or kopf asks for our user's name, and in an image a user has none.
                identity=self._settings.identity,  # type: ignore[arg-type]
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
                ready_flag=self.watched,
            )
        finally:
            stop.set()
        raise Stopped

    async def _look_for_kinds(self) -> None:
        """Prometheus' operator may come after this one. kopf watches what it began with, and when it ends it takes all
        younger tasks of its loop along: so all ends in order, and begins anew on a loop of its own (main)."""
        while True:
            await asyncio.sleep(self._settings.kinds_every)
            try:
                there = await has_pod_monitors(self._kube, self._settings.namespaces)
            except ApiError as error:
                log.info("looking for PodMonitors, again in %g s: %s", self._settings.kinds_every, error)
                continue
            if there != self._pod_monitors:
                log.info("the cluster has %s now: beginning anew with that", _kinds(there))
                raise OtherKinds


def _kinds(pod_monitors: bool) -> str:
    return "PodMonitors" if pod_monitors else "no PodMonitors"


async def serve(settings: Settings) -> bool:
    """Until SIGTERM or SIGINT, or True: until it is to begin anew. Raises LeaseLost in a group, ApiError without an API
    server, OSError for a port."""
    loop = asyncio.get_running_loop()
    metrics = OperatorMetrics()
    elector: LeaderElector | None = None
    kube = await KubeClient.connect(
        may_write=lambda: elector is not None and elector.is_leader(), on_request=metrics.requested
    )
    workers = HttpWorkers()
    elector = LeaderElector(
        kube,
        namespace=settings.namespace,
        name=settings.lease_name,
        identity=settings.identity,
        clock=loop.time,
        times=settings.lease,
    )
    try:
        pod_monitors = await has_pod_monitors(kube, settings.namespaces)
        operator = Operator(settings, kube, workers, build_status, metrics, elector, pod_monitors=pod_monitors)
        return await _live(settings, operator, HealthServer(settings.host, settings.port, metrics, operator.alive))
    finally:
        await workers.close()
        await kube.close()


async def _live(settings: Settings, operator: Operator, health: HealthServer) -> bool:
    await health.start()
    running = asyncio.create_task(operator.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    where = ", ".join(settings.namespaces) or "all namespaces"
    log.info("operator %s %s serves %s; health at port %d", VERSION, settings.identity, where, health.port)
    anew = False
    try:
        anew = await running
        if not anew:
            log.info("stopped")
    except asyncio.CancelledError:
        log.info("stopped while standing by")
    finally:
        await health.close()
    return anew


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse_args(argv)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        # Anew in the same process: each replica finds other kinds by itself, and a Deployment whose pods all restart
        # within a minute looks like one that crashes.
        while asyncio.run(serve(settings)):
            pass
    except* (LeaseLost, ApiError, OSError) as group:
        for error in group.exceptions:
            print(f"forebay-operator: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
