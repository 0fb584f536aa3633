"""The named performance models, and loading of calibrated ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay_engine.perf.formula import formula
from forebay_engine.perf.model import PerfModel, read

_FITTED = Path(__file__).parent / "models"


def _slow() -> PerfModel:
    """Tens of milliseconds a step and room for few requests: for tests that watch requests in flight."""
    return PerfModel(
        name="slow",
        source="made-up",
        note="for live tests",
        layers=4,
        kv_heads=4,
        head_size=64,
        token_seconds=0.0002,
        weights_seconds=0.02,
        sequence_seconds=0.0005,
        transfer_bytes_per_second=1e9,
        kv_capacity_tokens=16_384,
        ttft_objective_seconds=1.0,
        tpot_objective_seconds=0.06,
    )


def _instant() -> PerfModel:
    """No time at all."""
    return PerfModel(
        name="instant",
        source="made-up",
        note="for tests",
        layers=4,
        kv_heads=4,
        head_size=64,
        transfer_bytes_per_second=0.0,
        kv_capacity_tokens=65_536,
        ttft_objective_seconds=1.0,
        tpot_objective_seconds=0.04,
    )


_MADE: dict[str, Callable[[], PerfModel]] = {
    "slow": _slow,
    "instant": _instant,
    "a100-llama-8b": lambda: formula("a100", "llama-8b", 1, ttft=1.0, tpot=0.04),
    "h100-llama-8b": lambda: formula("h100", "llama-8b", 1, ttft=1.0, tpot=0.04),
    "h200-llama-8b": lambda: formula("h200", "llama-8b", 1, ttft=1.0, tpot=0.04),
    "h100-qwen-7b": lambda: formula("h100", "qwen-7b", 1, ttft=1.0, tpot=0.04),
    "h100-qwen-32b": lambda: formula("h100", "qwen-32b", 2, ttft=2.0, tpot=0.05),
    "h200-llama-70b": lambda: formula("h200", "llama-70b", 4, ttft=2.0, tpot=0.05),
}


def names() -> list[str]:
    """All names that load() knows, sorted."""
    return sorted([*_MADE, *(path.stem for path in _FITTED.glob("*.json"))])


def load(name_or_path: str) -> PerfModel:
    """A named model, or a calibrated one from a JSON file (anything with a slash or ending in .json).

    Raises ValueError: an unknown name, with those that are known; a file that cannot be read or has a wrong field.
    """
    if "/" in name_or_path or name_or_path.endswith(".json"):
        return read(Path(name_or_path))
    if name_or_path in _MADE:
        return _MADE[name_or_path]()
    fitted = _FITTED / f"{name_or_path}.json"
    if fitted.is_file():
        return read(fitted)
    raise ValueError(
        f"performance model {name_or_path!r} is not known; use one of {', '.join(names())}, or a .json file"
    )
