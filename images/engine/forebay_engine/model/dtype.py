"""Which number format a model runs in."""

from __future__ import annotations

from pathlib import Path

import torch

from forebay_engine.errors import ModelError

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def resolve_dtype(name: str, device: torch.device, cpu_flags: frozenset[str] | None = None) -> torch.dtype:
    """The dtype of `name`; "auto" is bfloat16 where the hardware multiplies it, else float32.

    Without bf16 instructions a CPU emulates them, and prefill is 5 times slower than in float32; with them it is twice
    as fast and decode reads half the bytes. Raises ModelError for an unknown name, or float16 on a CPU, where it has no
    fast kernels and overflows.
    """
    if name == "auto":
        if device.type != "cpu":
            return torch.bfloat16
        flags = read_cpu_flags() if cpu_flags is None else cpu_flags
        return torch.bfloat16 if flags & _BF16_FLAGS else torch.float32
    if name not in NAMES:
        raise ModelError(f"dtype {name!r} is unknown; supported: auto, {', '.join(NAMES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelError("dtype float16 is for GPUs; on a CPU use float32, or bfloat16 where it has bf16 instructions")
    return NAMES[name]


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's feature flags; empty where they can't be read, which means float32."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
