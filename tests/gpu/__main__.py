"""`python tests/gpu [--device cpu] [PART ...]`: what needs a GPU to be seen. One JSON line at the end.

kernels: the Triton kernels against plain torch. tokens: SmolLM2 against Hugging Face. pair: prefill and decode in two
processes, KV by NIXL out of GPU memory. speed: a step against the device's bandwidth and matrix rate. Without a GPU it
says so and ends with code 0; --device cpu runs tokens and pair on the CPU, which proves these scripts and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from forebay_engine.core.processes import exit_now
from forebay_engine.model.prepare import default_cache_dir, prepare_smollm2


def parts(device: str) -> dict[str, Callable[[], object]]:
    """Imported one by one: a part that can't be loaded takes no other with it."""

    def smollm2() -> Path:
        return prepare_smollm2(default_cache_dir(), lambda stage, share: None)

    def kernels() -> object:
        from gpu.kernels import check

        return check(device)

    def tokens() -> object:
        from gpu.tokens import check

        return check(smollm2(), device)

    def pair() -> object:
        from gpu.pair import check

        return check(smollm2(), device)

    def speed() -> object:
        from gpu.speed import check

        with tempfile.TemporaryDirectory() as folder:
            return check(Path(folder), device)

    return {"kernels": kernels, "tokens": tokens, "pair": pair, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", help="default: all that the device can run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "SKIPPED: torch finds no GPU here, so nothing of the GPU path was run. It takes an NVIDIA GPU and a driver "
            f"for CUDA {torch.version.cuda}. docs/gpu.md says what is checked without one.",
            file=sys.stderr,
        )
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    found = parts(arguments.device)
    chosen = arguments.part or (list(found) if arguments.device == "cuda" else ["tokens", "pair"])
    unknown = [name for name in chosen if name not in found]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(found)}")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "failed": [],
    }
    for name in chosen:
        print(f"== {name}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        try:
            result = found[name]()
        except Exception as error:
            traceback.print_exc()
            report["failed"].append(name)
            result = f"{type(error).__name__}: {error}"[:500]
        report[name] = {"seconds": round(time.perf_counter() - started, 1), "found": result}
    print(json.dumps(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    exit_now(main())
