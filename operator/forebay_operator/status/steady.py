"""Figures that change with every look, held still until they mean something else: status is written on change only."""

from __future__ import annotations

TOLERANCE_PERCENT = 10


def steady(previous: float | None, fresh: float | None) -> float | None:
    """`previous` while `fresh` is within the tolerance of it. None is another thing than any number."""
    if previous is None or fresh is None:
        return fresh
    return previous if abs(fresh - previous) * 100 <= abs(previous) * TOLERANCE_PERCENT else fresh


def steady_int(previous: int | None, fresh: int | None) -> int | None:
    held = steady(previous, fresh)
    return None if held is None else int(held)


def steady_percent(previous: int | None, fresh: int | None) -> int | None:
    """Percent of attainment: one point is worth showing, and figures near 100 have no room for a tolerance."""
    if previous is None or fresh is None:
        return fresh
    return previous if abs(fresh - previous) <= 1 else fresh
