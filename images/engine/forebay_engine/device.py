"""Between the processor and the device that computes: which device, and one copy each way a step."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from forebay_engine.errors import ModelError

log = logging.getLogger(__name__)

NAMES = ("auto", "cpu", "cuda")


def choose_device(name: str) -> torch.device:
    """The device of `name`; "auto" is the first GPU that torch sees, else the CPU.

    Raises ModelError for "cuda" where torch sees no GPU: a worker that fell back to the CPU would hold its GPU and
    answer a hundred times slower, in silence.
    """
    if name not in NAMES:
        raise ModelError(f"device {name!r} is unknown; supported: {', '.join(NAMES)}")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if torch.cuda.device_count() > 1:
            log.warning("of %d GPUs that this worker sees, it computes on one", torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    built = torch.version.cuda
    cause = "this build of torch is without CUDA" if built is None else f"torch, built for CUDA {built}, finds no GPU"
    raise ModelError(
        f"--device cuda: {cause}; give the worker a GPU (gpus.count, the NVIDIA driver and device plugin) and a CUDA "
        "image, or compute on the CPU: --device cpu, gpus.count 0"
    )


def upload(values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """On the device; for a GPU through pinned memory and without waiting. `values` may be reused at once."""
    host = torch.from_numpy(values)
    if device.type == "cpu" or values.size == 0:
        return host.to(device)
    # torch's cache of pinned memory hands a buffer out again once the copy from it is over.
    return host.pin_memory().to(device, non_blocking=True)


def download(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """On the CPU, all after one wait, which is also for everything that the GPU was given before."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    hosts = []
    for tensor in tensors:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)
        hosts.append(host.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return hosts


def finish(device: torch.device) -> None:
    """Wait until the device has done what this thread gave it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
