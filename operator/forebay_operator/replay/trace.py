"""Trace files -> arrivals. A trace is a list of Arrival, sorted by time, that begins at 0 seconds."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

MAX_TOKENS = 16_777_216
MOONCAKE_TICK_SECONDS = 3.0
"""Mooncake's timestamps sit on 3 s ticks; requests are spread over the tick, or TTFT would measure the ticks."""


class Arrival(NamedTuple):
    at: float
    """Seconds since the trace's first request."""

    prompt_tokens: int
    output_tokens: int


Trace = list[Arrival]


class TraceError(ValueError):
    """A trace that cannot be used: the file, the line, the field, its value and the remedy."""


class _Row(NamedTuple):
    line: int
    at: float
    prompt: int
    output: int


def read(path: Path, format_name: str, *, seed: int = 0) -> Trace:
    """The arrivals in `path`. `seed` spreads Mooncake's requests over their tick.

    Raises TraceError: an unknown format, a file that cannot be read or is empty, a missing column, a value that is no
    number or out of range, times that go backwards.
    """
    if format_name not in FORMATS:
        raise TraceError(f"trace format {format_name!r} is not known; use one of {', '.join(FORMATS)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(FORMATS[format_name](path, file))
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {path}: is no UTF-8 text (byte {error.start}); is it compressed?") from error
    if not rows:
        raise TraceError(f"trace {path}: holds no request; at least one is needed")
    for before, row in itertools.pairwise(rows):
        if row.at < before.at:
            raise TraceError(
                f"trace {path}: line {row.line}: its time is {before.at - row.at:g} s before the line above; "
                "sort the file by time"
            )
    start = rows[0].at
    trace = [Arrival(row.at - start, row.prompt, row.output) for row in rows]
    if format_name == "mooncake":
        rng = random.Random(seed)
        trace = sorted(a._replace(at=a.at + rng.random() * MOONCAKE_TICK_SECONDS) for a in trace)
        trace = [a._replace(at=a.at - trace[0].at) for a in trace]
    return trace


def _azure(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    def seconds(text: str) -> float:
        return datetime.fromisoformat(text).timestamp()

    yield from _table(path, lines, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), seconds)


def _servegen(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    yield from _table(path, lines, ("arrived_at", "input_tokens", "output_tokens"), float)


def _csv(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    yield from _table(path, lines, ("arrived_at", "prompt_tokens", "output_tokens"), float)


def _table(
    path: Path, lines: Iterable[str], columns: tuple[str, str, str], seconds: Callable[[str], float]
) -> Iterator[_Row]:
    reader = csv.DictReader(lines)
    if reader.fieldnames is None:
        return
    missing = [name for name in columns if name not in reader.fieldnames]
    if missing:
        raise TraceError(
            f"trace {path}: column {missing[0]} is missing; the header must have {', '.join(columns)}, "
            f"it has {', '.join(reader.fieldnames)[:200]}"
        )
    for row in reader:
        line = reader.line_num
        yield _Row(
            line,
            _time(path, line, columns[0], row[columns[0]], seconds),
            _tokens(path, line, columns[1], row[columns[1]]),
            _tokens(path, line, columns[2], row[columns[2]]),
        )


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise TraceError(f"trace {path}: line {line}: is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"trace {path}: line {line}: must be a JSON object, it is a {type(row).__name__}")
        values = []
        for name in ("timestamp", "input_length", "output_length"):
            if name not in row:
                raise TraceError(f"trace {path}: line {line}: field {name} is missing")
            values.append(str(row[name]))
        yield _Row(
            line,
            _time(path, line, "timestamp", values[0], float) / 1e3,
            _tokens(path, line, "input_length", values[1]),
            _tokens(path, line, "output_length", values[2]),
        )


def _time(path: Path, line: int, name: str, text: str | None, seconds: Callable[[str], float]) -> float:
    try:
        value = seconds(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"trace {path}: line {line}: {name} is {_shown(text)}; it must be a time, not negative")
    return value


def _tokens(path: Path, line: int, name: str, text: str | None) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_TOKENS:
        raise TraceError(
            f"trace {path}: line {line}: {name} is {_shown(text)}; it must be a whole number from 1 to {MAX_TOKENS}"
        )
    return value


def _shown(text: str | None) -> str:
    return "missing" if text is None or not text.strip() else repr(text[:40])


FORMATS: dict[str, Callable[[Path, Iterable[str]], Iterator[_Row]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "servegen": _servegen,
    "csv": _csv,
}
"""azure: AzureLLMInferenceTrace (2023); mooncake: JSON lines of FAST'25; servegen: ServeGen's generator; csv:
arrived_at (seconds), prompt_tokens, output_tokens."""
