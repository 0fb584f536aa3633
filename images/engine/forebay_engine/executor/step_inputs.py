"""The integers that a GPU needs of one step, in one buffer, so that they travel in one copy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay_engine.types import SequenceStep

Ints = npt.NDArray[np.int32]

_ALIGN = 4
"""int32s: parts begin at 16 bytes, which Triton's kernels would otherwise be compiled anew for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernels divide attention."""

    chunk_queries: int
    """Query tokens of one tile of a chunk, at most."""

    span: int
    """Keys of one program in decode."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode step's size: at most `rows` tokens, whose contexts lie in at most `blocks` blocks together."""

    rows: int
    blocks: int

    def tiles(self, block_size: int, span: int) -> int:
        """Spans of keys that such a step can have at most: each sequence has one more than it fills, or fewer."""
        keys = self.blocks * block_size
        return self.rows if keys <= span else self.rows + keys // span


@dataclass(frozen=True, slots=True)
class Part:
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts lie in `StepInputs.buffer`. Rows are the steps' tokens, in the order of the steps.

    token_ids, positions, slots [rows]: slot = block * block_size + place in the block. tables: the steps' blocks by
    position, one step after the other. decode_tiles and joins, chunk_tiles: kernels/gpu/attention.py's, of steps with
    one token, and of steps with more.
    """

    token_ids: Part
    positions: Part
    slots: Part
    tables: Part
    decode_tiles: Part
    joins: Part
    chunk_tiles: Part


def layout_of(rows: int, blocks: int, decode_tiles: int, joins: int, chunk_tiles: int) -> Places:
    at, parts = 0, []
    for shape in ((rows,), (rows,), (rows,), (blocks,), (decode_tiles, 4), (joins, 4), (chunk_tiles, 4)):
        parts.append(Part(at, shape))
        at += -(-parts[-1].size // _ALIGN) * _ALIGN
    return Places(*parts)


def padded_layout(shape: Shape, block_size: int, span: int) -> Places:
    """Of a decode step that is padded to `shape`."""
    return layout_of(shape.rows, shape.blocks, shape.tiles(block_size, span), shape.rows, 0)


@dataclass(frozen=True, slots=True)
class StepInputs:
    buffer: Ints
    places: Places

    def part(self, name: str) -> Ints:
        part: Part = getattr(self.places, name)
        return self.buffer[part.first : part.first + part.size].reshape(part.shape)


def blocks_of(step: SequenceStep, block_size: int) -> int:
    """That the step's context fills, the last one in part."""
    return -(-(step.start + len(step.token_ids)) // block_size)


def pack(steps: Sequence[SequenceStep], block_size: int, cut: Cut, *, pad_to: Shape | None = None) -> StepInputs:
    """`pad_to`, for steps of one token each that fit: rows beyond the steps' have slot -1, tiles position -1 and joins
    no spans, and the kernels leave them out.
    """
    counts = np.array([len(step.token_ids) for step in steps], dtype=np.int32)
    starts = np.array([step.start for step in steps], dtype=np.int32)
    blocks = np.array([blocks_of(step, block_size) for step in steps], dtype=np.int32)
    first_rows, offsets = _firsts(counts), _firsts(blocks)
    rows, decodes, chunks = int(counts.sum()), np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    spans = starts[decodes] // cut.span + 1
    tiles = -(-counts[chunks] // cut.chunk_queries)
    if pad_to is None:
        places = layout_of(rows, int(blocks.sum()), int(spans.sum()), len(decodes), int(tiles.sum()))
    else:
        places = padded_layout(pad_to, block_size, cut.span)
    inputs = StepInputs(np.zeros(places.chunk_tiles.first + places.chunk_tiles.size, dtype=np.int32), places)

    token_ids, tables = inputs.part("token_ids"), inputs.part("tables")
    for i, step in enumerate(steps):
        token_ids[first_rows[i] : first_rows[i] + counts[i]] = step.token_ids
        tables[offsets[i] : offsets[i] + blocks[i]] = step.block_table[: blocks[i]]
    owner = np.repeat(np.arange(len(steps)), counts)
    positions = np.arange(rows) - first_rows[owner] + starts[owner]
    inputs.part("positions")[:rows] = positions
    slots = inputs.part("slots")
    slots[rows:] = -1
    slots[:rows] = tables[offsets[owner] + positions // block_size] * block_size + positions % block_size

    first_tiles = _firsts(spans)
    one = np.repeat(decodes, spans)
    begins = (np.arange(len(one)) - np.repeat(first_tiles, spans)) * cut.span
    decode_tiles = inputs.part("decode_tiles")
    decode_tiles[len(one) :, 3] = -1
    decode_tiles[: len(one)] = np.stack((offsets[one], first_rows[one], begins, starts[one]), axis=1)
    inputs.part("joins")[: len(decodes), :3] = np.stack((first_rows[decodes], first_tiles, spans), axis=1)

    one = np.repeat(chunks, tiles)
    done = (np.arange(len(one)) - np.repeat(_firsts(tiles), tiles)) * cut.chunk_queries
    chunk_tiles = np.stack(
        (offsets[one], first_rows[one] + done, np.minimum(counts[one] - done, cut.chunk_queries), starts[one] + done),
        axis=1,
    )
    # The latest first: they have most keys to go over, and all would wait for one that began last.
    inputs.part("chunk_tiles")[:] = chunk_tiles[np.argsort(-chunk_tiles[:, 3], kind="stable")]
    return inputs


def _firsts(counts: Ints) -> Ints:
    """Index of each group's first member, where groups of these sizes lie one after the other."""
    return (np.cumsum(counts) - counts).astype(np.int32)
