"""The law live: six real workers, a real router, traffic that turns. Figures: bench/switch.py, bench/shift.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.local_pool import local_pool, manifest
from bench.switch import START, TPOT_MS, TTFT_MS, learnt, one_round

from forebay_operator.decide import reasons

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

SWITCH_SECONDS = 3.0


async def test_a_starved_role_is_helped(tmp_path: Path) -> None:
    """Nobody asks for it: prompts come that one prefill worker can't compute, and decoders become prefill workers."""
    model = manifest(*START, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)
    async with local_pool(tmp_path, model, learnt(model)) as pool:
        took, sent = await one_round(pool, seed=0)
        status = await pool.status()
    assert took is not None
    assert took.took <= 5 * SWITCH_SECONDS
    assert {s.status for s in sent} <= {200, 429}, "nothing is lost while roles change"
    assert status.decision is not None
    assert status.moves >= 1
    assert status.flaps == 0
    assert status.target == status.ratio != "1:5"
    told = (tmp_path / "up.log").read_text()
    assert "rescaling: 1:5 -> " in told
    assert reasons.STARVED in told


async def test_recommend_only_says_it(tmp_path: Path) -> None:
    model = manifest(*START, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS, mode="Recommend")
    async with local_pool(tmp_path, model, learnt(model)) as pool:
        took, sent = await one_round(pool, seed=1, seconds=3.5)
        status = await pool.status()
    assert took is None
    assert {s.status for s in sent} <= {200, 429}
    assert (status.ratio, status.moves) == ("1:5", 0)
    assert status.target != "1:5"
    assert "recommended: 1:5 -> " in (tmp_path / "up.log").read_text()
