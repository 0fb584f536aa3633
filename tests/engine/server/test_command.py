"""The forebay-engine command: flags to settings, and real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay_engine.main import quantity, read_settings
from forebay_wire import exit_codes, paths, stream
from support.cluster import free_port

TOKEN = "token-of-the-tests"
SIMULATED = ["--type", "simulated", "--served-name", "sim", "--perf-model", "instant", "--max-model-len", "512"]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("512Mi", 512 * 2**20), ("40Gi", 40 * 2**30), ("2k", 2000), ("3G", 3 * 10**9)]
)
def test_quantities(text: str, size: int) -> None:
    assert quantity(text) == size


def test_every_flag_reaches_its_setting(tmp_path: Path) -> None:
    arguments = (
        f"--type native --model-dir {tmp_path} --served-name s --host 0.0.0.0 --port 81 --advertise-host 10.0.0.1 "
        "--name n --token-file /t --max-model-len 100 --dtype float32 --kv-memory 1Gi --block-size 32 --max-running 5 "
        "--max-waiting 6 --max-batched-tokens 7 --threads 2 --transport tcp --transport-required --lease-seconds 9 "
        "--pull-timeout-seconds 4 --drain-timeout-seconds 8 --perf-model p --no-chunked-prefill --no-prefix-cache "
        "--log-level debug"
    )
    settings = read_settings(arguments.split())
    assert (settings.engine, settings.model_dir, settings.served_name) == ("native", tmp_path, "s")
    assert (settings.host, settings.port, settings.advertise_host, settings.name) == ("0.0.0.0", 81, "10.0.0.1", "n")
    assert (settings.token_file, settings.max_model_len, settings.dtype) == (Path("/t"), 100, "float32")
    assert (settings.kv_memory_bytes, settings.block_size) == (2**30, 32)
    assert (settings.max_running, settings.max_waiting, settings.max_batched_tokens, settings.threads) == (5, 6, 7, 2)
    assert (settings.transport, settings.transport_required) == ("tcp", True)
    assert (settings.lease_seconds, settings.pull_timeout_seconds, settings.drain_timeout_seconds) == (9.0, 4.0, 8.0)
    assert (settings.perf_model, settings.chunked_prefill, settings.prefix_cache) == ("p", False, False)
    assert settings.log_level == "debug"


def test_defaults() -> None:
    settings = read_settings(["--type", "simulated", "--served-name", "s"])
    assert (settings.transport, settings.advertise_host, settings.token_file) == ("simulated", "127.0.0.1", None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--type simulated", "--served-name"),
        ("--served-name s", "--model-dir"),
        ("--type simulated --served-name s --port 70000", "--port"),
        ("--type simulated --served-name s --kv-memory 5Xi", "quantity"),
        ("--type simulated --served-name s --kv-memory 0", "quantity"),
        ("--type simulated --served-name s --lease-seconds nan", "--lease-seconds"),
        ("--type simulated --served-name s --lease-seconds 20 --pull-timeout-seconds 20", "must be at most 16.6667"),
        ("--type simulated --served-name s --pull-timeout-seconds 25.1", "must be at most 25"),
        ("--type simulated --served-name s --transport rdma", "simulated transport"),
        ("--served-name s --model-dir /x --transport simulated", "--transport simulated"),
        ("--type simulated --served-name s --nonsense", "--nonsense"),
    ],
)
def test_wrong_flags(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(arguments.split())
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay_engine.main", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def ends(*arguments: str) -> tuple[int | None, str]:
    async with process(*arguments) as running:
        _, err = await asyncio.wait_for(running.communicate(), 30)
        return running.returncode, err.decode()


async def test_what_a_person_must_mend_is_one_line_and_its_code_says_whether_a_restart_helps(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, err = await ends("--served-name", "s", "--model-dir", str(tmp_path / "empty"), "--log-level", "error")
    assert (code, err.count("\n")) == (exit_codes.CONFIG, 1)
    assert "tokenizer.json" in err
    code, err = await ends(*SIMULATED, "--max-model-len", "100000", "--log-level", "error")
    assert (code, err.count("\n")) == (exit_codes.CONFIG, 1)
    assert "(spec.model.maxModelLen) is 100000, the model was made for 8192 positions at most; set it to" in err
    code, err = await ends(*SIMULATED, "--token-file", str(tmp_path / "none"), "--log-level", "error")
    assert (code, err.count("\n")) == (exit_codes.CONFIG, 1)
    assert "none" in err
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code, err = await ends(*SIMULATED, "--port", str(port), "--log-level", "error")
    assert (code, err.count("\n")) == (2, 1)
    assert str(port) in err
    server.close()


class RealWorker:
    def __init__(self, port: int, running: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = running
        self._session = session

    async def ready(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                async with self._session.get(self.url + paths.READY) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectorError:
                pass
            assert time.monotonic() < deadline, "not ready within 30 s"
            await asyncio.sleep(0.05)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(self.url + path, json=body, headers=sent) as response:
            return response.status, await response.read()


@asynccontextmanager
async def real_worker(tmp_path: Path, *more: str) -> AsyncIterator[RealWorker]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    port = free_port()
    arguments = [*SIMULATED, "--port", str(port), "--token-file", str(token), "--log-level", "error", *more]
    async with process(*arguments) as running, aiohttp.ClientSession() as session:
        worker = RealWorker(port, running, session)
        await worker.ready()
        yield worker


@pytest.mark.live
async def test_two_real_workers_answer_as_one(tmp_path: Path) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}", "x_request_id": "r1"}
    body = {"model": "sim", "prompt": "tell me " * 20, "seed": 7, "max_tokens": 24, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with real_worker(tmp_path) as prefill, real_worker(tmp_path) as decode:
        client = {name: body[name] for name in ("max_tokens", "stream", "stream_options")}
        leg = {name: value for name, value in body.items() if name not in client}
        leg["kv_transfer_params"] = {"do_remote_decode": True, "client": client}
        status, raw = await prefill.post(paths.COMPLETIONS, leg, **bearer)
        assert status == 200, raw
        params = json.loads(raw)["kv_transfer_params"]
        got = b"".join(stream.event([], chunk.encode()) for chunk in params["first"]["delta"])
        status, rest = await decode.post(paths.COMPLETIONS, {**body, "kv_transfer_params": params}, **bearer)
        assert status == 200, rest
        _, load = await decode.post(paths.DRAIN, {"draining": False}, **bearer)
        assert json.loads(load)["held_blocks"] == 0
        async with aiohttp.ClientSession() as session, session.get(decode.url + paths.METRICS) as response:
            text = await response.text()
        assert "forebay_engine_recomputed_prompts_total 0.0" in text
    async with real_worker(tmp_path) as single:
        status, whole = await single.post(paths.COMPLETIONS, body, x_request_id="r1")
    first = json.loads(whole.split(b"\n\n")[0].removeprefix(b"data: "))
    assert status == 200
    assert (got + rest).replace(b'"created":%d' % params["created"], b'"created":%d' % first["created"]) == whole


@pytest.mark.live
async def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    async with real_worker(tmp_path, "--perf-model", "slow") as worker:
        body = {"model": "sim", "prompt": "x", "seed": 7, "max_tokens": 20, "stream": True, "ignore_eos": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(worker.url + paths.COMPLETIONS, json=body) as answer,
        ):
            raw = await answer.content.readuntil(b"\n\n")
            worker.process.send_signal(signal.SIGTERM)
            raw += await answer.read()
        assert raw.endswith(stream.DONE)
        assert raw.count(b"data: ") == 21
        assert await asyncio.wait_for(worker.process.wait(), 15) == 0
