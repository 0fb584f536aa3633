"""`make e2e`: says what it will do on this machine and what it leaves out, then runs the suite.

    python -m e2e [pytest's arguments]
    python -m e2e -m soak          every disruption again and again, FOREBAY_SOAK_REPEATS (20) times each

On the first cluster that can be had: that of FOREBAY_E2E_KUBECONFIG, kind where Docker runs, two nodes built here.
Where none can, pods run as processes; repeats are left out. FOREBAY_E2E_KEEP=1 leaves the cluster up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from e2e.cluster.binaries import CONTROL_PLANE, Unbuildable, bin_dir, build, missing
from e2e.cluster.providers import CLUSTER_VARIABLE, KEEP, PROVIDERS, Cluster, Provider
from e2e.cluster.shell import CommandFailed
from e2e.cluster.two_nodes import NotUp

SUITE_SECONDS = 1200
SOAK_SECONDS = 6 * 3600
SOAK = "soak"


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell starts what runs in the background with SIGINT ignored, pytest would inherit that and end without its
    # fixtures' ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _on_some_cluster()
    except KeyboardInterrupt:
        _tell("Interrupted.")
        return 130


def _interrupt(*_: object) -> None:
    """SIGTERM ends it as Ctrl-C does, so that the cluster is taken down. Once: `make` and a process group may both send
    one, and a second must not cut the end short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _on_some_cluster() -> int:
    started = time.monotonic()
    for kind in PROVIDERS:
        provider = kind()
        if problem := provider.unfit():
            _tell(f"Left out, a cluster of {provider.name}: {problem}.")
            continue
        _tell(provider.changes())
        try:
            cluster = provider.start()
        except (NotUp, CommandFailed, Unbuildable, OSError, TimeoutError) as error:
            _tell(f"Left out, a cluster of {provider.name}: it did not come up: {error}")
            _stop(provider)
            continue
        except KeyboardInterrupt:
            _stop(provider)
            raise
        _tell(f"The cluster ({provider.name}) is up after {time.monotonic() - started:.0f} s.")
        try:
            return _suite("e2e/on_kubernetes", {CLUSTER_VARIABLE: _described(cluster)})
        finally:
            if os.environ.get(KEEP):
                _tell(f"{KEEP} is set: left up, export KUBECONFIG={cluster.kubeconfig}")
            else:
                _stop(provider)
    if _marks() == SOAK:
        _tell("Left out, the repeats: none of these clusters can be had here. See above for what each lacks.")
        return 0
    return _on_processes()


def _marks() -> str | None:
    """pytest's -m among the arguments."""
    words = sys.argv[1:]
    return next((value for word, value in pairwise(words) if word == "-m"), None)


def _on_processes() -> int:
    _tell("Left out: nodes with containers, so images, node selectors, kube-proxy and DNS. Pods run as processes.")
    if absent := missing(*CONTROL_PLANE):
        _tell(f"Building {', '.join(absent)} into {bin_dir()}: 5 minutes of two cores, once.")
        try:
            build(*CONTROL_PLANE)
        except Unbuildable as error:
            _tell(f"Left out, a real API server: {error}. Its imitation of tests/support takes its place.")
    return _suite("e2e/on_processes", {})


def _suite(folder: str, variables: dict[str, str]) -> int:
    named = [word for word in sys.argv[1:] if word.startswith("e2e/")]
    command = [sys.executable, "-m", "pytest", *(named or [folder]), "-s", "--durations=0"]
    command += [word for word in sys.argv[1:] if word not in named]
    marks = _marks()
    if marks is None:
        command += ["-m", f"not {SOAK}"]
    seconds = SOAK_SECONDS if marks == SOAK else SUITE_SECONDS
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        _tell(f"The suite took over {seconds} s and is ended.")
        return 1
    finally:
        # Gently first: fixtures have processes of their own.
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    for number, seconds in ((signal.SIGINT, 30), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _stop(provider: Provider) -> None:
    try:
        provider.stop()
    except (NotUp, CommandFailed, OSError, TimeoutError) as error:
        _tell(f"Taking the cluster of {provider.name} down: {error}")


def _described(cluster: Cluster) -> str:
    return json.dumps({
        "provider": cluster.provider,
        "kubeconfig": str(cluster.kubeconfig),
        "images": dict(cluster.images),
    })  # fmt: skip


def _tell(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
