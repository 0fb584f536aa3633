"""What a worker tells of itself: its load, metrics and logs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.reports import read_reports
from forebay_engine.core.handle import CoreStats, TransferTotals
from forebay_engine.server.state import PrefillVelocity
from forebay_wire import headers, metrics, paths
from forebay_wire.load import LoadReport

TEXT = {"model": "sim", "prompt": "hi there", "seed": 3, "max_tokens": 6, "ignore_eos": True}


async def test_the_load_stream_counts_each_router_apart(worker: Any) -> None:
    for router, times in (("a", 3), ("b", 1)):
        for _ in range(times):
            await worker.post(paths.COMPLETIONS, TEXT, x_forebay_router=router)
    await worker.post(paths.COMPLETIONS, {}, x_forebay_router="a")  # a refused request was received too
    await worker.post(paths.COMPLETIONS, TEXT)
    worker.core.stats = CoreStats(
        running=4, free_blocks=7, total_blocks=9, held_blocks=2, transfers={"TCP": TransferTotals(bytes=11)}
    )
    first, second = await read_reports(worker, 2, x_forebay_router="a")
    assert (first.seen, second.seen) == (4, 4)
    assert second.epoch > first.epoch
    assert (first.ready, first.model, first.compat_hash, first.max_model_len) == (True, "sim", "compat", 256)
    assert (first.running, first.free_blocks, first.held_blocks, first.kv_bytes_received) == (4, 7, 2, 11)
    assert (await read_reports(worker, 1, x_forebay_router="b"))[0].seen == 1
    assert (await read_reports(worker, 1, x_forebay_router="c"))[0].seen == 0


async def test_the_load_header_counts_the_request_it_answers(worker: Any) -> None:
    _, _, response = await worker.post(paths.COMPLETIONS, TEXT, x_forebay_router="a")
    assert msgspec.json.decode(response.headers[headers.LOAD], type=LoadReport).seen == 1


async def test_routers_counted_are_bounded(worker: Any) -> None:
    for i in range(100):
        await worker.post(paths.COMPLETIONS, {}, x_forebay_router=f"router-{i}")
    assert (await read_reports(worker, 1, x_forebay_router="router-0"))[0].seen == 0
    assert (await read_reports(worker, 1, x_forebay_router="router-99"))[0].seen == 1


def test_prefill_velocity_follows_the_last_window() -> None:
    velocity = PrefillVelocity(window=10.0)
    assert velocity.update(0, 0.0, now=0.0) == 0.0
    assert velocity.update(1000, 1.0, now=1.0) == 1000
    for second in range(2, 30):
        last = velocity.update(1000 + (second - 1) * 100, 1.0 + (second - 1) * 0.5, now=float(second))
    assert last == pytest.approx(200)
    assert velocity.update(3800, 15.0, now=100.0) == pytest.approx(200)


async def test_metrics(worker: Any) -> None:
    worker.core.stats = CoreStats(
        running=2,
        free_blocks=25,
        total_blocks=100,
        prefill_tokens=1234,
        transport="SharedMemory",
        transfers={"TCP": TransferTotals(bytes=99), "SharedMemory": TransferTotals(bytes=1, failures=2)},
    )
    await worker.post(paths.COMPLETIONS, TEXT)
    await worker.post(paths.COMPLETIONS, {**TEXT, "stream": True})
    _, raw = await worker.get(paths.METRICS)
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(raw.decode())
        for sample in family.samples
    }
    assert values[(metrics.ENGINE_RUNNING, ())] == 2
    assert values[(metrics.ENGINE_KV_USAGE, ())] == 0.75
    assert values[(metrics.ENGINE_PREFILL_TOKENS, ())] == 1234
    assert values[(metrics.ENGINE_TRANSFER_BYTES, (("transport", "TCP"),))] == 99  # where it was before the switch
    assert values[(metrics.ENGINE_TRANSFER_FAILURES, (("transport", "SharedMemory"),))] == 2
    assert values[(metrics.ENGINE_HTTP_REQUESTS, (("code", "200"), ("role", "plain")))] == 2
    assert values[(metrics.ENGINE_TTFT + "_count", (("role", "plain"),))] == 2
    engine = {value for name, value in vars(metrics).items() if name.startswith("ENGINE_")}
    named = {name for name, _ in values}
    missing = {name for name in engine if name not in named and name + "_count" not in named}
    assert not missing


async def test_logs_say_how_it_went_and_not_what_was_said(worker: Any, caplog: Any) -> None:
    caplog.set_level("DEBUG", logger="forebay_engine")
    secretive = {**TEXT, "prompt": "my secret prompt", "user": "secret-user"}
    await worker.post(paths.COMPLETIONS, secretive, x_request_id="r9", **worker.bearer)
    await worker.post(paths.COMPLETIONS, {**secretive, "temprature": 1}, x_request_id="r10")
    assert "id=r9 role=plain code=200 prompt_tokens=16" in caplog.text
    assert "secret" not in caplog.text
