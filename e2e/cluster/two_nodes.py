"""The two-node cluster's life: up, down, what is loaded into it, and what a test does to its processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from e2e.cluster import cgroups, components, dns, host, images, locks, network, node, pki, processes
from e2e.cluster.shell import CommandFailed, run
from e2e.cluster.state import API_PORT, HOST_ADDRESS, NODES, Node, State

UP_SECONDS: Final = 120.0
IMPORT_SECONDS: Final = 180.0
REMOVE_SECONDS: Final = 300.0
_COVERED: Final = ("/run", "/var/run", "/var/lib", "/var/log")
_SOCKET_PATH: Final = 100


class NotUp(Exception):
    """The cluster did not come up; the text says what was waited for and where to look."""


@contextlib.contextmanager
def _alone(state: State) -> Iterator[None]:
    """One `up` or `down` at a time on this machine. Raises NotUp."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(state.lock, "another `up` or `down`", seconds=0))
        except TimeoutError as error:
            raise NotUp(str(error)) from error
        yield


def up(state: State) -> None:
    """Returns when both nodes are Ready and names resolve. What an earlier `up` left is removed first.

    Raises NotUp, CommandFailed, Unbuildable; then nothing of it stays.
    """
    for folder in _COVERED:
        if state.root.is_relative_to(folder):
            raise NotUp(f"{state.root} is under {folder}, which each node covers: set XDG_CACHE_HOME elsewhere")
    if len(str(state.socket(NODES[0]))) > _SOCKET_PATH:
        raise NotUp(f"{state.socket(NODES[0])} is too long for a socket's path: set XDG_CACHE_HOME to a shorter one")
    with _alone(state):
        if state.run.exists() or network.left_over():
            _tell("removing what an earlier `up` left")
            _remove(state)
        host.install()
        try:
            _bring_up(state)
        except BaseException:
            # Whatever it was, a Ctrl-C too: a half cluster is of no use to anybody.
            _remove(state)
            raise


def _bring_up(state: State) -> None:
    started = time.monotonic()
    shutil.rmtree(state.logs, ignore_errors=True)
    for folder in (state.run, state.pki, state.pids, state.logs):
        folder.mkdir(parents=True)
    state.run.chmod(0o700)
    archives = images.make_system(state)
    pki.make(state)
    network.up()
    components.start(state, "etcd")
    components.start(state, components.API_SERVER)
    for each in NODES:
        node.start(state, each)
    _wait(state, "API server", lambda: _answers(state))
    for name in components.FOLLOWERS:
        components.start(state, name)
    for each in NODES:
        _wait(state, f"containerd on {each.name}", lambda each=each: _containerd_answers(state, each))  # type: ignore[misc]
    load(state, *archives)
    listed = {"apiVersion": "v1", "kind": "List", "items": dns.objects()}
    kubectl(state, "apply", "-f", "-", stdin=json.dumps(listed))
    _wait(state, "two Ready nodes", lambda: nodes_ready(state) == len(NODES))
    _tell(f"both nodes Ready after {time.monotonic() - started:.1f} s")
    _wait(state, "cluster DNS", lambda: _dns_ready(state))
    state.complete.touch()
    _tell(f"up after {time.monotonic() - started:.1f} s")


def down(state: State) -> None:
    """Leaves programs, images and logs; of a cluster that is half up too. Raises NotUp."""
    started = time.monotonic()
    with _alone(state):
        _remove(state)
    _tell(f"down after {time.monotonic() - started:.1f} s")


def _remove(state: State) -> None:
    started = time.monotonic()
    # Nothing here is worth an orderly stop; a node's whole process namespace goes with its process 1. The controllers
    # first, or they would act on what the others' end looks like.
    for name in (*components.FOLLOWERS, *(each.name for each in NODES), components.API_SERVER, "etcd"):
        processes.kill(state.pids / name)
    processes.kill_users_of(state.run)
    network.down()
    for each in NODES:
        for left in cgroups.remove(each):
            _tell(f"left behind: {left}")
    # The nodes' disks: some 10,000 files for each image that was loaded.
    _tell(f"processes and network are gone after {time.monotonic() - started:.1f} s; removing the nodes' disks")
    run("rm", "-rf", "--one-file-system", state.run, seconds=REMOVE_SECONDS)


def is_up(state: State) -> bool:
    """All of it, and not what is left of an `up` that was killed."""
    return state.complete.exists() and _answers(state) and nodes_ready(state) == len(NODES)


def load(state: State, *archives: Path) -> None:
    """Import into every node at once. Raises CommandFailed."""
    for archive in archives:
        importing = {
            each: subprocess.Popen(
                ["ctr", "-a", str(state.socket(each)), "-n", "k8s.io", "images", "import", str(archive)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for each in NODES
        }
        for each, process in importing.items():
            try:
                _, said = process.communicate(timeout=IMPORT_SECONDS)
            except subprocess.TimeoutExpired as error:
                for other in importing.values():
                    other.kill()
                    other.wait()
                raise CommandFailed(f"importing {archive} took over {IMPORT_SECONDS:.0f} s") from error
            if process.returncode:
                raise CommandFailed(f"importing {archive} into {each.name}: {said.strip()}")


def kubectl(state: State, *words: object, **options: object) -> str:
    """Its output. Raises CommandFailed."""
    return run(state.bin / "kubectl", f"--kubeconfig={state.kubeconfig}", *words, **options).stdout  # type: ignore[arg-type]


def signal_process(state: State, where: str, name: str, number: signal.Signals) -> None:
    """To a node's `init` (KILL is a power cut), `containerd`, `kubelet`, `kube-proxy`; or, `where` being `host`, to a
    part of the control plane. Raises LookupError."""
    if where == "host":
        found = processes.pid_of(state.pids / name)
        if found is None:
            raise LookupError(f"{name} does not run: see {state.logs}/{name}.log")
    else:
        found = node.pid(state, by_name(where), name)
    os.kill(found, number)


def signal_containers(uid: str, number: signal.Signals) -> list[int]:
    """To the processes of the pod with that uid; its pause container, and so the pod, is left out. Their ids."""
    mark, found = f"/pod{uid}/", []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "cgroup").read_text() and processes.program(int(entry.name)) != "pause":
                os.kill(int(entry.name), number)
                found.append(int(entry.name))
    return found


def stop_follower(state: State, name: str) -> None:
    processes.kill(state.pids / name)


def start_follower(state: State, name: str) -> None:
    components.start(state, name)


def power_on(state: State, each: Node) -> None:
    if processes.pid_of(state.pids / each.name) is not None:
        raise NotUp(f"{each.name} is running")
    # cAdvisor would wait three seconds for each container that it finds a group of.
    cgroups.remove(each)
    node.start(state, each)


def by_name(name: str) -> Node:
    for each in NODES:
        if each.name == name:
            return each
    raise LookupError(f"no node {name}; there are {', '.join(each.name for each in NODES)}")


def status(state: State) -> Iterator[tuple[str, int | None, int]]:
    """(process, id or None when it does not run, resident KiB)."""
    for name in ("etcd", components.API_SERVER, *components.FOLLOWERS):
        found = processes.pid_of(state.pids / name)
        yield name, found, processes.resident(found)
    for each in NODES:
        for name in ("init", *node.SUPERVISED):
            try:
                found = node.pid(state, each, name)
            except LookupError:
                found = None
            yield f"{each.name}/{name}", found, processes.resident(found)


def nodes_ready(state: State) -> int:
    path = "{.items[*].status.conditions[?(@.type=='Ready')].status}"
    try:
        return kubectl(state, "get", "nodes", "-o", f"jsonpath={path}", seconds=10).split().count("True")
    except CommandFailed:
        return 0


def _dns_ready(state: State) -> bool:
    try:
        words = ("-n", dns.NAMESPACE, "get", "deployment", dns.NAME, "-o", "jsonpath={.status.readyReplicas}")
        return kubectl(state, *words, seconds=10) == "1"
    except CommandFailed:
        return False


def _containerd_answers(state: State, each: Node) -> bool:
    if not state.socket(each).exists():
        return False
    return run("ctr", "-a", state.socket(each), "version", check=False, seconds=10).returncode == 0


def _answers(state: State) -> bool:
    try:
        trusted = ssl.create_default_context(cafile=state.pki / "ca.crt")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
        )
        with opener.open(f"https://{HOST_ADDRESS}:{API_PORT}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(state: State, what: str, check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + UP_SECONDS
    while not check():
        for file in state.pids.iterdir():
            if processes.pid_of(file) is None:
                raise NotUp(f"{file.name} ended while waiting for {what}:\n{_tail(state.logs / f'{file.name}.log')}")
        if time.monotonic() > deadline:
            raise NotUp(f"no {what} within {UP_SECONDS:.0f} s: see the logs in {state.logs}")
        time.sleep(0.2)


def _tail(log: Path, characters: int = 2000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else f"{log} is not there"


def _tell(what: str) -> None:
    print(what, flush=True)
