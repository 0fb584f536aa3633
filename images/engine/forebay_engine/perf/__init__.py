"""Performance models: step times of a device and model, for the simulated engine and for replays."""

from forebay_engine.perf.catalog import load, names
from forebay_engine.perf.model import PerfModel, parse

__all__ = ["PerfModel", "load", "names", "parse"]
