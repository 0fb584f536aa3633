"""UpStatus for people: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forebay_operator.local.status import ContainerStatus, DecisionStatus, UpStatus

_UNKNOWN = "-"
_PHASES = {
    "Starting": "waits until every worker has been ready once",
    "Draining": "holds while this drains",
}
"""Phases in which the law sees little, and what it misses is no news."""

_STYLES = {"Ready": "green", "Running": "yellow", "Starting": "yellow", "Degraded": "red", "BackOff": "red"}


def table(status: UpStatus) -> RenderableType:
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")  # fits 80 columns
    for column, right in (
        ("WORKER", False),
        ("ROLE", False),
        ("STATE", False),
        ("RUN", True),
        ("WAIT", True),
        ("KV", True),
        ("KV MOVED", True),
        ("TRANSPORT", False),
        ("RESTARTS", True),
    ):
        grid.add_column(column, justify="right" if right else "left", no_wrap=True)
    for container in status.containers:
        role = container.role or "router"
        loan = " (loan)" if container.role != container.pool else ""
        state = shown_state(container)
        grid.add_row(
            container.name,
            role + loan,
            Text(state, style=_STYLES.get(state, "")),
            _count(container.running),
            _count(container.waiting),
            _share(container.kv_usage),
            _bytes(container.kv_bytes_received),
            container.transport or _UNKNOWN,
            str(container.restarts),
        )
    first, *others = headline(status)
    wrong = (Text(line, style="red") for line in troubles(status))
    return Group(Text(first, style=_STYLES.get(status.phase, "")), *(Text(line) for line in others), grid, *wrong)


def headline(status: UpStatus) -> list[str]:
    return [
        f"{status.name}: {status.phase}  {status.served_name} at {status.endpoint}",
        f"prefill:decode {_split(status)}  in flight {_count(status.in_flight)}  "
        f"TTFT p95 {_milliseconds(status.ttft_p95_ms)}  TPOT p95 {_milliseconds(status.tpot_p95_ms)}",
        f"scaling {status.mode}: {_PHASES.get(status.phase) or _decision(status.decision)}",
    ]


def troubles(status: UpStatus) -> list[str]:
    """Why the processes that are not ready ended last, one line each."""
    return [
        f"{c.name} ended ({c.restarts} restarts), last: {c.last_error}"
        for c in status.containers
        if not c.ready and c.last_error is not None
    ]


def _split(status: UpStatus) -> str:
    """And what it is to be, where that differs."""
    return status.ratio if status.target in (None, status.ratio) else f"{status.ratio} (target {status.target})"


def _decision(decision: DecisionStatus | None) -> str:
    if decision is None:
        return "no decision yet"
    change = f"{decision.from_} -> {decision.to}, " if decision.from_ != decision.to else ""
    return f"{change}{decision.reason}: {decision.message}"


def plain(status: UpStatus) -> str:
    """One line for the whole and one for each process."""
    lines = ["  ".join(headline(status))]
    for container in status.containers:
        line = f"  {container.name} {container.role or 'router'} {shown_state(container)}"
        if container.pool is not None:
            line += (
                f" running {_count(container.running)} waiting {_count(container.waiting)}"
                f" kv {_share(container.kv_usage)} moved {_bytes(container.kv_bytes_received)}"
                f" transport {container.transport or _UNKNOWN}"
            )
        lines.append(f"{line} restarts {container.restarts}")
    return "\n".join((*lines, *(f"  {line}" for line in troubles(status))))


def shown_state(container: ContainerStatus) -> str:
    """Running and ready are one word to a reader."""
    return "Ready" if container.state == "Running" and container.ready else container.state


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.0f} %"


def _milliseconds(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f} ms"


def _bytes(value: int | None) -> str:
    if value is None:
        return _UNKNOWN
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
