"""Which device and dtype a worker gets, or why it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forebay_engine.device import choose_device, download, upload  # noqa: E402
from forebay_engine.errors import ModelError  # noqa: E402
from forebay_engine.executor.torch_executor import TorchExecutor  # noqa: E402
from forebay_engine.model.dtype import resolve_dtype  # noqa: E402

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "available", "wanted"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda:0"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda:0"),
    ],
)
def test_the_device(name: str, available: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(choose_device(name)) == wanted


@pytest.mark.parametrize(("built", "words"), [("13.0", "built for CUDA 13.0, finds no GPU"), (None, "without CUDA")])
def test_a_gpu_that_is_not_there_is_refused(built: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing falls back to the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(ModelError, match=f"--device cuda: .*{words}.*gpus.count 0"):
        TorchExecutor(Path("any"), kv_memory_bytes=1 << 20, device="cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ModelError, match="'tpu' is unknown; supported: auto, cpu, cuda"):
        choose_device("tpu")


@pytest.mark.parametrize(
    ("name", "capability", "wanted"),
    [
        ("auto", (9, 0), torch.bfloat16),
        ("auto", (8, 0), torch.bfloat16),
        ("auto", (7, 5), torch.float16),
        ("bfloat16", (8, 6), torch.bfloat16),
        ("float16", (7, 5), torch.float16),
        ("float32", (7, 5), torch.float32),
    ],
)
def test_the_dtype_on_a_gpu(name: str, capability: tuple[int, int], wanted: object) -> None:
    assert resolve_dtype(name, CUDA, capability=capability) == wanted


def test_bfloat16_on_a_gpu_without_it_is_refused() -> None:
    with pytest.raises(ModelError, match=r"compute capability 8\.0 or higher, this one's is 7\.5"):
        resolve_dtype("bfloat16", CUDA, capability=(7, 5))


def test_on_a_cpu_nothing_is_copied() -> None:
    values = np.arange(5, dtype=np.int32)
    there = upload(values, torch.device("cpu"))
    assert there.data_ptr() == values.ctypes.data
    (back,) = download(there)
    assert back is there


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-check runs instead of skipping")
def test_the_gpu_check_skips_aloud() -> None:
    script = Path(__file__).parents[2] / "gpu"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"skipped": "no GPU"}
    assert "SKIPPED: torch finds no GPU here" in done.stderr
