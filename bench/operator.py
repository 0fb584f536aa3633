"""Many models on one operator, against a real API server: how long, how much memory, and whether it comes to rest.

Needs `make kube-binaries`. The pods are only objects: no node runs them, and their addresses refuse connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from e2e.cluster.control_plane import ControlPlane, Kubelets, NotBuilt, control_plane

from bench.report import finish, percentile
from forebay_operator import kube as k
from forebay_operator.api import labels
from support.fake_cluster import simulated_model

CRD_FILE = Path(__file__).parents[1] / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml"
NAMESPACE = "default"
AT_ONCE = 8


async def until(what: str, check: Callable[[], Awaitable[bool]], seconds: float, period: float = 0.25) -> float:
    """Seconds until `check` held."""
    started = time.monotonic()
    while not await check():
        if time.monotonic() - started > seconds:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(period)
    return time.monotonic() - started


class Requests:
    """The operator's own count of its requests to the API server."""

    _LINE = re.compile(
        r'forebay_api_requests_total\{group="[^"]*",resource="([^"]*)",status="\d+",verb="([^"]*)"\} (\S+)'
    )

    def __init__(self, url: str) -> None:
        self._url = url

    async def counts(self) -> dict[tuple[str, str], float]:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        found: dict[tuple[str, str], float] = {}
        for resource, verb, count in self._LINE.findall(text):
            found[resource, verb] = found.get((resource, verb), 0.0) + float(count)
        return found

    async def writes(self) -> int:
        """All but reads and the Lease."""
        counts = await self.counts()
        return int(
            sum(n for (resource, verb), n in counts.items() if verb not in ("get", "list") and resource != "leases")
        )

    async def total(self) -> int:
        return int(sum(n for (resource, _), n in (await self.counts()).items() if resource != "leases"))


async def role_switches(kube: k.KubeClient, count: int, settled: Callable[[], Awaitable[None]]) -> list[float]:
    """Seconds from a changed target in status until the label is on a pod. `settled` is called once all pods run."""
    name, took = "switching", []
    await kube.apply(k.MODELS, _model(name, 2, 2), force=True)

    async def roles() -> tuple[int, int]:
        pods = await kube.list(k.PODS, NAMESPACE, selector=f"{labels.MODEL}={name},{labels.ROLE}")
        held = [pod["metadata"]["labels"][labels.ROLE] for pod in pods]
        return held.count("prefill"), held.count("decode")

    async def at(target: tuple[int, int]) -> bool:
        return await roles() == target

    await until("four workers with roles", lambda: at((2, 2)), 60.0)
    await settled()
    for turn in range(count):
        target = (1, 3) if turn % 2 == 0 else (2, 2)
        status = {"prefill": {"target": target[0]}, "decode": {"target": target[1]}}
        await kube.merge(k.MODELS, NAMESPACE, name, {"status": status}, subresource="status")
        took.append(await until(f"roles {target}", lambda target=target: at(target), 30.0, 0.01))  # type: ignore[misc]
    return took


def _model(name: str, prefill: int = 1, decode: int = 1) -> dict[str, Any]:
    obj = simulated_model(prefill, decode, name)
    return {**obj, "metadata": {**obj["metadata"], "namespace": NAMESPACE}}


async def run(plane: ControlPlane, models: int, idle_seconds: float, switches: int) -> dict[str, object]:
    kube: k.KubeClient = plane.client()

    async def served() -> bool:
        with contextlib.suppress(k.NotFound):
            await kube.list(k.MODELS, None)
            return True
        return False

    await until("the kind served", served, 30.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig())}
    command = [sys.executable, "-m", "forebay_operator.main", "--operator-namespace=default", "--host=127.0.0.1",
               f"--port={port}", "--log-level=warning"]  # fmt: skip
    log = (plane.folder / "operator.log").open("wb")
    operator = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    kubelets = Kubelets(kube, labels.MODEL, poll=1.0, network="127.77")
    running = asyncio.create_task(kubelets.run())
    requests = Requests(f"http://127.0.0.1:{port}")
    try:
        started = time.monotonic()
        for first in range(0, models, AT_ONCE):
            names = [f"m{number:04d}" for number in range(first, min(models, first + AT_ONCE))]
            await asyncio.gather(*(kube.apply(k.MODELS, _model(name), force=True) for name in names))

        async def reconciled() -> bool:
            held = await kube.list(k.MODELS, NAMESPACE)
            seen = [m for m in held if m.get("status", {}).get("observedGeneration") == m["metadata"]["generation"]]
            deployments = await kube.list(k.DEPLOYMENTS, NAMESPACE, selector=labels.MODEL)
            return len(seen) == models and len(deployments) == 3 * models

        await until("all models reconciled", reconciled, 600.0, 2.0)
        took = time.monotonic() - started
        print(f"{models} models reconciled after {took:.1f} s", file=sys.stderr, flush=True)

        async def ready() -> bool:
            pods = await kube.list(k.PODS, NAMESPACE, selector=labels.ROLE)
            return len(pods) == 2 * models

        await until("all workers with roles", ready, 600.0, 2.0)
        seen = -1

        async def quiet() -> bool:
            nonlocal seen
            before, seen = seen, await requests.writes()
            return before == seen

        await until("rest", quiet, 600.0, 5.0)
        calls = await requests.total()
        rss = psutil.Process(operator.pid).memory_info().rss / 1e6
        writes = await requests.writes()
        await asyncio.sleep(idle_seconds)
        idle = await requests.writes() - writes

        async def no_more_pods() -> None:
            # Their polls share this process with the measurement.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        switched = await role_switches(kube, switches, no_more_pods)
        return {
            "bench": "operator",
            "models": models,
            "reconciled_s": round(took, 1),
            "rss_mb": round(max(rss, psutil.Process(operator.pid).memory_info().rss / 1e6), 1),
            "api_calls_per_model": round(calls / models, 1),
            "idle_writes": idle,
            "idle_s": idle_seconds,
            "role_switch_s_p50": round(percentile(switched, 0.5), 3),
            "role_switch_s_p95": round(percentile(switched, 0.95), 3),
        }
    except BaseException:
        sys.stderr.write((plane.folder / "operator.log").read_text(errors="replace")[-3000:])
        raise
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        operator.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.wait(15)
        operator.kill()
        log.close()
        await kube.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--switches", type=int, default=20)
    args = parser.parse_args()
    try:
        with control_plane(manifests=[yaml.safe_load(CRD_FILE.read_text())]) as plane:
            finish(asyncio.run(run(plane, args.models, args.idle_seconds, args.switches)))
    except NotBuilt as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
