"""Logs of local mode keep to their size while they are written."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest

from forebay_operator.local import logs
from forebay_operator.local.containers import Container
from forebay_operator.local.process import Runner

LIMIT = 100_000


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_bytes(b"x" * LIMIT)
    logs.bound(log, LIMIT)
    assert log.stat().st_size == LIMIT
    assert os.listdir(tmp_path) == ["w.log"]


@pytest.mark.parametrize(
    ("written", "since", "last"),
    [
        (b"old\n", 4, ""),
        (b"old\nnew\n", 4, "new"),
        (b"old\na\nb \n \n\n", 4, "b"),
        (b"old\ncut off", 4, "cut off"),
        (b"all of it is newer\n", 1000, "all of it is newer"),
        (b"old\n\x1b[2Jclear\tthe screen\n", 4, "[2Jclear the screen"),
        (b"old\nf\xfcr\n", 4, "f\ufffdr"),
        (b"", 0, ""),
    ],
)
def test_the_last_line_since_a_start(tmp_path: Path, written: bytes, since: int, last: str) -> None:
    log = tmp_path / "w.log"
    log.write_bytes(written)
    assert logs.last_line(log, since).strip() == last


def test_a_last_line_without_end_and_a_log_that_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    assert logs.last_line(log, 0) == ""
    assert logs.size(log) == 0
    log.write_bytes(b"x" * 1_000_000)
    assert logs.last_line(log, 0) == "x" * logs.LAST_LINE_BYTES
    assert logs.size(log) == 1_000_000


def test_no_log_is_no_error(tmp_path: Path) -> None:
    logs.bound(tmp_path / "w.log", LIMIT)
    assert os.listdir(tmp_path) == []


def test_the_writer_goes_on_after_the_end_was_kept(tmp_path: Path) -> None:
    log, old = tmp_path / "w.log", tmp_path / "w.log.1"
    old.write_text("older")
    with logs.open_log(log) as writer:
        for size in (LIMIT + 1, 3 * LIMIT):
            writer.write(b"a" * (size - 3) + b"end")
            writer.flush()
            logs.bound(log, LIMIT)
            assert log.stat().st_size == 0
            assert old.stat().st_size == LIMIT
            assert old.read_bytes().endswith(b"aaend")
        writer.write(b"new")
    assert log.read_bytes() == b"new"
    assert {stat.S_IMODE(file.stat().st_mode) for file in (log, old)} == {0o600}


def test_on_a_full_disk_the_log_is_still_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "w.log"
    log.write_bytes(b"x" * (LIMIT + 1))

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(logs, "_copy", full)
    logs.bound(log, LIMIT)
    assert log.stat().st_size == 0
    assert os.listdir(tmp_path) == ["w.log"]


async def test_a_process_that_writes_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LIMIT_BYTES", LIMIT)
    monkeypatch.setattr(logs, "CHECK_SECONDS", 0.01)
    loop = "while :; do printf '%1000s' x; sleep 0.0001; done"
    container = Container(
        name="w",
        pool=None,
        argv=("sh", "-c", loop),
        env={},
        host="127.0.0.1",
        port=1,
        startup=None,
        readiness=None,
        liveness=None,
        grace_seconds=1.0,
    )
    log = tmp_path / "w.log"
    async with aiohttp.ClientSession() as session:
        runner = Runner(container, log=log, session=session, on_event=lambda _: None)
        running = asyncio.create_task(runner.run())
        cuts, last = 0, 0
        async with asyncio.timeout(30):
            while cuts < 3:
                await asyncio.sleep(0.005)
                size = log.stat().st_size if log.exists() else 0
                cuts, last = cuts + (size < last), size
        runner.kill()
        await running
    assert (tmp_path / "w.log.1").stat().st_size <= 2 * LIMIT
