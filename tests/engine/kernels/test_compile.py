"""The GPU kernels compile to machine code for GPUs that this machine has not: Triton brings the assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="comes with torch's Linux build; pip install triton")

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""What one program may take, by compute capability (CUDA C++ Programming Guide, table of compute capabilities)."""


@pytest.mark.timeout(300)
def test_kernels_compile_fit_and_use_tensor_cores(tmp_path: Path) -> None:
    targets = ["90:bf16", "86:bf16", "86:fp32"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), *targets],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    attention = {"decode", "decode in spans", "chunk"}
    assert set(found[targets[0]]) == attention | {"norm", "silu", "join", "rotary", "rotary normed"}
    assert found["90:bf16"]["chunk"]["hopper"]
    for target in targets:
        assert attention <= set(found[target])
        for name, kernel in found[target].items():
            assert kernel["shared"] <= SHARED_MEMORY[int(target.split(":")[0])], (target, name, kernel)
            if "bf16" in target:
                assert not kernel["spills"], (target, name)
                assert kernel["tensor_cores"] or name not in attention, (target, name)
            # The rotation's rows of half a head are its only ones that are narrower than 16 bytes a thread.
            assert kernel["wide"] or "rotary" in name or name == "join", (target, name)
