"""Fit a performance model's coefficients to measured steps.

    python -m forebay_engine.perf.fit perf_model.csv --model llama2-70b --hardware h100-80gb --tp 4 \
        --name h100-llama-70b > h100-llama-70b.json

reads the table of splitwise-sim (github.com/Mutinifni/splitwise-sim, data/perf_model.csv, MIT licence): prompt_time is
the prefill of batch_size prompts of prompt_size tokens in one step, token_time one decode step of such a batch; ms.
Relative errors go to stderr.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay_engine.perf.formula import DEVICES, MEMORY_SHARE, MODELS
from forebay_engine.perf.model import PerfModel

_SOURCE = (
    "fitted to splitwise-sim data/perf_model.csv (commit 8f99e7dc; MIT License, Copyright (c) 2024 Pratyush Patel), "
    "measured with Llama-2-70B, up to 32,768 prompt tokens and 36,864 resident tokens a step"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    seconds: float
    chunks: tuple[tuple[int, int], ...] = ()
    batch: int = 0
    resident_tokens: int = 0

    def predicted(self, model: PerfModel) -> float:
        return model.step_seconds(self.chunks, self.batch, self.resident_tokens)


def read_splitwise(path: Path, model: str, hardware: str, tp: int) -> list[Sample]:
    """Median of the repeated runs of each point, as one prefill sample and one decode sample."""
    points: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], int(row["tensor_parallel"])) == (model, hardware, tp):
                point = (int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"]))
                points[point].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    if not points:
        raise ValueError(f"{path}: no row for model {model}, hardware {hardware}, tensor_parallel {tp}")
    samples = []
    for (prompt, batch, tokens), times in sorted(points.items()):
        prefill = statistics.median(t for t, _ in times)
        decode = statistics.median(t for _, t in times)
        samples.append(Sample(prefill, chunks=((prompt, 0),) * batch))
        # token_time is the mean over the answer, so the mean context counts.
        samples.append(Sample(decode, batch=batch, resident_tokens=batch * (prompt + tokens // 2)))
    return samples


def errors(model: PerfModel, samples: Sequence[Sample]) -> list[float]:
    """Relative error of each prediction, signed."""
    return [sample.predicted(model) / sample.seconds - 1 for sample in samples]


def fit(start: PerfModel, samples: Sequence[Sample], fields: Sequence[str], *, rounds: int = 400) -> PerfModel:
    """Minimise the sum of squared log errors over `fields`, each kept at or above 0. Deterministic.

    Coordinate search with shrinking steps: the roofline's max() makes the problem piecewise, and the fields few.
    """

    def cost(model: PerfModel) -> float:
        total = 0.0
        for sample in samples:
            ratio = sample.predicted(model) / sample.seconds
            # |log| would be infinite at 0; below a tenth the slope only has to point the right way.
            total += (ratio - 1) ** 2 if ratio > 1 else (1 / max(ratio, 0.1) - 1) ** 2
        return total

    best = start
    lowest = cost(best)
    steps = dict.fromkeys(fields, 0.5)
    for _ in range(rounds):
        for name in fields:
            value = getattr(best, name)
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                tried = msgspec.structs.replace(best, **{name: value * factor})
                if (costs := cost(tried)) < lowest:
                    best, lowest = tried, costs
                    steps[name] = min(0.5, steps[name] * 1.5)
                    break
            else:
                steps[name] /= 2
        if max(steps.values()) < 1e-5:
            break
    return best


def splitwise_model(name: str, hardware: str, tp: int, samples: Sequence[Sample]) -> PerfModel:
    """Llama-2-70B (80 layers, 8 KV heads of 128, 16 bit) fitted to `samples`; capacity and link as in formula.py."""
    device = DEVICES[hardware.split("-")[0]]
    shape = MODELS["llama-70b"]
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * 2
    start = PerfModel(
        name=name,
        source="fitted",
        tp=tp,
        note=_SOURCE,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        token_seconds=6e-5,
        attention_seconds=1e-10,
        knee_tokens=2048,
        knee_seconds=5e-5,
        weights_seconds=0.03,
        sequence_seconds=3e-4,
        resident_seconds=1e-8,
        prefill_overhead_seconds=0.02,
        transfer_bytes_per_second=device.link,
        transfer_seconds=0.0005,
        kv_capacity_tokens=int((device.memory * tp * MEMORY_SHARE - 2 * shape.parameters) / kv_bytes),
        ttft_objective_seconds=2.0,
        tpot_objective_seconds=0.1,
    )
    decode = [sample for sample in samples if sample.batch]
    prefill = [sample for sample in samples if sample.chunks]
    model = fit(start, decode, ("weights_seconds", "sequence_seconds", "resident_seconds"))
    names = ("token_seconds", "attention_seconds", "knee_tokens", "knee_seconds", "prefill_overhead_seconds")
    model = fit(model, prefill, names)
    values = msgspec.structs.asdict(model)
    return msgspec.structs.replace(model, **{k: _round(v) for k, v in values.items() if isinstance(v, float)})


def _round(value: float) -> float:
    return float(f"{value:.4g}") if value > 1e-15 else 0.0


def describe(model: PerfModel, samples: Sequence[Sample]) -> str:
    parts = []
    kinds: dict[str, Callable[[Sample], bool]] = {"prefill": lambda s: bool(s.chunks), "decode": lambda s: s.batch > 0}
    for kind, chosen in kinds.items():
        off = sorted(abs(e) for e in errors(model, [s for s in samples if chosen(s)]))
        parts.append(f"{kind}: error median {off[len(off) // 2]:.1%}, largest {off[-1]:.1%} of {len(off)} points")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forebay_engine.perf.fit", description="Fit a performance model.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--model", default="llama2-70b")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    samples = read_splitwise(args.csv, args.model, args.hardware, args.tp)
    model = splitwise_model(args.name, args.hardware, args.tp, samples)
    sys.stderr.write(describe(model, samples) + "\n")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(model), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
