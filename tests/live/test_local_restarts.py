"""Local mode restarts what ends, and believes the probes."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest
import yaml

from support.local_mode import DEADLINE_SECONDS, Local, by_name, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


def test_a_process_that_ends_is_restarted_on_its_port_with_back_off(local: Local) -> None:
    before = by_name(local.start_ready())["prefill-0"]
    local.tell("prefill-0.crash")
    os.kill(before["pid"], signal.SIGKILL)
    until("restarts", lambda: len(local.starts("prefill-0")) >= 4)
    text = local.text()
    assert "prefill-0 was ended by SIGKILL; restart 1 in 0.5 s" in text
    assert "prefill-0 exited with code 3; restart 2 in 1 s" in text
    assert "restart 3 in 2 s" in text
    assert "prefill-0.log): told to crash" in text
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


def test_what_no_start_mends_ends_the_start_with_its_cause(local: Local) -> None:
    local.tell("decode-0.hopeless")
    local.start()
    assert local.up is not None
    assert local.up.wait(DEADLINE_SECONDS) == 2
    log = local.state / "logs" / "decode-0.log"
    assert local.text().splitlines()[-1] == f"error: decode-0 can't start: fake: no start mends this (log: {log})"
    assert len(local.starts("decode-0")) == 1
    assert local.gone()
    detached = local.run("up", str(local.file), "--port", str(local.port), "--detach")
    assert detached.returncode == 2
    assert detached.stderr == f"error: decode-0 can't start: fake: no start mends this (log: {log})\n"
    assert local.gone()


def test_a_pool_that_has_served_goes_on_without_the_worker_that_can_not(local: Local) -> None:
    before = by_name(local.start_ready())["decode-0"]
    local.tell("decode-0.hopeless")
    os.kill(before["pid"], signal.SIGKILL)
    status = until("its second end", lambda: (s := local.status()) and by_name(s)["decode-0"]["restarts"] >= 2 and s)
    assert (status["phase"], by_name(status)["prefill-0"]["ready"]) == ("Degraded", True)
    assert by_name(status)["decode-0"]["last_error"] == "fake: no start mends this"
    shown = local.run("status")
    assert shown.returncode == 1
    assert "restarts), last: fake: no start mends this" in shown.stdout
    local.tell("decode-0.hopeless", on=False)
    local.ready()


def test_a_detached_start_that_takes_too_long_says_what_went_wrong(local: Local) -> None:
    local.tell("prefill-0.crash")
    done = local.run("up", str(local.file), "--port", str(local.port), "--detach", "--wait", "8")
    assert done.returncode == 1
    assert "fake is not ready after 8 s (prefill-0 ended (" in done.stderr
    assert "restarts), last: told to crash); it goes on in the background" in done.stderr
    assert local.run("down").returncode == 0
