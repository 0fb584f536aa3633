"""The KV arena's memory, where there is not enough."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forebay_engine.errors import ModelError  # noqa: E402
from forebay_engine.executor.arena import allocate_arena  # noqa: E402
from forebay_engine.kv.arena import ArenaLayout  # noqa: E402


def test_more_memory_than_the_machine_has_is_refused_at_once() -> None:
    layout = ArenaLayout(layers=1, kv_heads=1, head_size=64, block_size=16, dtype="float32", itemsize=4)
    with pytest.raises(ModelError, match=r"this machine has \d+ MB; .*spec\.engine\.kvCache\.memory"):
        allocate_arena(layout, 2**50 // layout.block_bytes, torch.float32, torch.device("cpu"))
