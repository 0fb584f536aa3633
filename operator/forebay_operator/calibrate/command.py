"""`forebay calibrate`: measure, fit, write the file, show how well it fits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forebay_operator.calibrate.measure import Measurement
from forebay_operator.calibrate.probe import Pool, PoolLoad
from forebay_operator.calibrate.samples import CalibrationError, Fit, Measured, Worker, fit_model

Switch = Callable[[str], Awaitable[None]]
"""Asks for a ratio such as 2:1; returns when it was asked for."""

SWITCH_SECONDS = 30.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    url: str
    out: Path
    name: str
    seconds: float
    seed: int = 0
    api_key: str | None = None


def calibrate(options: CalibrateOptions, console: Console, switch: Switch | None, *, as_json: bool) -> None:
    """Raises CalibrationError. `switch` is there where the pool's roles can be changed from here."""
    if not os.access(options.out.parent, os.W_OK | os.X_OK) or options.out.is_dir():
        raise CalibrationError(f"{options.out} can't be written; choose another --out")  # before minutes of measuring
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("connecting", total=1.0)
        measured, worker, note, left_out = asyncio.run(
            _measure(options, switch, lambda text, share: bar.update(task, description=text, completed=share))
        )
    fitted = fit_model(measured, worker, name=options.name, note=note)
    _write(options.out, msgspec.json.format(msgspec.json.encode(fitted.model), indent=2) + b"\n")
    if as_json:
        console.out(msgspec.json.encode(_summary(options.out, measured, fitted, left_out)).decode(), highlight=False)
    else:
        _show(console, options.out, measured, fitted, left_out)


async def _measure(
    options: CalibrateOptions, switch: Switch | None, progress: Callable[[str, float], None]
) -> tuple[Measured, Worker, str, list[str]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        pool = Pool(session, options.url, api_key=options.api_key)
        load = await pool.idle_load()
        measurement = Measurement(pool, load, seconds=options.seconds, seed=options.seed, progress=progress)
        measured = await measurement.run()
        pool.check_alone(load, await pool.load(), pool.sent)
        if switch is not None and (target := _other_split(load)) is not None:
            progress("role switch", 1.0)
            measured.role_switch_seconds = await _switch_seconds(pool, switch, load, target)
    transport = next((w.load.transport for w in load.ready("decode") if w.load is not None), "Unknown")
    worker = Worker(
        kv_capacity_tokens=measurement.limits.kv_capacity_tokens,
        ttft_objective_seconds=(load.ttft_objective_ms or 2000.0) / 1e3,
        tpot_objective_seconds=(load.tpot_objective_ms or 100.0) / 1e3,
    )
    note = (
        f"measured by forebay calibrate on {measurement.model}, transport {transport}, "
        f"{len(measured.prefill)} prompts and {len(measured.decode)} batches; layers and heads stand for KV bytes only"
    )
    return measured, worker, note, measurement.left_out


def _other_split(load: PoolLoad) -> str | None:
    prefill, decode = len(load.ready("prefill")), len(load.ready("decode"))
    if decode > 1:
        return f"{prefill + 1}:{decode - 1}"
    return f"{prefill - 1}:{decode + 1}" if prefill > 1 else None


async def _switch_seconds(pool: Pool, switch: Switch, load: PoolLoad, target: str) -> float:
    """From asking until the router sends by the new roles; the old split is restored, and counts as the second try."""
    before = f"{len(load.ready('prefill'))}:{len(load.ready('decode'))}"
    try:
        return max([await _switched(pool, switch, split) for split in (target, before)])
    except BaseException:
        # Given up, or interrupted: the pool is left as it was found. The first error is the one to tell.
        with contextlib.suppress(Exception):
            await switch(before)
        raise


async def _switched(pool: Pool, switch: Switch, split: str) -> float:
    """Seconds."""
    wanted = tuple(int(part) for part in split.split(":"))
    begin = time.monotonic()
    await switch(split)
    while True:
        seen = await pool.load()
        if (len(seen.ready("prefill")), len(seen.ready("decode"))) == wanted:
            return time.monotonic() - begin
        if time.monotonic() - begin > SWITCH_SECONDS:
            raise CalibrationError(f"the router still does not see {split} after {SWITCH_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


def _write(path: Path, raw: bytes) -> None:
    """Whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as work:
            made = Path(work) / path.name
            made.write_bytes(raw)
            made.chmod(0o644)
            made.replace(path)
    except OSError as error:
        raise CalibrationError(f"writing {path} failed: {error.strerror}; choose another --out") from None


def _summary(path: Path, measured: Measured, fitted: Fit, left_out: list[str]) -> dict[str, object]:
    model = fitted.model
    return {
        "file": str(path),
        "prefill_tokens_per_second": round(_velocity(measured), 1),
        "decode_step_ms": round(1e3 * model.decode_seconds(1, 128), 3),
        "decode_sequence_ms": round(1e3 * model.sequence_seconds, 4),
        "decode_resident_ms_per_1000_tokens": round(1e6 * model.resident_seconds, 4),
        "transfer_bytes_per_second": model.transfer_bytes_per_second,
        "transfer_ms": round(1e3 * model.transfer_seconds, 3),
        "role_switch_seconds": model.role_switch_seconds,
        "prefill_error": round(fitted.prefill_error, 4),
        "decode_error": round(fitted.decode_error, 4),
        "prompts": len(measured.prefill),
        "batches": len(measured.decode),
        "pulls": len(measured.handoffs),
        "left_out": left_out,
    }


def _velocity(measured: Measured) -> float:
    """Tokens/s of the longest prompt measured."""
    longest = max(measured.prefill, key=lambda sample: sample.chunks[0][0])
    return longest.chunks[0][0] / longest.seconds


def _show(console: Console, path: Path, measured: Measured, fitted: Fit, left_out: list[str]) -> None:
    table = Table(title="measured and fitted")
    for column in ("point", "measured ms", "fitted ms"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for sample in measured.prefill:
        row = f"prompt of {sample.chunks[0][0]} tokens"
        table.add_row(row, f"{1e3 * sample.seconds:.1f}", f"{1e3 * sample.predicted(fitted.model):.1f}")
    for sample in sorted(measured.decode, key=lambda s: (s.resident_tokens // s.batch, s.batch)):
        row = f"{sample.batch} streams, {sample.resident_tokens // sample.batch} tokens each"
        table.add_row(row, f"{1e3 * sample.seconds:.1f}", f"{1e3 * sample.predicted(fitted.model):.1f}")
    console.print(table)
    model = fitted.model
    if measured.handoffs:
        console.print(
            f"KV moves at {model.transfer_bytes_per_second / 1e9:.2f} GB/s + {1e3 * model.transfer_seconds:.1f} ms"
        )
    else:
        console.print("no KV was moved between workers: transfer is unknown and counts as free")
    if model.role_switch_seconds is not None:
        console.print(f"a role switch takes {model.role_switch_seconds:.2f} s")
    for what in left_out:
        console.print(f"not measured: {what}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"median error: prefill {fitted.prefill_error:.1%}, decode {fitted.decode_error:.1%}\n"
        f"written to {path}; use it: forebay replay --perf {path} ..., or its text as spec.scaling.performanceModel"
    )
