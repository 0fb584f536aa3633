"""`forebay up` as a test runs it: its manifest, its state folder and the processes that carry its mark."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import yaml

from forebay_operator.local.control import Control
from forebay_operator.local.errors import LocalError
from forebay_operator.local.ports import Ports
from forebay_operator.local.state import StateFolder

FAKE = Path(__file__).parents[1] / "operator" / "fake_container.py"


EXAMPLES = Path(__file__).parents[2] / "examples"


DEADLINE_SECONDS = 30.0


T = TypeVar("T")


def until(what: str, check: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """The first true value of `check`, polled until the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, below the range that the kernel gives to outgoing connections."""
    while True:
        ports = Ports("127.0.0.1")
        try:
            found = ports.find(random.randint(20000, 32000), count)
        finally:
            ports.close()
        if found[-1] - found[0] == count - 1:
            return found[0]


class Local:
    """One model in local mode: its manifest, its state folder and the processes that carry its mark."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.control = folder / "control"
        self.control.mkdir()
        self.state = folder / "state" / "forebay" / "fake"
        self.file = folder / "fake.yaml"
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200", "MARK": self.mark}
        self.output = folder / "output"
        self.up: subprocess.Popen[bytes] | None = None
        self.write()

    def write(self, **changes: Any) -> None:
        """The manifest, with top-level fields of spec replaced."""
        self.file.write_text(yaml.safe_dump(self.manifest(**changes)))

    def manifest(self, **changes: Any) -> dict[str, Any]:
        args = ["--port=$(PORT)", "--name=$(POD_NAME)", f"--control={self.control}"]
        command = [sys.executable, str(FAKE)]
        probes = {
            "startupProbe": {"periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": {"periodSeconds": 1, "failureThreshold": 1},
            "livenessProbe": {"periodSeconds": 1, "failureThreshold": 2, "terminationGracePeriodSeconds": 1},
        }

        def template(name: str, *more: str) -> dict[str, Any]:
            return {"spec": {"containers": [{"name": name, "command": command, "args": [*args, *more], **probes}]}}

        pool = {"replicas": 1, "podTemplate": template("engine")}
        return {
            "apiVersion": "serving.forebay.dev/v1alpha1",
            "kind": "DisaggregatedModel",
            "metadata": {"name": "fake"},
            "spec": {
                "model": {"servedName": "fake-model"},
                "engine": {"type": "Simulated"},
                "prefill": pool,
                "decode": pool,
                "router": {"replicas": 1, "podTemplate": template("router", "--workers-file=$(WORKERS_FILE)")},
                "drain": {"timeoutSeconds": 20},
                **changes,
            },
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "forebay_operator.cli", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            self.up = subprocess.Popen(
                self.command("up", str(self.file), "--port", str(self.port), *arguments),
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.up

    def run(self, *arguments: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.env, capture_output=True, text=True, timeout=60, input=said
        )

    def status(self) -> dict[str, Any] | None:
        """As `forebay status -o json`, without the half second that a new interpreter takes."""
        try:
            answer = asyncio.run(Control(StateFolder("fake", self.state.parent)).status())
        except (LocalError, OSError):
            return None
        status: dict[str, Any] = msgspec.to_builtins(answer)
        return status

    def start_ready(self, *arguments: str) -> dict[str, Any]:
        self.start(*arguments)
        return self.ready()

    def ready(self) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            if self.up is not None and self.up.poll() is not None:
                raise AssertionError(self.text())
            status = self.status()
            return status if status and status["ready"] else None

        return until("readiness", check)

    def text(self) -> str:
        return self.output.read_text()

    def starts(self, name: str) -> list[int]:
        try:
            return [int(line) for line in (self.control / f"{name}.starts").read_text().split()]
        except FileNotFoundError:
            return []

    def stops(self) -> list[str]:
        try:
            return (self.control / "stops").read_text().split()
        except FileNotFoundError:
            return []

    def tell(self, what: str, on: bool = True) -> None:
        path = self.control / what
        path.touch() if on else path.unlink()

    def processes(self) -> set[int]:
        """Every process of this model but ours, found by the mark in its environment."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    def gone(self) -> bool:
        return not self.processes()

    def workers(self) -> dict[str, str]:
        entries = json.loads((self.state / "workers.json").read_text())["workers"]
        return {entry["name"]: entry["role"] for entry in entries}

    def hold(self, port: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
        connection.request("GET", "/held")
        response = connection.getresponse()
        assert response.readline() == b"begun\n"
        return response

    def clean(self) -> None:
        if self.up is not None and self.up.poll() is None:
            self.up.kill()
            self.up.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def by_name(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in status["containers"]}
