"""A step on a GPU: its inputs in one copy, then kernels only; nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forebay_engine.device import finish, upload
from forebay_engine.executor.decode_graphs import DecodeGraphs, Record, shape_of
from forebay_engine.executor.step_inputs import Cut, Part, Places, Shape, pack, padded_layout
from forebay_engine.kernels.gpu.attention import (
    SPAN,
    Tiling,
    attend_chunks,
    attend_decodes,
    chunk_tiling,
    decode_tiling,
)
from forebay_engine.model.gpu import GpuNetwork
from forebay_engine.model.spec import ModelSpec
from forebay_engine.types import SequenceStep


class GpuForward:
    """Implements forward.py's Forward over Triton's kernels. With Triton's interpreter it runs on CPU tensors too."""

    def __init__(self, folder: Path, spec: ModelSpec, arena: torch.Tensor, record: Record | None = None) -> None:
        """`arena` [blocks, kv_heads, layers, 2, block_size, head_size] contiguous. `record`: how decode steps become
        graphs; None: not at all. Raises ModelError.
        """
        self._network = GpuNetwork(folder, spec, arena)
        self._arena = arena
        self._block_size = arena.shape[4]
        sizes = (spec.heads // spec.kv_heads, spec.head_size, arena.dtype.itemsize)
        self._decode, self._chunk = decode_tiling(*sizes), chunk_tiling(*sizes)
        self._cut = Cut(self._chunk.queries, SPAN)
        self._graphs = None if record is None else DecodeGraphs(self._run_padded, record)

    def hidden(self, steps: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor]:
        shape = shape_of(steps, self._block_size) if self._graphs is not None else None
        inputs = pack(steps, self._block_size, self._cut, pad_to=shape)
        buffer = upload(inputs.buffer, self._arena.device)
        if self._graphs is not None and shape is not None:
            return list(range(len(steps))), self._graphs(shape, buffer)
        return list(range(len(steps))), self._run(inputs.places, buffer)

    def _run(self, places: Places, buffer: torch.Tensor) -> torch.Tensor:
        attention = StepAttention(self._arena, places, buffer, self._decode, self._chunk)
        token_ids, positions, slots = (view(buffer, at) for at in (places.token_ids, places.positions, places.slots))
        return self._network.forward(token_ids, positions, slots, attention)

    def _run_padded(self, shape: Shape, buffer: torch.Tensor) -> torch.Tensor:
        return self._run(padded_layout(shape, self._block_size, SPAN), buffer)

    def warm_up(self) -> None:
        """Have every kernel compiled, which takes seconds, before a request waits for it.

        Runs steps of made-up tokens over the arena's first blocks: to be called before they hold anything.
        """
        blocks, size = self._arena.shape[0], self._block_size
        longest = min(blocks * size, SPAN + 1)
        table = list(range(-(-longest // size)))
        steps = [SequenceStep("", [0], 0, table, None)] * 2
        if longest > 1:
            steps += [SequenceStep("", [0, 0], 0, table, None), SequenceStep("", [0], longest - 1, table, None)]
        with torch.inference_mode():
            for step in steps:
                _, hidden = self.hidden([step])
                self.logits(hidden[:1])
        finish(self._arena.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden)

    def close(self) -> None:
        """Nothing to end."""


def view(buffer: torch.Tensor, part: Part) -> torch.Tensor:
    """That part of the device's copy of the inputs."""
    return buffer[part.first : part.first + part.size].view(part.shape)


class StepAttention:
    """model/gpu.py's Attention, of one step."""

    def __init__(
        self, arena: torch.Tensor, places: Places, buffer: torch.Tensor, decode: Tiling, chunk: Tiling
    ) -> None:
        self._arena = arena
        self._decode, self._chunk = decode, chunk
        self._tables = view(buffer, places.tables)
        self._decodes, self._joins = view(buffer, places.decode_tiles), view(buffer, places.joins)
        self._chunks = view(buffer, places.chunk_tiles)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        arena, tables = self._arena, self._tables
        rows, all_heads, head_size = qkv.shape
        out = torch.empty(rows, all_heads - 2 * arena.shape[1], head_size, dtype=qkv.dtype, device=qkv.device)
        if self._joins.shape[0]:
            attend_decodes(out, qkv, arena, layer, tables, self._decodes, self._joins, self._decode)
        if self._chunks.shape[0]:
            attend_chunks(out, qkv, arena, layer, tables, self._chunks, self._chunk)
        return out.view(rows, -1)
