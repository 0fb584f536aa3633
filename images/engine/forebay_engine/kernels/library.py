"""The compiled step of cpu/step.c, loaded. Mirrors its structs; holds alive what they point to."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from forebay_engine.kernels.compiler import KernelsUnavailable, Level, find_library, level_of
from forebay_engine.kernels.trust import check_trusted

log = logging.getLogger(__name__)

_LONG, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (("packed", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("blocks", _LONG))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Matrix),
        ("out", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
    )


class _Arena(ctypes.Structure):
    _fields_ = (
        ("base", _POINTER),
        ("block_size", _LONG),
        ("block_stride", _LONG),
        ("head_stride", _LONG),
        ("layer_stride", _LONG),
        ("value_offset", _LONG),
        ("head_size", _LONG),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", _LONG),
        ("hidden", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("hidden_eps", _FLOAT),
        ("head_eps", _FLOAT),
        ("kv", _Arena),
        ("frequencies", _POINTER),
        ("layer", ctypes.POINTER(_Layer)),
        ("head", _Matrix),
    )


class _Sequence(ctypes.Structure):
    _fields_ = (("first", _LONG), ("tokens", _LONG), ("start", _LONG), ("table", _POINTER))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as the kernels read it: outputs in blocks of Kernels.block, both sides padded with zeros."""

    weights: torch.Tensor
    bias: torch.Tensor | None
    """float32 [padded outputs]."""

    inputs: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KernelLayer:
    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    """Blocks of half gate, half up."""

    down: PackedMatrix
    q_norm: torch.Tensor | None
    """float32 [head_size], times sqrt(head_size)."""

    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class KernelModel:
    """What the layers compute; norm weights and their sqrt(hidden) are inside the matrices (model/norm.py: fold)."""

    hidden: int
    heads: int
    rms_eps: float
    frequencies: torch.Tensor
    """float32 [head_size / 2] (model/rope.py)."""

    layers: Sequence[KernelLayer]
    head: PackedMatrix


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence in a step: `tokens` rows, the first at position `start`."""

    tokens: int
    start: int
    block_table: Sequence[int]


class Kernels:
    """One loaded library. Packs matrices; `open` makes an engine of them."""

    def __init__(self, file: Path, dtype: torch.dtype) -> None:
        """Raises KernelsUnavailable when the file is no library that this process can load."""
        self.dtype = dtype
        try:
            self._library = library = ctypes.CDLL(str(file))
            library.forebay_block.restype = _LONG
            library.forebay_open.restype = _POINTER
            library.forebay_open.argtypes = (ctypes.POINTER(_Model), _LONG)
            library.forebay_close.argtypes = (_POINTER,)
            library.forebay_pack.argtypes = (_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG)
            library.forebay_step.argtypes = (_POINTER, _POINTER, _LONG, ctypes.POINTER(_Sequence), _LONG)
            library.forebay_logits.argtypes = (_POINTER, _POINTER, _LONG, _POINTER, _LONG)
        except (OSError, AttributeError) as error:
            raise KernelsUnavailable(
                f"loading {file} failed: {error}; delete it to have it made anew, or, where files may not be executed "
                "(a mount with noexec), set FOREBAY_CACHE to another folder"
            ) from error
        self.block: int = library.forebay_block()

    def pack(
        self, matrix: torch.Tensor, bias: torch.Tensor | None = None, *, inputs: int | None = None
    ) -> PackedMatrix:
        """`matrix` [outputs, inputs] in any float dtype; `inputs` names a larger count to pad to."""
        outputs, columns = matrix.shape
        step = 4 // self.dtype.itemsize
        padded = -(-(inputs or columns) // step) * step
        blocks = -(-outputs // self.block)
        source = matrix.to(self.dtype).contiguous()
        packed = torch.empty(blocks * self.block * padded, dtype=self.dtype)
        self._library.forebay_pack(source.data_ptr(), outputs, columns, packed.data_ptr(), blocks, padded)
        wide = None
        if bias is not None:
            wide = torch.zeros(blocks * self.block)
            wide[:outputs] = bias
        return PackedMatrix(packed, wide, padded, blocks)

    def pack_gate_up(
        self, gate: torch.Tensor, up: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> PackedMatrix:
        """Both [intermediate, hidden]; `bias` of gate and of up. The product is blocks * block / 2 wide."""
        both = self._interleave(gate, up)
        return self.pack(both, None if bias is None else self._interleave(bias[0][:, None], bias[1][:, None])[:, 0])

    def _interleave(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        half = self.block // 2
        blocks = -(-gate.shape[0] // half)
        both = torch.zeros(blocks, 2, half, gate.shape[1], dtype=gate.dtype)
        for i, part in enumerate((gate, up)):
            padded = torch.nn.functional.pad(part, (0, 0, 0, blocks * half - part.shape[0]))
            both[:, i] = padded.view(blocks, half, -1)
        return both.view(blocks * self.block, -1)

    def open(self, model: KernelModel, arena: torch.Tensor, threads: int) -> KernelEngine:
        """`arena` [blocks, kv_heads, layers, 2, block_size, head_size] in the kernels' dtype, contiguous."""
        return KernelEngine(self._library, model, arena, threads)


class KernelEngine:
    """A model in the kernels, with its scratch memory and threads. One caller at a time."""

    def __init__(self, library: ctypes.CDLL, model: KernelModel, arena: torch.Tensor, threads: int) -> None:
        """Raises MemoryError when scratch memory or threads can't be had."""
        self._library = library
        self._alive = (model, arena)
        _, kv_heads, layers, _, block_size, head_size = arena.shape
        self._layers = (_Layer * layers)(*map(_layer, model.layers))
        strides = arena.stride()
        self._model = _Model(
            layers=layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=kv_heads,
            hidden_eps=model.hidden * model.rms_eps,
            head_eps=head_size * model.rms_eps,
            kv=_Arena(
                base=arena.data_ptr(),
                block_size=block_size,
                block_stride=strides[0],
                head_stride=strides[1],
                layer_stride=strides[2],
                value_offset=strides[3],
                head_size=head_size,
            ),
            frequencies=model.frequencies.data_ptr(),
            layer=self._layers,
            head=_matrix(model.head),
        )
        self._padded_vocabulary = model.head.blocks * (
            model.head.weights.numel() // model.head.inputs // model.head.blocks
        )
        self._engine = library.forebay_open(ctypes.byref(self._model), threads)
        if not self._engine:
            raise MemoryError(f"no memory or threads for the CPU kernels ({threads} threads)")

    def forward_(self, hidden: torch.Tensor, parts: Sequence[Part]) -> None:
        """Embedded tokens, float32 [rows, hidden], to hidden states before the final norm, in place.

        The rows are those of `parts`, in order. K and V go to the arena.
        """
        # One array for all tables: its numbers stay where they are until the call returns.
        tables = np.fromiter((block for part in parts for block in part.block_table), dtype=np.int64)
        address, row = tables.ctypes.data, 0
        sequences = (_Sequence * len(parts))()
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.first, sequence.tokens, sequence.start, sequence.table = row, part.tokens, part.start, address
            row += part.tokens
            address += len(part.block_table) * tables.itemsize
        if hidden.shape[0] != row:
            raise ValueError(f"{hidden.shape[0]} rows of hidden states for {row} tokens")
        self._library.forebay_step(self._engine, hidden.data_ptr(), row, sequences, len(parts))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, padded vocabulary] of hidden states, float32 [rows, hidden], contiguous."""
        out = torch.empty(hidden.shape[0], self._padded_vocabulary)
        self._library.forebay_logits(
            self._engine, hidden.data_ptr(), hidden.shape[0], out.data_ptr(), self._padded_vocabulary
        )
        return out

    def close(self) -> None:
        """End the threads and free the scratch memory. Nothing may be called after it."""
        engine, self._engine = self._engine, None
        if engine:
            self._library.forebay_close(engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()


def load_kernels(dtype: torch.dtype, cpu_flags: frozenset[str], cache: Path) -> Kernels:
    """The kernels for this processor, compiled into `cache` on first use. Raises KernelsUnavailable."""
    name = str(dtype).removeprefix("torch.")
    if "amx_bf16" in cpu_flags and dtype == torch.bfloat16:
        raise KernelsUnavailable("torch's own products use this processor's AMX tiles, these kernels do not")
    level: Level = level_of(platform.machine(), cpu_flags)
    file, seconds = find_library(level, name, cache)
    if file.is_relative_to(cache):  # what was installed beside this code is as good as this code
        check_trusted(file)
    kernels = Kernels(file, dtype)
    how = f"compiled in {seconds:.1f} s" if seconds else "ready"
    log.info("CPU kernels for %s in %s: %s, %s", level.name, name, how, file)
    return kernels


def _layer(layer: KernelLayer) -> _Layer:
    return _Layer(
        _matrix(layer.qkv),
        _matrix(layer.out),
        _matrix(layer.gate_up),
        _matrix(layer.down),
        None if layer.q_norm is None else layer.q_norm.data_ptr(),
        None if layer.k_norm is None else layer.k_norm.data_ptr(),
    )


def _matrix(packed: PackedMatrix) -> _Matrix:
    bias = None if packed.bias is None else packed.bias.data_ptr()
    return _Matrix(packed.weights.data_ptr(), bias, packed.inputs, packed.blocks)
