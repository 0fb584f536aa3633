"""`forebay up` with real processes. Most containers are fakes, given by podTemplate: they test the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import yaml

from forebay_operator.local import launch
from forebay_operator.local.control import Control
from forebay_operator.local.errors import LocalError
from forebay_operator.local.ports import Ports
from forebay_operator.local.state import StateFolder

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

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


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    running = Local(tmp_path)
    yield running
    running.clean()


def by_name(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in status["containers"]}


def test_up_is_ready_shows_load_and_drains_on_sigint(local: Local) -> None:
    up = local.start("--worker-port", str(free_port(2)))
    local.ready()
    status = until("load", lambda: (s := local.status()) and s["ttft_p95_ms"] and s)
    assert status["phase"] == "Ready"
    assert status["endpoint"] == f"http://127.0.0.1:{local.port}/v1"
    assert (status["ratio"], status["ttft_p95_ms"], status["tpot_p95_ms"]) == ("1:1", 123.0, 7.0)
    worker = by_name(status)["decode-0"]
    assert worker["role"] == worker["pool"] == "decode"
    assert (worker["waiting"], worker["kv_usage"], worker["kv_bytes_received"]) == (1, 0.25, 4096)
    assert worker["transport"] == "SharedMemory"
    shown = local.run("status", "-o", "json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["containers"][1]["name"] == "decode-0"
    assert "decode-0" in local.run("status").stdout
    assert local.workers() == {"prefill-0": "prefill", "decode-0": "decode"}
    assert local.state.stat().st_mode & 0o777 == 0o700
    assert (local.state / "token").stat().st_mode & 0o777 == 0o600
    assert len((local.state / "token").read_text()) == 64
    assert "decode-0 starts" in (local.state / "logs" / "decode-0.log").read_text()

    up.send_signal(signal.SIGINT)
    assert up.wait(DEADLINE_SECONDS) == 0, local.text()
    assert local.stops()[0] == "router-0", "the router ends first: its streams need the workers"
    assert sorted(local.stops()) == ["decode-0", "prefill-0", "router-0"]
    assert local.gone()
    assert not (local.state / "token").exists()
    assert local.run("status").returncode == 1
    assert "decode-0 is ready" in local.text(), "plain lines where stdout is no terminal"


def test_a_running_stream_finishes_before_the_workers_end(local: Local) -> None:
    up = local.start("--name", "fake")
    local.ready()
    stream = local.hold(local.port)
    up.send_signal(signal.SIGTERM)
    status = until("the drain", lambda: (s := local.status()) and by_name(s)["router-0"]["state"] == "Stopping" and s)
    states = {name: container["state"] for name, container in by_name(status).items()}
    assert states == {"prefill-0": "Running", "decode-0": "Running", "router-0": "Stopping"}
    assert (status["phase"], status["ready"]) == ("Draining", False)
    local.tell("router-0.release")
    assert stream.read() == b"finished\n"
    assert up.wait(DEADLINE_SECONDS) == 0, local.text()
    assert local.stops()[0] == "router-0"


def test_a_second_signal_kills_what_still_runs(local: Local) -> None:
    up = local.start()
    local.ready()
    local.hold(local.port)
    up.send_signal(signal.SIGINT)
    until("draining", lambda: "draining" in local.text())
    up.send_signal(signal.SIGINT)
    assert up.wait(5) == 1, local.text()
    assert local.gone()
    assert local.stops() == []


def test_the_drain_deadline_ends_a_stream_that_never_does(local: Local) -> None:
    local.write(drain={"timeoutSeconds": 1})
    local.start_ready()
    local.hold(local.port)
    started = time.monotonic()
    assert local.run("down", "--timeout", "30").returncode == 0
    assert time.monotonic() - started >= 1
    assert local.up is not None
    assert local.up.wait(DEADLINE_SECONDS) == 1
    assert local.gone()
    assert sorted(local.stops()) == ["decode-0", "prefill-0"], "the workers still drain"


def test_sigkill_of_the_parent_leaves_nothing_behind(local: Local) -> None:
    up = local.start()
    local.ready()
    assert len(local.processes()) == 4
    up.kill()
    up.wait()
    until("the end of all processes", local.gone, 5)
    token = (local.state / "token").read_text()
    # What the dead one left does not stop the next one, which has a token of its own.
    local.start()
    local.ready()
    assert (local.state / "token").read_text() != token


def test_sigkill_while_processes_are_being_started(local: Local) -> None:
    """The parent may be dead before its child has asked to die with it."""
    for _ in range(3):
        up = local.start()
        until("the first child", lambda: len(local.processes()) > 1)
        up.kill()
        up.wait()
        until("the end of all processes", local.gone, 10)


def test_launcher_refuses_to_run_under_another_parent(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getppid()), "touch", str(proof)], timeout=30
    )
    assert done.returncode == 137
    assert not proof.exists()
    done = subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "touch", str(proof)], timeout=30
    )
    assert done.returncode == 0
    assert proof.exists()


def test_a_process_that_ends_is_restarted_on_its_port_with_back_off(local: Local) -> None:
    before = by_name(local.start_ready())["prefill-0"]
    local.tell("prefill-0.crash")
    os.kill(before["pid"], signal.SIGKILL)
    until("restarts", lambda: len(local.starts("prefill-0")) >= 4)
    text = local.text()
    assert "prefill-0 was ended by SIGKILL; restart 1 in 0.5 s" in text
    assert "prefill-0 exited with code 3; restart 2 in 1 s" in text
    assert "restart 3 in 2 s" in text
    status = local.status()
    assert status is not None
    assert (status["phase"], status["ready"]) == ("Degraded", False)
    assert local.run("status").returncode == 1
    local.tell("prefill-0.crash", on=False)
    after = by_name(local.ready())["prefill-0"]
    assert after["port"] == before["port"]
    assert after["pid"] != before["pid"]
    assert after["restarts"] >= 3
    assert by_name(local.ready())["decode-0"]["restarts"] == 0


def test_a_process_that_is_not_alive_is_ended_with_its_children(local: Local) -> None:
    local.tell("decode-0.child")
    before = by_name(local.start_ready())["decode-0"]
    children = psutil.Process(before["pid"]).children()
    assert len(children) == 1
    local.tell("decode-0.stubborn")
    local.tell("decode-0.sick")
    until("the end of the sick one", lambda: not psutil.pid_exists(before["pid"]))
    until("the end of its child", lambda: not children[0].is_running())
    local.tell("decode-0.sick", on=False)
    local.tell("decode-0.stubborn", on=False)
    assert by_name(local.ready())["decode-0"]["pid"] != before["pid"]
    assert "decode-0 is not alive: /health failed 2 times (status 500)" in local.text()


def test_readiness_comes_and_goes_without_a_restart(local: Local) -> None:
    local.start_ready()
    local.tell("prefill-0.unready")
    status = until("unreadiness", lambda: (s := local.status()) and not s["ready"] and s)
    assert by_name(status)["prefill-0"]["state"] == "Running"
    local.tell("prefill-0.unready", on=False)
    assert by_name(local.ready())["prefill-0"]["restarts"] == 0


def test_a_process_that_never_starts_is_restarted(local: Local) -> None:
    manifest = local.manifest()
    manifest["spec"]["decode"] = json.loads(json.dumps(manifest["spec"]["decode"]))
    container = manifest["spec"]["decode"]["podTemplate"]["spec"]["containers"][0]
    container["startupProbe"] = {"failureThreshold": 3, "periodSeconds": 1, "terminationGracePeriodSeconds": 1}
    local.file.write_text(yaml.safe_dump(manifest))
    local.tell("decode-0.sick")
    local.start()
    until("restarts", lambda: len(local.starts("decode-0")) >= 2)
    assert "decode-0 did not start: /health failed 3 times in a row" in local.text()


def test_ratio_switches_the_least_loaded_worker_and_refuses_what_does_not_fit(local: Local) -> None:
    manifest = local.manifest()
    manifest["spec"]["prefill"]["replicas"] = 2  # the pools share one dict: two workers each
    local.file.write_text(yaml.safe_dump(manifest))
    status = local.start_ready()
    until("load", lambda: (s := local.status()) and s["ttft_p95_ms"])
    assert status["ratio"] == "2:2"
    done = local.run("ratio", "1:3", "-o", "json")
    assert done.returncode == 0, done.stderr
    # The fake's load is its number: prefill-0 has least.
    assert json.loads(done.stdout) == {"ratio": "1:3", "switched": {"prefill-0": "decode"}}
    assert local.workers() == {
        "prefill-0": "decode",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    after = local.status()
    assert after is not None
    assert (after["ratio"], by_name(after)["prefill-0"]["pool"]) == ("1:3", "prefill")
    assert local.run("ratio", "1:3").stdout == "prefill:decode is 1:3 already\n"

    refused = local.run("ratio", "1:2")
    assert refused.returncode == 2
    assert refused.stderr == "error: 1:2 does not fit 4 workers; these do: 1:3, 2:2, 3:1\n"
    assert local.run("ratio", "0:4").returncode == 2
    assert local.run("ratio", "1:3", "--name", "other").stderr == "error: nothing named other is up; up: fake\n"
    assert local.workers()["prefill-0"] == "decode"


def test_a_port_in_use_is_said_before_anything_starts(local: Local) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", local.port))
        taken.listen()
        done = local.run("up", str(local.file), "--port", str(local.port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {local.port} on 127.0.0.1 can't be used: process {os.getpid()} (")
    assert done.stderr.endswith("stop that process or choose another --port\n")
    assert local.starts("prefill-0") == []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = local.run("up", str(local.file), "--port", str(local.port), "--worker-port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 can't be used" in done.stderr
    assert local.starts("prefill-0") == []


def test_a_second_up_of_the_same_name_is_refused(local: Local) -> None:
    local.start_ready()
    done = local.run("up", str(local.file), "--port", str(free_port()))
    assert done.returncode == 1
    assert local.up is not None
    assert done.stderr == (
        f"error: fake is already up (process {local.up.pid}); "
        "end it with `forebay down --name fake` or choose another --name\n"
    )
    assert len(local.starts("prefill-0")) == 1
    # Under another name both run, and a command must then say which it means.
    other = local.run("up", str(local.file), "--port", str(free_port()), "--name", "second", "--detach")
    assert other.returncode == 0, other.stderr
    assert local.run("status").stderr == "error: several are up: fake, second; say which with --name\n"
    assert local.run("status", "--name", "second").returncode == 0
    assert local.run("down", "--name", "second").stdout == "second is down\n"
    assert local.run("status").returncode == 0


def test_detached_up_survives_its_terminal_and_goes_down(local: Local) -> None:
    done = local.run("up", str(local.file), "--port", str(local.port), "--detach")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"fake is ready: fake-model at http://127.0.0.1:{local.port}/v1")
    assert len(local.processes()) == 4
    assert local.run("down").stdout == "fake is down\n"
    assert local.gone()
    assert local.run("down").stderr == "error: nothing is up; start with `forebay up FILE`\n"


def test_detached_up_that_fails_says_why(local: Local) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", local.port))
        taken.listen()
        done = local.run("up", str(local.file), "--port", str(local.port), "--detach")
    assert done.returncode == 1
    assert "can't be used" in done.stderr


def test_a_reader_of_its_output_that_leaves_makes_it_drain(local: Local) -> None:
    """`forebay up FILE | head`: as when the terminal goes."""
    read, write = os.pipe()
    arguments = local.command("up", str(local.file), "--port", str(local.port))
    local.up = subprocess.Popen(arguments, env=local.env, stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    until("readiness", lambda: (s := local.status()) and s["ready"])
    os.close(read)
    assert local.up.wait(DEADLINE_SECONDS) == 0
    assert sorted(local.stops()) == ["decode-0", "prefill-0", "router-0"]
    assert local.gone()


def test_chat_streams_says_who_served_it_and_keeps_the_conversation(local: Local) -> None:
    local.start_ready()
    done = local.run("chat", "hello there")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 messages, last: hello there[31m\n", "the escape character is dropped"
    assert done.stderr.startswith("[prefill prefill-0, decode decode-0, 2 tokens, TTFT ")
    done = local.run("chat", "--system", "be brief", said="first\n\nsecond\n")
    assert "2 messages, last: first" in done.stdout
    assert "4 messages, last: second" in done.stdout
    done = local.run("chat", "x", "--url", f"http://127.0.0.1:{free_port()}/v1", "--model", "m")
    assert done.returncode == 1
    assert "can't be reached" in done.stderr


def test_bad_input_is_one_line_and_exit_code_2(local: Local) -> None:
    local.write(engine={"type": "VLLM"})
    done = local.run("up", str(local.file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "spec.engine.type: VLLM is not supported yet; use Native or Simulated" in done.stderr
    local.write(model={"servedName": "m", "source": "pvc://claim/m"})
    assert "needs a cluster" in local.run("up", str(local.file)).stderr
    local.write(engine={"type": "Native"}, model={"servedName": "m", "source": "hostpath:///nowhere"})
    assert local.run("up", str(local.file)).returncode == 2
    assert local.run("up", "nowhere.yaml").stderr == "error: cannot read nowhere.yaml: No such file or directory\n"
    local.write()
    assert local.run("up", str(local.file), "--name", "Not/A/Name").returncode == 2
    assert local.run("version", "-o", "json").stdout.startswith('{"version":')


def test_the_real_engine_and_router_simulated(local: Local) -> None:
    """The commands, flags, probes and files fit together; a role switched by hand is the router's at once."""
    manifest = yaml.safe_load((EXAMPLES / "simulated-8-workers.yaml").read_text())
    manifest["metadata"]["name"] = "fake"
    manifest["spec"]["prefill"]["replicas"] = manifest["spec"]["decode"]["replicas"] = 2
    local.file.write_text(yaml.safe_dump(manifest))
    up = local.start()
    local.ready()
    done = local.run("chat", "hello", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr + local.text()
    assert done.stderr.startswith("[prefill prefill-")
    assert ", decode decode-" in done.stderr
    assert "8 tokens" in done.stderr

    def moved() -> int:
        status = local.status()
        workers = [c for c in status["containers"] if c["pool"]] if status else []
        # A worker knows its transport with its first step's report, a moment after it is ready.
        told = {c["transport"] for c in workers} == {"Simulated"}
        return sum(c["kv_bytes_received"] for c in workers) if told else 0

    assert until("KV moved, by the simulated transport", moved) > 0

    assert local.run("ratio", "1:3").returncode == 0
    one = next(name for name, role in local.workers().items() if role == "prefill")
    # Within the router's poll of the file every prefill goes to the one worker that is left in the role.
    until("the switch", lambda: f"[prefill {one}," in local.run("chat", "again", "--max-tokens", "2").stderr)
    up.send_signal(signal.SIGINT)
    assert up.wait(DEADLINE_SECONDS) == 0, local.text()
    assert local.gone()


@pytest.mark.model
def test_the_real_model_answers_and_sigkill_ends_its_core_processes_too(local: Local, smollm2_dir: Path) -> None:
    manifest = yaml.safe_load((EXAMPLES / "smollm2.yaml").read_text())
    manifest["metadata"]["name"] = "fake"
    local.file.write_text(yaml.safe_dump(manifest))
    up = local.start()
    until("readiness", lambda: up.poll() is None and (s := local.status()) and s["ready"], 100)
    done = local.run("chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "16")
    assert "Paris" in done.stdout, done.stderr + local.text()
    assert done.stderr.startswith("[prefill prefill-0, decode decode-0, ")
    until("KV moved", lambda: (s := local.status()) and by_name(s)["decode-0"]["kv_bytes_received"])
    assert len(local.processes()) == 6, "up, router, and two of each worker"
    up.kill()
    up.wait()
    until("the end of all processes", local.gone, 5)
