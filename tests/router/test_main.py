"""The command: a process of its own, from arguments to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay_router.main import parse_args
from forebay_wire import exit_codes
from router.asking import check, completion
from router.conftest import StartBench
from router.fake_worker import MODEL, TOKEN, FakeWorker
from support.client import complete
from support.cluster import free_port, until


@contextlib.asynccontextmanager
async def process(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay_router.main", *args, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


def arguments(tmp_path: Path, workers: list[FakeWorker], port: int) -> list[str]:
    entries = [{"name": w.name, "host": "127.0.0.1", "port": w.port, "pool": w.pool, "role": w.role} for w in workers]
    (tmp_path / "workers.json").write_text(json.dumps({"workers": entries}))
    (tmp_path / "token").write_text(TOKEN + "\n")
    return [
        *("--port", str(port), "--workers-file", str(tmp_path / "workers.json")),
        *("--token-file", str(tmp_path / "token"), "--served-name", MODEL, "--name", "r"),
    ]


async def listening(port: int, seconds: float = 20) -> None:
    async def accepted() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    await until(accepted, "the router listens", seconds, period=0.001)


@pytest.mark.parametrize("start", range(3))
async def test_the_first_request_that_it_takes_is_served(start_bench: StartBench, tmp_path: Path, start: int) -> None:
    """No 503 between the start and the first word of the workers."""
    bench = await start_bench({"p0": "prefill", "d0": "decode"})
    port = free_port()
    async with process(*arguments(tmp_path, list(bench.workers.values()), port)):
        await listening(port)
        request = completion(tokens=3)
        check(await complete(bench.session, f"http://127.0.0.1:{port}", request), request)


async def test_without_workers_it_listens_all_the_same(start_bench: StartBench, tmp_path: Path) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode"})
    await bench["p0"].die()
    await bench["d0"].die()
    port = free_port()
    async with process(*arguments(tmp_path, list(bench.workers.values()), port)):
        await listening(port)
        answer = await complete(bench.session, f"http://127.0.0.1:{port}", completion(tokens=3))
        assert answer.status == 503


async def test_sigterm_finishes_what_runs(start_bench: StartBench, tmp_path: Path) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode"})
    bench["d0"].gap = 0.05
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with process(*arguments(tmp_path, list(bench.workers.values()), port)) as router:

        async def ready() -> bool:
            with contextlib.suppress(OSError):
                async with bench.session.get(url + "/ready") as response:
                    return response.status == 200
            return False

        await until(ready, "the router is ready", 20)
        request = completion(tokens=30)
        task = asyncio.create_task(complete(bench.session, url, request))

        async def streams() -> bool:
            return bool(bench["d0"].legs("decode"))

        await until(streams, "the stream runs", 10)
        router.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return True
            writer.close()
            return False

        await until(refuses, "no new connection is taken", 5)
        assert not task.done()
        check(await task, request)
        assert await asyncio.wait_for(router.wait(), 10) == 0
        assert router.stderr is not None
        log = (await router.stderr.read()).decode()
    assert "a prompt" not in log
    assert TOKEN not in log
    assert "code=200" in log


async def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        async with process(*arguments(tmp_path, [], port)) as router:
            _, errors = await asyncio.wait_for(router.communicate(), 20)
    assert router.returncode == 2
    assert errors.decode().strip() == f"forebay-router: cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("--token-file", None, "cannot read the token file"),
        ("--token-file", "\n", "must hold one line of ASCII"),
        ("--token-file", "a\nb", "must hold one line of ASCII"),
        ("--api-keys-file", None, "cannot read the API key file"),
        ("--api-keys-file", "# none\n\n", "holds no key"),
    ],
)
async def test_bad_secret_files(tmp_path: Path, name: str, content: str | None, part: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    async with process("--workers-file", "w", name, str(path)) as router:
        _, errors = await asyncio.wait_for(router.communicate(), 20)
    assert router.returncode == exit_codes.CONFIG
    assert part in errors.decode()
    assert len(errors.decode().splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--port", "70000"],
        ["--ttft-ms", "-1"],
        ["--ttft-ms", "inf"],
        ["--tpot-ms", "nan"],
        ["--stall-timeout-seconds", "-1"],
        ["--fallback", "x"],
    ],
)
def test_bad_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--workers-file", "w", *args])
    assert ended.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_an_objective_of_0_is_none() -> None:
    made = parse_args(["--workers-file", "w", "--ttft-ms", "0", "--tpot-ms=0"])
    assert made.ttft_objective == made.tpot_objective == math.inf
    usual = parse_args(["--workers-file", "w"])
    assert (usual.ttft_objective, usual.tpot_objective) == (1.0, 0.1)


def test_arguments(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team a\nk1\n\n k2 \n")
    made = parse_args(["--workers-file", "w", "--fallback", "refuse", "--ttft-ms", "500", "--tpot-ms", "20",
                       "--api-keys-file", str(keys)])  # fmt: skip
    assert (made.both_phases, made.ttft_objective, made.tpot_objective) == (False, 0.5, 0.02)
    assert made.api_keys == (b"k1", b"k2")
    assert made.token is None
