"""`forebay calibrate` on simulated workers finds the performance model that they run by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.cluster import free_port

from forebay_engine.perf import load

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


class Pool:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "pool.yaml"
        self.port = free_port()
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        spec = {
            "model": {"servedName": "sim", "maxModelLen": 2048},
            "engine": {"type": "Simulated", "simulated": {"performanceModel": "slow"}},
            "objectives": {"timeToFirstTokenMilliseconds": 900, "timePerOutputTokenMilliseconds": 70},
            "prefill": {"replicas": 2},
            "decode": {"replicas": 1},
            "scaling": {"mode": "Off"},
        }
        head = {"apiVersion": "serving.forebay.dev/v1alpha1", "kind": "DisaggregatedModel"}
        self.file.write_text(yaml.safe_dump({**head, "metadata": {"name": "calibrated"}, "spec": spec}))

    def forebay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "forebay_operator.cli", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    running = Pool(tmp_path_factory.mktemp("calibrate"))
    started = running.forebay("up", str(running.file), "--port", str(running.port), "--detach", "--wait", "60")
    try:
        assert started.returncode == 0, started.stderr
        yield running
    finally:
        running.forebay("down", "--now")


def test_the_model_behind_the_workers_is_found(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    done = pool.forebay("calibrate", "--out", str(out), "--minutes", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    found, truth = load(str(out)), load("slow")
    assert found.prefill_seconds(1000) == pytest.approx(truth.prefill_seconds(1000), rel=0.5)
    assert found.decode_seconds(1, 200) == pytest.approx(truth.decode_seconds(1, 200), rel=0.5)
    assert found.kv_bytes_per_token == truth.kv_bytes_per_token
    assert found.kv_capacity_tokens == truth.kv_capacity_tokens
    assert (found.ttft_objective_seconds, found.tpot_objective_seconds) == (0.9, 0.07)
    assert found.role_switch_seconds is not None
    assert 0 < found.role_switch_seconds < 5
    assert found.name == "measured"
    said = json.loads(done.stdout)
    assert said["file"] == str(out)
    assert said["pulls"] > 0
    assert "streams at 64 tokens" in " ".join(said["left_out"]), "0.2 minutes are too few for all"
    status = json.loads(pool.forebay("status", "-o", "json").stdout)
    assert status["ratio"] == "2:1"


def test_a_pool_in_use_is_refused_at_once(pool: Pool, tmp_path: Path) -> None:
    """By short requests too, between which nothing runs."""
    url, stop = f"http://127.0.0.1:{pool.port}/v1/completions", threading.Event()
    body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 1}).encode()

    def use() -> None:
        while not stop.is_set():
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
            stop.wait(0.1)

    user = threading.Thread(target=use)
    user.start()
    try:
        done = pool.forebay("calibrate", f"http://127.0.0.1:{pool.port}", "--out", str(tmp_path / "x.json"))
    finally:
        stop.set()
        user.join()
    assert done.returncode == 1
    assert "calibrate an idle pool" in done.stderr
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("http://127.0.0.1:9",), "can't be reached"),
        (("http://127.0.0.1:{port}", "--out", "/nowhere/at/all.json", "--minutes", "0.1"), "choose another --out"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(pool: Pool, arguments: tuple[str, ...], what: str) -> None:
    done = pool.forebay("calibrate", *(a.format(port=pool.port) for a in arguments))
    assert done.returncode == 1
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
