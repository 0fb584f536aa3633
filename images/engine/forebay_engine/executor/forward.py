"""The ways from a step's tokens to hidden states and logits: CPU kernels, GPU kernels, or torch operations alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from forebay_engine.errors import ModelError
from forebay_engine.executor.paged_attention import PagedAttention
from forebay_engine.kernels.compiler import KernelsUnavailable
from forebay_engine.kernels.library import Part, load_kernels
from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.model.dtype import read_cpu_flags
from forebay_engine.model.native import NativeNetwork
from forebay_engine.model.network import Network
from forebay_engine.model.prepare import default_cache_dir
from forebay_engine.model.spec import ModelSpec
from forebay_engine.types import SequenceStep

log = logging.getLogger(__name__)


class Forward(Protocol):
    def hidden(self, steps: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor]:
        """Order of the steps' rows (indices into `steps`), and hidden states [rows or more, hidden] in that order."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden]."""

    def close(self) -> None: ...


class TorchForward:
    """Any device."""

    def __init__(self, folder: Path, spec: ModelSpec, layout: ArenaLayout, arena: torch.Tensor) -> None:
        self._device = arena.device
        self._network = Network(folder, spec, arena.dtype, arena.device)
        self._attention = PagedAttention(arena, layout, spec.heads)

    def hidden(self, steps: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor]:
        order, attention = self._attention.plan(steps)
        token_ids = [token for i in order for token in steps[i].token_ids]
        positions = [p for i in order for p in range(steps[i].start, steps[i].start + len(steps[i].token_ids))]
        return order, self._network.forward(
            torch.tensor(token_ids, device=self._device), torch.tensor(positions, device=self._device), attention
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden)

    def close(self) -> None:
        """Nothing to end."""


class NativeForward:
    """CPUs that the kernels know."""

    def __init__(self, network: NativeNetwork) -> None:
        self._network = network

    def hidden(self, steps: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor]:
        token_ids = torch.tensor([token for step in steps for token in step.token_ids])
        parts = [Part(len(step.token_ids), step.start, step.block_table) for step in steps]
        return list(range(len(steps))), self._network.forward(token_ids, parts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden)

    def close(self) -> None:
        self._network.close()


def _kernel_cache() -> Path:
    try:
        return default_cache_dir() / "kernels"
    except ModelError as error:
        raise KernelsUnavailable(str(error)) from error


def _gpu_forward(folder: Path, spec: ModelSpec, arena: torch.Tensor) -> Forward:
    try:
        from forebay_engine.executor.decode_graphs import CudaRecord
        from forebay_engine.executor.gpu_forward import GpuForward
        from forebay_engine.kernels.gpu.launch import INTERPRETED
    except ImportError as error:
        raise ModelError(
            f"GPU kernels need Triton ({error}); use the engine image, or torch's CUDA build for Linux, which brings it"
        ) from error
    if INTERPRETED:
        raise ModelError("TRITON_INTERPRET is set: kernels would run in numpy, on the CPU; unset it to use the GPU")
    try:
        forward = GpuForward(folder, spec, arena, CudaRecord())
        started = time.monotonic()
        forward.warm_up()
        log.info("GPU kernels compiled in %.1f s", time.monotonic() - started)
        return forward
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights don't fit into the GPU's memory beside a KV arena of {arena.nbytes / 1e9:.1f} GB; give the "
            f"worker less KV memory (--kv-memory, spec.engine.kvCache.memory) or a larger GPU: {error}"
        ) from error


def make_forward(
    folder: Path, spec: ModelSpec, layout: ArenaLayout, arena: torch.Tensor, *, threads: int, kernels: bool
) -> Forward:
    """The device's kernels unless `kernels` is False; torch alone on a CPU that they don't know, which is logged.

    Raises ModelError when the folder's weights can't be served, or a GPU's kernels can't be had.
    """
    if kernels and arena.device.type == "cuda":
        return _gpu_forward(folder, spec, arena)
    if kernels and arena.device.type == "cpu":
        try:
            library = load_kernels(arena.dtype, read_cpu_flags(), _kernel_cache())
            return NativeForward(NativeNetwork(folder, spec, library, arena, threads))
        except KernelsUnavailable as error:
            log.warning("no CPU kernels, decode takes about twice as long by torch: %s", error)
    return TorchForward(folder, spec, layout, arena)
