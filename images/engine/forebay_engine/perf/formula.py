"""Performance models computed from data sheets: a roofline per device and model.

Compute: F = 2 * N * n + 4 * L * d * (n * p + n^2 / 2) FLOPs for n new tokens on p cached ones, with N active
parameters, L layers and d = attention heads * head size; at TP * peak * MFU. Memory: weights once, plus KV of the
context, at TP * bandwidth * efficiency. These are the formulas of the DistServe and Mooncake papers (OSDI'24, FAST'25),
with MFU 0.5 and bandwidth efficiency 0.75. They leave out launch gaps, all-reduces and imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay_engine.perf.model import PerfModel

MFU = 0.5
BANDWIDTH_EFFICIENCY = 0.75
MEMORY_SHARE = 0.9
"""Of HBM, for weights and KV."""


@dataclass(frozen=True, slots=True)
class Device:
    flops: float
    """Dense bf16 FLOP/s."""

    bandwidth: float
    """HBM bytes/s."""

    memory: float
    """HBM bytes."""

    link: float
    """Usable bytes/s of the worker's network link."""


@dataclass(frozen=True, slots=True)
class Model:
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int


DEVICES = {
    "a100": Device(312e12, 2.039e12, 80e9, 23e9),
    "h100": Device(989e12, 3.35e12, 80e9, 46e9),
    "h200": Device(989e12, 4.8e12, 141e9, 46e9),
}
"""80 GB SXM parts; links of 200 Gb/s (A100) and 400 Gb/s at 92 %."""

MODELS = {
    "llama-8b": Model(8.03e9, 32, 32, 8, 128),
    "qwen-7b": Model(7.62e9, 28, 28, 4, 128),
    "qwen-32b": Model(32.5e9, 64, 40, 8, 128),
    "llama-70b": Model(70.6e9, 80, 64, 8, 128),
}
"""Llama-3.1-8B, Qwen2.5-7B, Qwen2.5-32B, Llama-3.1-70B."""


def formula(device_name: str, model_name: str, tp: int, *, ttft: float, tpot: float) -> PerfModel:
    """The roofline of `model_name` in bf16 on `tp` devices. `ttft` and `tpot` are its default objectives, seconds."""
    device, model = DEVICES[device_name], MODELS[model_name]
    flops = tp * device.flops * MFU
    bandwidth = tp * device.bandwidth * BANDWIDTH_EFFICIENCY
    weights = 2 * model.parameters
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_size * 2
    return PerfModel(
        name=f"{device_name}-{model_name}",
        source="formula",
        tp=tp,
        note=f"roofline: MFU {MFU}, bandwidth efficiency {BANDWIDTH_EFFICIENCY}",
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        token_seconds=2 * model.parameters / flops,
        attention_seconds=4 * model.layers * model.heads * model.head_size / flops,
        weights_seconds=weights / bandwidth,
        resident_seconds=kv_bytes / bandwidth,
        transfer_bytes_per_second=device.link,
        transfer_seconds=0.0005,
        kv_capacity_tokens=int((device.memory * tp * MEMORY_SHARE - weights) / kv_bytes),
        ttft_objective_seconds=ttft,
        tpot_objective_seconds=tpot,
    )
