"""The answer of `forebay replay` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from forebay_operator.replay.run import Ran, decisions


def as_json(ran: Sequence[Ran]) -> list[dict[str, Any]]:
    rows = []
    for one in ran:
        row: dict[str, Any] = {"policy": one.policy, "start": f"{one.setup.start_prefill}"}
        row["start"] = f"{one.setup.start_prefill}:{one.setup.workers - one.setup.start_prefill}"
        row.update(msgspec.to_builtins(one.score))
        row["decisions"] = [
            {"at": at, "from": before, "to": after, "reason": reason} for at, before, after, reason in decisions(one)
        ]
        rows.append(row)
    return rows


def as_tables(ran: Sequence[Ran], console: Console) -> list[Table]:
    """One, or as many as it takes so that no figure is cut off at the console's width."""
    tables: list[Table] = []
    held: list[Ran] = []
    room = console.options.update(max_width=100_000)
    for one in ran:
        table = as_table([*held, one])
        if held and Measurement.get(console, room, table).maximum > console.width:
            held, table = [], as_table([one])
        if not held:
            tables.append(table)
        held.append(one)
        tables[-1] = table
    return tables


def as_table(ran: Sequence[Ran]) -> Table:
    setup = ran[0].setup
    table = Table(
        title=(
            f"{ran[0].score.requests} requests, {setup.workers} workers ({setup.model.name}), gear {setup.gear.name}, "
            f"TTFT <= {setup.ttft_seconds * 1e3:g} ms, TPOT <= {setup.tpot_seconds * 1e3:g} ms, "
            f"convertible {'on' if setup.convertible else 'off'}"
        ),
        caption="Percent of all offered requests; refused, failed and unfinished ones count as missed.",
    )
    # A column that may be folded is cut off before others are.
    table.add_column("", no_wrap=True)
    for one in ran:
        table.add_column(one.policy, justify="right", no_wrap=True)

    def row(name: str, *values: object) -> None:
        table.add_row(name, *(str(v) for v in values))

    scores = [one.score for one in ran]
    row("both objectives %", *(f"{s.attainment_percent:.2f}" for s in scores))
    row("TTFT %", *(f"{s.ttft_percent:.2f}" for s in scores))
    row("TPOT %", *(f"{s.tpot_percent:.2f}" for s in scores))
    row("95 % of gaps in TPOT %", *(f"{s.itl95_percent:.2f}" for s in scores))
    row("goodput, requests/s", *(f"{s.goodput:.2f}" for s in scores))
    for name in ("ttft", "tpot", "itl"):
        cells = []
        for s in scores:
            figures: dict[str, float] = getattr(s, f"{name}_ms")
            cells.append("/".join(f"{figures[p]:.0f}" for p in ("p50", "p95", "p99")) if figures else "-")
        row(f"{name.upper()} ms p50/p95/p99", *cells)
    row("GPU-seconds", *(f"{s.gpu_seconds:.0f}" for s in scores))
    row("moves", *(f"{s.moves} ({s.gear})" for s in scores))
    row("refused", *(s.refused for s in scores))
    row("unfinished", *(s.unfinished for s in scores))
    splits = ["\n".join(f"{k} {v:.0f}s" for k, v in sorted(s.splits.items(), key=lambda x: -x[1])[:4]) for s in scores]
    row("time at prefill:decode", *splits)
    return table
