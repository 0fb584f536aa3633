"""Fixtures of the live tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.local_mode import Local


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> Iterator[None]:
    """These tests watch processes for moments of half a second. After the engine's tests a full collection goes over
    some gigabytes of torch and transformers and stands still for as long; what is there at the start is left out of it.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    running = Local(tmp_path)
    yield running
    running.clean()
