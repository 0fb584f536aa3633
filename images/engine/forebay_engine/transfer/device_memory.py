"""An arena that is a torch tensor, on a GPU: reads land beside it in the same memory, and the GPU copies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import numpy as np
import torch

from forebay_engine.device import upload
from forebay_engine.transfer.memory import HOST, Buffer, Place


class DeviceMemory:
    """transfer/memory.py's ArenaMemory. On a CPU tensor it does the same with torch's copies (tests)."""

    def __init__(self, arena: torch.Tensor) -> None:
        """`arena` [blocks, ...] contiguous."""
        self._blocks = arena.view(arena.shape[0], -1)
        self._device = arena.device
        self._entered = threading.local()
        self._stream: torch.cuda.Stream | None = None
        self.place = HOST
        if arena.device.type == "cuda":
            self.place = Place("VRAM", arena.device.index or 0)
            # Its own: a copy must not wait for the step that runs.
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        if self._stream is not None and not getattr(self._entered, "done", False):
            torch.cuda.set_device(self._device)
            self._entered.done = True

    def allocate(self, nbytes: int) -> Buffer:
        with self._in_stream():
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Buffer(memory.data_ptr(), nbytes, memory)

    def put(self, buffer: Buffer, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        assert isinstance(buffer.owner, torch.Tensor)
        with self._in_stream():
            places = upload(np.array(blocks, dtype=np.int32), self._device)
            width = self._blocks.shape[1] * self._blocks.dtype.itemsize
            source = buffer.owner[: len(blocks) * width].view(self._blocks.dtype).view(len(blocks), -1)
            self._blocks.index_copy_(0, places.long(), source)
        if self._stream is not None:
            self._stream.synchronize()

    def _in_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
