"""`forebay up` begins, drains and ends with nothing left behind. Containers are fakes, given by podTemplate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay_operator.local import launch
from support.local_mode import DEADLINE_SECONDS, Local, by_name, free_port, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


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
