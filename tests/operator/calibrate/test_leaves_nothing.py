"""`forebay calibrate` leaves pool and folder as it found them when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from forebay_operator.calibrate import command
from forebay_operator.calibrate.probe import Pool, PoolLoad
from forebay_operator.calibrate.samples import CalibrationError


class Split:
    """What a router's load says of the roles."""

    def __init__(self, prefill: int, decode: int) -> None:
        self._counts = {"prefill": prefill, "decode": decode}

    def ready(self, role: str) -> list[None]:
        return [None] * self._counts[role]


class FakePool:
    """A pool of 2:2 that takes up a new split unless it is `deaf`."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.asked: list[str] = []
        self._deaf = deaf

    async def switch(self, split: str) -> None:
        self.asked.append(split)

    async def load(self) -> Split:
        split = "2:2" if self._deaf or not self.asked else self.asked[-1]
        return Split(*(int(part) for part in split.split(":")))

    async def measure(self) -> float:
        load = cast(PoolLoad, Split(2, 2))
        return await command._switch_seconds(cast(Pool, self), self.switch, load, "3:1")


async def test_there_and_back() -> None:
    pool = FakePool()
    assert await pool.measure() >= 0
    assert pool.asked == ["3:1", "2:2"]


async def test_a_switch_that_is_not_seen_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SWITCH_SECONDS", 0.0)
    pool = FakePool(deaf=True)
    with pytest.raises(CalibrationError, match="3:1"):
        await pool.measure()
    assert pool.asked == ["3:1", "2:2"]


async def test_an_interrupted_one_is_taken_back() -> None:
    pool = FakePool(deaf=True)
    task = asyncio.create_task(pool.measure())
    while not pool.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.asked == ["3:1", "2:2"]


async def test_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()

    async def broken(split: str) -> Any:
        pool.asked.append(split)
        raise CalibrationError(f"no {split}")

    monkeypatch.setattr(pool, "switch", broken)
    with pytest.raises(CalibrationError, match="no 3:1"):
        await pool.measure()
    assert pool.asked == ["3:1", "2:2"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.json").mkdir()
    (tmp_path / "model.json" / "other").touch()
    with pytest.raises(CalibrationError, match="choose another --out"):
        command._write(tmp_path / "model.json", b"{}")
    assert [file.name for file in tmp_path.iterdir()] == ["model.json"]
    command._write(tmp_path / "new.json", b"{}")
    assert (tmp_path / "new.json").read_bytes() == b"{}"
