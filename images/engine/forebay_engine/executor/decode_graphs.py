"""Decode steps as CUDA graphs: one launch for a step, where launching its kernels one by one takes longer than they do.

A graph's shapes and addresses are fixed. So steps of decode tokens alone are padded to a few shapes, and their inputs
are copied over those of the step that was recorded. A shape is recorded when it comes for the second time: the first
time its kernels are compiled, which can't be done while recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from forebay_engine.executor.step_inputs import Shape, blocks_of
from forebay_engine.types import SequenceStep

log = logging.getLogger(__name__)

MAX_ROWS = 256
"""Beyond, the kernels take longer than their launches."""

MIN_BLOCKS = 16

MAX_GRAPHS = 64
"""Each holds a few MB of the GPU's memory."""


def shape_of(steps: Sequence[SequenceStep], block_size: int) -> Shape | None:
    """The least shape that holds the step: powers of two. None for a step that no graph is for."""
    if len(steps) > MAX_ROWS or any(len(step.token_ids) != 1 for step in steps):
        return None
    blocks = sum(blocks_of(step, block_size) for step in steps)
    return Shape(_power_of_two(len(steps)), max(MIN_BLOCKS, _power_of_two(blocks)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class Record(Protocol):
    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        """Note down what `run` gives the GPU, without doing it: a call that does it, and what `run` returned."""


class CudaRecord:
    """Graphs of one executor: they never run at the same time, so they share memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: a transfer's thread may take GPU memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, out


@dataclass(slots=True)
class _Graph:
    inputs: torch.Tensor
    replay: Callable[[], Any]
    out: torch.Tensor


class DecodeGraphs:
    """Not thread-safe. What `run` returned is overwritten by the next step of any shape."""

    def __init__(self, run: Callable[[Shape, torch.Tensor], torch.Tensor], record: Record) -> None:
        """`run` computes a step of that shape from its inputs, a tensor on the device."""
        self._run = run
        self._record = record
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, _Graph] = {}
        self._off = False

    def __call__(self, shape: Shape, inputs: torch.Tensor) -> torch.Tensor:
        graph = self._graphs.get(shape)
        if graph is None and shape in self._seen and not self._off and len(self._graphs) < MAX_GRAPHS:
            graph = self._graph(shape, inputs)
        self._seen.add(shape)
        if graph is None:
            return self._run(shape, inputs)
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.out

    def _graph(self, shape: Shape, inputs: torch.Tensor) -> _Graph | None:
        kept = inputs.clone()
        try:
            replay, out = self._record(lambda: self._run(shape, kept))
        except RuntimeError as error:
            # The step can be computed all the same, only slower.
            log.warning("recording a CUDA graph of %s failed, decode goes on without graphs: %s", shape, error)
            self._off = True
            return None
        made = self._graphs[shape] = _Graph(kept, replay, out)
        return made
