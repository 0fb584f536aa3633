"""Which number format a model runs in."""

from __future__ import annotations

from pathlib import Path

import torch

from forebay_engine.errors import ModelError

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_BF16_CAPABILITY = (8, 0)


def resolve_dtype(
    name: str,
    device: torch.device,
    cpu_flags: frozenset[str] | None = None,
    capability: tuple[int, int] | None = None,
) -> torch.dtype:
    """The dtype of `name`; "auto" is bfloat16 where the hardware multiplies it, else float16 (GPU) or float32 (CPU).

    Without bf16 instructions a CPU emulates them, and prefill is 5 times slower than in float32; with them it is twice
    as fast and decode reads half the bytes. GPUs have them from compute capability 8.0 (Ampere) on. Raises ModelError
    for an unknown name, for float16 on a CPU, where it has no fast kernels and overflows, and for bfloat16 on a GPU
    without it. `cpu_flags` and `capability` are the hardware's own unless given.
    """
    if device.type == "cuda" and name in ("auto", "bfloat16"):
        found = torch.cuda.get_device_capability(device) if capability is None else capability
        if found >= _BF16_CAPABILITY:
            return torch.bfloat16
        if name == "auto":
            return torch.float16
        raise ModelError(
            f"dtype bfloat16 needs a GPU of compute capability 8.0 or higher, this one's is {found[0]}.{found[1]}; "
            "use auto or float16"
        )
    if name == "auto":
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
