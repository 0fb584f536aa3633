"""`forebay up` with the real engine and router."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml

from support.local_mode import DEADLINE_SECONDS, EXAMPLES, Local, by_name, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


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
