"""Four panels over time: offered load, the split, latency against its objectives, decisions. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay_operator.replay.run import Ran, ReplayError, decisions

BIN_SECONDS = 10.0


def plot(ran: Ran, path: Path) -> None:
    """Raises ReplayError when matplotlib is not installed or the file cannot be written."""
    try:
        import matplotlib
    except ImportError:
        raise ReplayError(
            "--plot needs matplotlib; install it: pip install 'forebay[plot]' (in a clone: pip install -e '.[plot]')"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    setup, jobs = ran.setup, ran.outcome.jobs
    bins = int(jobs[-1].arrived // BIN_SECONDS) + 1
    prompts, outputs = [0.0] * bins, [0.0] * bins
    ttfts: list[list[float]] = [[] for _ in range(bins)]
    tpots: list[list[float]] = [[] for _ in range(bins)]
    for job in jobs:
        slot = int(job.arrived // BIN_SECONDS)
        prompts[slot] += job.prompt / BIN_SECONDS
        outputs[slot] += job.output / BIN_SECONDS
        if job.first >= 0:
            ttfts[slot].append(job.first - job.arrived)
        if job.last >= 0 and job.output > 1:
            tpots[slot].append((job.last - job.first) / (job.output - 1))
    times = [(i + 0.5) * BIN_SECONDS / 60 for i in range(bins)]
    figure: Any
    figure, axes = pyplot.subplots(4, 1, figsize=(10, 9), sharex=True, height_ratios=(2, 1.5, 2, 2))
    load, ratio, ttft, tpot = axes
    load.plot(times, [p / 1e3 for p in prompts], label="prompt tokens offered", color="tab:blue")
    load.plot(times, [o / 1e3 for o in outputs], label="output tokens asked for", color="tab:orange")
    load.set_ylabel("thousand tokens/s")
    load.legend(loc="upper right", fontsize=8)
    steps = [at / 60 for at, _, _, _ in ran.outcome.splits]
    ratio.step(steps, [p for _, p, _, _ in ran.outcome.splits], where="pre", label="prefill workers serving")
    ratio.step(
        steps, [t for _, _, _, t in ran.outcome.splits], where="pre", linestyle=":", color="black", label="target"
    )
    ratio.set_ylim(0, setup.workers)
    ratio.set_ylabel("workers")
    ratio.legend(loc="upper right", fontsize=8)
    for axis, values, limit, name in (
        (ttft, ttfts, setup.ttft_seconds, "TTFT"),
        (tpot, tpots, setup.tpot_seconds, "TPOT"),
    ):
        for share, label in ((0.5, "p50"), (0.95, "p95")):
            line = [sorted(v)[min(len(v) - 1, int(share * len(v)))] * 1e3 if v else None for v in values]
            axis.plot(times, line, label=f"{name} {label}")
        axis.axhline(limit * 1e3, color="red", linewidth=0.8, label="objective")
        axis.set_ylim(0, limit * 2e3)
        axis.set_ylabel(f"{name} ms")
        axis.legend(loc="upper right", fontsize=8)
    for at, _, after, reason in decisions(ran):
        for axis in axes:
            axis.axvline(at / 60, color="grey", linewidth=0.5, alpha=0.6)
        ratio.annotate(f"{after} {reason}", (at / 60, setup.workers), fontsize=5, rotation=60, va="bottom")
    tpot.set_xlabel("minutes")
    figure.suptitle(
        f"{ran.policy}: {ran.score.attainment_percent:.1f} % met both objectives, {ran.score.moves} moves", y=0.995
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ReplayError(f"--plot {path}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
