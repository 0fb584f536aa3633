"""Finished rows, kept in a file so that the bench may be run in slices, and which of them are asked for."""

from __future__ import annotations

import json
from pathlib import Path

from bench.rescale.cases import COLUMNS, Case


class Rows:
    """Rows that are done, in memory and, if given, in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: dict[tuple[object, ...], dict[str, object]] = {}
        self.rates: dict[str, float] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, row: dict[str, object]) -> None:
        if "rate_of" in row:
            self.rates[str(row["rate_of"])] = float(str(row["rate"]))
        else:
            self.done[(*(row[name] for name in COLUMNS), row["scale"])] = row

    def add(self, row: dict[str, object]) -> None:
        self._take(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def of(self, case: Case) -> dict[str, object] | None:
        return self.done.get((*case.columns.values(), case.scale))

    def has(self, case: Case) -> bool:
        return self.of(case) is not None


Where = dict[str, set[str]]


def where_of(texts: list[str]) -> Where:
    """`column=value,value` -> its values. Raises SystemExit for a column that is none."""
    found: Where = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in COLUMNS:
            raise SystemExit(f"--where {text!r}: {name!r} is no column; use one of {', '.join(COLUMNS)}")
        found[name] = set(values.split(","))
    return found


def lets_through(where: Where, row: dict[str, object]) -> bool:
    return all(str(row[name]) in values for name, values in where.items())
