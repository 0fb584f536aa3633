"""The bench from its arguments to its report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench import mixes
from bench.report import finish
from bench.rescale.cases import alone_cases, cases, short_cases, tasks
from bench.rescale.play import natural_rate, play
from bench.rescale.rows import COLUMNS, Rows, lets_through, where_of
from bench.rescale.spread import workers
from bench.rescale.summary import summary, table


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace, compiled: Path | None) -> None:
    folder: Path | None = arguments.traces
    left_out = mixes.missing(folder)
    if left_out:
        say(f"left out: the traces {', '.join(left_out)} (give --traces DIR); made-up lengths of their means stand in")
    mixes.use(folder)
    where = where_of(arguments.where)
    rows = Rows(arguments.rows)
    began = time.monotonic()
    deadline = began + 60 * arguments.minutes
    wanted = list(short_cases() if arguments.short else cases())
    with workers(arguments.jobs, compiled, folder) as spread:
        if not arguments.short:
            names = [n for n in mixes.FILES if n in where.get("mix", {n}) and "own" in where.get("level", {"own"})]
            unknown = [n for n in names if n not in rows.rates]
            for name, rate in zip(unknown, spread(natural_rate, unknown), strict=True):
                rows.add({"rate_of": name, "rate": rate})
            for name in names:
                say(f"{name}: its best fixed split attains 95 % at {rows.rates[name]:.1f} requests/s")
                wanted += alone_cases(name, rows.rates[name])
        wanted = [case for case in wanted if lets_through(where, case.columns)]
        todo = [case for case in wanted if not rows.has(case)]
        left = len(todo)
        for done in spread(play, tasks(todo)):
            for row in done:
                rows.add(row)
                left -= 1
                named = " ".join(str(row[name]) for name in COLUMNS)
                say(f"{len(wanted) - left}/{len(wanted)} {named}: {row['attainment']} % {row['moves']} moves")
            if time.monotonic() > deadline and left:
                say(f"left out: {left} of {len(wanted)} rows, time is up (--minutes)")
                break
    found = [row for case in wanted if (row := rows.of(case)) is not None]
    lines = summary(found)
    if arguments.table:
        print(table(lines))
    else:
        finish(
            {
                "bench": "rescale",
                "left_out_traces": left_out,
                "left_out_rows": len(wanted) - len(found),
                "compiled": compiled is not None,
                "minutes": round((time.monotonic() - began) / 60, 1),
                "rows": found,
                "summary": lines,
            }
        )
