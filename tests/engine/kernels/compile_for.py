"""Compiles the GPU kernels for GPUs that need not be there: `python compile_for.py CAPABILITY:DTYPE ...` (90:bf16).

All kernels for the first, attention alone for the others. Prints one JSON object: by target and kernel, the shared
memory in bytes, whether registers are spilled, whether products run on tensor cores (and by Hopper's instructions), and
whether loads are 16 bytes wide. Triton must not interpret here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from forebay_engine.kernels.gpu import activation, attention, norm, rotary
from forebay_engine.kernels.gpu.launch import INTERPRETED, padded

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
INT32 = {"slots_ptr", "tables_ptr", "tiles_ptr", "joins_ptr"}
FLOAT32 = {"cos_ptr", "sin_ptr", "partial_ptr"}
GROUP, HEAD, HIDDEN, BLOCK = 4, 128, 4096, 16
ALIGNED = [["tt.divisibility", 16]]


def build(kernel: Any, constants: dict[str, Any], target: GPUTarget, dtype: str, warps: int, stages: int) -> Any:
    """As a launch with aligned tensors would: Triton derives the same from the arguments."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        # The span's weights, of which norm.py's kernel has none.
        is_float32 = name in FLOAT32 or (name == "weight_ptr" and "partial_ptr" in kernel.arg_names)
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in INT32 else "*fp32" if is_float32 else f"*{dtype}"
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
        if name.endswith(("_ptr", "_stride")) or name == "size":
            attributes[i,] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def spills(cubin: bytes) -> bool:
    """By the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found is not None, told
    return found.groups() != ("0", "0")


def _but_attention() -> dict[str, tuple[Any, dict[str, Any], int, int]]:
    """By name: kernel, constants, warps, stages."""
    kernels = {
        "norm": (norm._add_rms_norm, {"SIZE": HIDDEN, "PADDED": padded(HIDDEN), "ADD": True}, 8, 1),
        "silu": (activation._silu_mul, {"WIDTH": 1024}, 4, 1),
        "join": (attention._join_spans, {"HEAD": HEAD, "HEAD_PADDED": HEAD}, 1, 1),
    }
    for normed in (False, True):
        constants = {"HALF": HEAD // 2, "HALF_PADDED": HEAD // 2, "BLOCK": BLOCK, "HEADS": 4, "NORM": normed}
        kernels["rotary normed" if normed else "rotary"] = (rotary._rotate_and_store, constants, 1, 1)
    return kernels


def compiled(capability: int, dtype: str, attention_only: bool) -> dict[str, Any]:
    target = GPUTarget("cuda", capability, 32)
    sizes = (GROUP, HEAD, ITEMSIZE[dtype])
    shape = {"GROUP": GROUP, "HEAD": HEAD, "HEAD_PADDED": HEAD, "BLOCK": BLOCK, "PRODUCTS_FLOAT32": False}
    kernels = {} if attention_only else _but_attention()
    for name, tiling, span, split in (
        ("decode", attention.decode_tiling(*sizes), attention.SPAN, False),
        ("decode in spans", attention.decode_tiling(*sizes), attention.SPAN, True),
        ("chunk", attention.chunk_tiling(*sizes), 0, False),
    ):
        constants = {**shape, "ROWS": tiling.rows, "KEYS": tiling.keys, "SPAN": span, "SPLIT": split}
        kernels[name] = (attention._paged_attention, constants, tiling.warps, tiling.stages)
    found = {}
    for name, (kernel, constants, warps, stages) in kernels.items():
        built = build(kernel, constants, target, dtype, warps, stages)
        assert built.asm["cubin"]
        ptx = built.asm["ptx"]
        found[name] = {
            "shared": built.metadata.shared,
            "spills": spills(built.asm["cubin"]),
            "tensor_cores": "mma" in ptx,
            "hopper": "wgmma" in ptx,
            "wide": bool(re.search(r"cp\.async\.cg.* 0x10|ld\.global.*v4\.b32", ptx)),
        }
    return found


if __name__ == "__main__":
    assert not INTERPRETED
    found = {}
    for i, target in enumerate(sys.argv[1:]):
        capability, dtype = target.split(":")
        found[target] = compiled(int(capability), dtype, attention_only=i > 0)
    print(json.dumps(found))
