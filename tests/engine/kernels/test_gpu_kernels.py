"""The Triton kernels in Triton's interpreter against plain torch in float32."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="comes with torch's Linux build; pip install triton")

from engine.kernels.paged import Paged, normal  # noqa: E402
from engine.kernels.references import assert_near, rms_norm, rotate  # noqa: E402
from forebay_engine.kernels.gpu.activation import silu_mul  # noqa: E402
from forebay_engine.kernels.gpu.attention import chunk_tiling  # noqa: E402
from forebay_engine.kernels.gpu.launch import INTERPRETED  # noqa: E402
from forebay_engine.kernels.gpu.norm import add_rms_norm  # noqa: E402
from forebay_engine.kernels.gpu.rotary import rotate_and_store  # noqa: E402

NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPAN = 64
"""Keys of one program in decode, small here: the interpreter goes over them one by one."""


def test_kernels_run_in_the_interpreter_here() -> None:
    assert INTERPRETED, "TRITON_INTERPRET must be set before Triton is imported: tests/conftest.py"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 63), (2, 64), (3, 65), (2, 576)])
def test_norm_adds_and_normalises(rows: int, size: int, dtype: Any) -> None:
    x, delta, weight = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, size)] * 2 + [(size,)]))
    summed = x + delta
    alone = add_rms_norm(summed.clone(), None, weight, 1e-5)
    kept = x.clone()
    found = add_rms_norm(kept, delta, weight, 1e-5)
    if dtype != torch.bfloat16:  # the interpreter cuts bfloat16 off where hardware rounds
        assert torch.equal(kept, summed)
        assert torch.equal(found, alone)
    assert_near(kept, summed, NEAR[dtype])
    assert_near(found, rms_norm(summed, weight, 1e-5), NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 100), (3, 1025)])
def test_silu_times_up(rows: int, size: int, dtype: Any) -> None:
    both = normal(rows, 2 * size, dtype=dtype) * 4
    gate, up = both.float().chunk(2, -1)
    assert_near(silu_mul(both), gate * gate.sigmoid() * up, NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (3, 1, 24), (9, 3, 64), (4, 2, 128)])
def test_rotation_writes_k_and_v_where_they_belong_and_nothing_else(
    heads: int, kv_heads: int, size: int, normed: bool, dtype: Any
) -> None:
    rows, layers, layer, block = 4, 3, 1, 16
    qkv = normal(rows, heads + 2 * kv_heads, size, dtype=dtype)
    angles = torch.arange(rows)[:, None] * normal(size // 2).abs()
    norms = (normal(size, dtype=dtype, seed=3), normal(size, dtype=dtype, seed=4)) if normed else None
    arena = torch.full((5, kv_heads, layers, 2, block, size), float("nan"), dtype=dtype)
    slots = [3 * block + 15, 4 * block, -1, 0]  # a block's end, the next one's begin, padding
    before = qkv.clone()
    rotate_and_store(
        qkv, angles.cos(), angles.sin(), torch.tensor(slots, dtype=torch.int32), arena, layer, heads, norms, 1e-6
    )
    q, k, v = before.split((heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    assert_near(qkv[:, :heads], rotate(q, angles.cos(), angles.sin()), NEAR[dtype])
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    kept = [row for row in range(rows) if slots[row] >= 0]
    stored = torch.stack([arena[slots[row] // block, :, layer, :, slots[row] % block] for row in kept])
    assert_near(stored[:, :, 0], rotate(k, angles.cos(), angles.sin())[kept], NEAR[dtype])
    assert torch.equal(stored[:, :, 1], v[kept])
    for row in kept:
        arena[slots[row] // block, :, layer, :, slots[row] % block] = float("nan")
    assert bool(arena.isnan().all())


SHAPES = [(1, 1, 64), (9, 3, 64), (8, 1, 128), (4, 4, 24)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [16, 1, 7])
def test_decode_attends_to_ragged_lengths(shape: tuple[int, int, int], block: int) -> None:
    paged = Paged(shape, block, [(n, 1) for n in (0, 14, 15, 16, 31, 32, 65)], torch.float32)
    assert_near(paged.found(), paged.wanted(), NEAR[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_joins_spans(dtype: Any) -> None:
    lengths = [0, 5, SPAN - 2, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN, 3 * SPAN + 20]
    paged = Paged((6, 2, 64), 16, [(n, 1) for n in lengths], dtype)
    assert_near(paged.found(SPAN), paged.wanted(), NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_else_is_in_the_batch_changes_no_bit_of_attention(dtype: Any) -> None:
    lengths = [3, SPAN - 1, SPAN + 40]
    together = Paged((6, 2, 64), 16, [(n, 1) for n in lengths], dtype)
    alone = Paged((6, 2, 64), 16, [(n, 1) for n in lengths[:2]], dtype)
    assert torch.equal(together.found(SPAN)[:2], alone.found(SPAN))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_attend_up_to_their_own_position(shape: tuple[int, int, int]) -> None:
    sequences = [(0, 2), (15, 2), (16, 17), (1, 31), (0, 65)]
    paged = Paged(shape, 16, sequences, torch.float32)
    assert_near(paged.found(), paged.wanted(), NEAR[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [16, 5])
def test_chunks_and_decodes_in_one_step(block: int, dtype: Any) -> None:
    tile = chunk_tiling(3, 64, 2).queries
    sequences = [(40, 1), (0, tile - 1), (64, 1), (3, tile), (63, tile + 1), (0, 2)]
    paged = Paged((6, 2, 64), block, sequences, dtype)
    assert_near(paged.found(), paged.wanted(), NEAR[dtype])
