"""The KV arena's memory: one tensor over one page-aligned buffer."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from forebay_engine.errors import ModelError
from forebay_engine.kv.arena import ArenaLayout


def allocate_arena(layout: ArenaLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor [num_blocks, kv_heads, layers, 2, block_size, head_size].

    On a CPU it starts on a page, as registration for one-sided reads wants, and a page takes memory only once touched.
    Raises ModelError when the memory can't be had.
    """
    shape = (num_blocks, *layout.shape)
    size = num_blocks * layout.block_bytes
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > installed:
            # A system that promises memory it has not would let us start, and end us once the arena has filled.
            raise MemoryError(f"this machine has {installed / 1e6:.0f} MB")
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(
            f"no memory for a KV arena of {num_blocks} blocks, {size / 1e6:.0f} MB on {device}: {error}; "
            "give the worker less KV memory (--kv-memory, spec.engine.kvCache.memory)"
        ) from error
    # Gathering a sequence touches 2 KiB here and there all over the arena: with small pages each is a page-table walk.
    # A system without huge pages refuses; it is only slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive. A fresh mapping reads as zeros without being touched.
    return torch.frombuffer(memory, dtype=dtype).view(shape)
