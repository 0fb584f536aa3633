"""Fixtures of the live tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.local_mode import Local


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    running = Local(tmp_path)
    yield running
    running.clean()
