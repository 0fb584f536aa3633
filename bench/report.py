"""What every bench shares: medians, spreads and the JSON line at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty list; `share` in 0..1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, rounded for a report."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def finish(result: dict[str, object]) -> None:
    print(json.dumps(result))
