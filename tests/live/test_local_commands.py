"""The commands beside a running `forebay up`, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.local_mode import DEADLINE_SECONDS, Local, by_name, free_port, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


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
    local.write()
    assert local.run("up", str(local.file), "--name", "Not/A/Name").returncode == 2
    assert local.run("version", "-o", "json").stdout.startswith('{"version":')


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory; give a Disaggr"),
        (["up", "nowhere.yaml", "--detach"], "cannot read nowhere.yaml: No such file or directory; give a Disaggr"),
        (["up", "."], "cannot read .: Is a directory"),
        (["up", "FILE", "--api-keys-file", "."], "cannot read the API key file .: Is a directory"),
        (["up", "FILE", "--api-keys-file", ".", "--detach"], "cannot read the API key file .: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_not_be_used_is_one_line_and_exit_code_2(local: Local, arguments: list[str], says: str) -> None:
    local.write(router={**local.manifest()["spec"]["router"], "apiKeysSecretRef": {"name": "keys"}})
    done = local.run(*(str(local.file) if argument == "FILE" else argument for argument in arguments))
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith(f"error: {says}")
    assert not local.state.exists()


@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["here", "detached"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"servedName": "m", "source": "cache://nosuch"}}, "cache://nosuch: no model 'nosuch' is known that"),
        ({"model": {"servedName": "m", "source": "hostpath:///nowhere"}}, "hostpath:///nowhere: no config.json there"),
    ],
    ids=["unknown name", "no folder"],
)
def test_a_model_that_is_not_there(local: Local, changes: dict[str, Any], says: str, detach: list[str]) -> None:
    pool = {**local.manifest()["spec"]["prefill"], "gpus": {"count": 0}}
    local.write(engine={"type": "Native"}, prefill=pool, decode=pool, **changes)
    done = local.run("up", str(local.file), "--port", str(local.port), *detach)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith(f"error: spec.model.source {says}")
    assert not local.state.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status"], "nothing is up; start with `forebay up FILE`"),
        (["down"], "nothing is up"),
        (["ratio", "1:1"], "nothing is up"),
        (["chat", "hi"], "nothing is up"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_fails_is_one_line_and_exit_code_1(local: Local, arguments: list[str], says: str) -> None:
    local.write(router={**local.manifest()["spec"]["router"], "apiKeysSecretRef": {"name": "keys"}})
    done = local.run(*(str(local.file) if argument == "FILE" else argument for argument in arguments))
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert done.stderr.startswith(f"error: {says}")


def test_no_room_is_one_line_and_exit_code_1(local: Local) -> None:
    """A file size of 0 stands for a full disk: it needs no file system of its own."""
    for arguments in (["up", str(local.file), "--port", str(local.port)], ["up", str(local.file), "--detach"]):
        done = subprocess.run(
            local.command(*arguments),
            env=local.env,
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ")
    assert local.gone()


def test_output_to_a_full_disk_is_one_line_and_exit_code_1(local: Local) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            local.command("version"), env=local.env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_reader_that_leaves_is_no_error_message(local: Local) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        local.command("version"), env=local.env, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
