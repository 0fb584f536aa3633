"""Damaged and incomplete model folders give one clear error; numbers come out as stored."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from forebay_engine.errors import ModelError  # noqa: E402
from forebay_engine.executor.arena import allocate_arena  # noqa: E402
from forebay_engine.executor.torch_executor import TorchExecutor  # noqa: E402
from forebay_engine.kv.arena import ArenaLayout  # noqa: E402
from forebay_engine.model.dtype import read_cpu_flags, resolve_dtype  # noqa: E402
from forebay_engine.model.weights import WeightFiles  # noqa: E402

pytestmark = pytest.mark.model

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


def single(folder: Path) -> Path:
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("make", [single, sharded])
def test_tensors_are_read_as_stored(tmp_path: Path, make: object) -> None:
    with WeightFiles(make(tmp_path)) as files:  # type: ignore[operator]
        assert torch.equal(files.get("a", (2, 3)), A)
        assert files.get("b", (4,)).dtype == torch.bfloat16
        assert "a" in files
        assert "c" not in files


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    """What workers share is the page cache: a tensor's memory is inside a mapping of the file."""
    with WeightFiles(single(tmp_path)) as files:
        address = files.get("a", (2, 3)).data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, _, end = line.split()[0].partition("-")
            if int(first, 16) <= address < int(end, 16):
                assert line.endswith("model.safetensors")
                return
    raise AssertionError(f"{address:#x} is in no mapping")


def test_missing_tensor(tmp_path: Path) -> None:
    with WeightFiles(single(tmp_path)) as files, pytest.raises(ModelError, match="no tensor c"):
        files.get("c", (1,))


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    with WeightFiles(single(tmp_path)) as files, pytest.raises(ModelError, match=r"a has shape \[2, 3\].*\[3, 2\]"):
        files.get("a", (3, 2))


def test_integers_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files, pytest.raises(ModelError, match=r"torch\.int64"):
        files.get("a", (3,))


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path) / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors is missing"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "name", ["../two.safetensors", "/two.safetensors", "a/../two.safetensors", "..", ".", "", "a\0"]
)
def test_a_shard_outside_of_the_folder_is_refused_unopened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"b": B}, tmp_path / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": name}}))
    with pytest.raises(ModelError, match="must be a file in the same folder"):
        WeightFiles(folder)


@pytest.mark.parametrize("keep", [0, 4, 20, -3])
def test_truncated_shard(tmp_path: Path, keep: int) -> None:
    file = sharded(tmp_path) / "two.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"two\.safetensors .*truncated or damaged"):
        WeightFiles(tmp_path)


def test_index_that_places_a_tensor_wrongly(tmp_path: Path) -> None:
    index = {"weight_map": {"b": "one.safetensors"}}
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    with WeightFiles(tmp_path) as files, pytest.raises(ModelError, match="lacks tensor b"):
        files.get("b", (4,))


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="weight_map"):
        WeightFiles(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "flags", "wanted"),
    [
        ("auto", {"avx2"}, torch.float32),
        ("auto", {"avx2", "avx512_bf16"}, torch.bfloat16),
        ("auto", {"amx_bf16"}, torch.bfloat16),
        ("auto", set(), torch.float32),
        ("float32", {"amx_bf16"}, torch.float32),
    ],
)
def test_dtype_on_a_cpu(name: str, flags: set[str], wanted: Any) -> None:
    assert resolve_dtype(name, torch.device("cpu"), frozenset(flags)) == wanted


@pytest.mark.parametrize("name", ["float16", "int8", ""])
def test_dtypes_a_cpu_does_not_run(name: str) -> None:
    with pytest.raises(ModelError, match="float32"):
        resolve_dtype(name, torch.device("cpu"), frozenset())


def test_unreadable_cpuinfo_means_no_flags(tmp_path: Path) -> None:
    assert read_cpu_flags(tmp_path / "absent") == frozenset()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n")
    assert read_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"}


def test_memory_for_no_block_is_refused(smollm2_dir: Path) -> None:
    with pytest.raises(ModelError, match="holds no block"):
        TorchExecutor(smollm2_dir, kv_memory_bytes=100_000, dtype="float32")


LAYOUT = ArenaLayout(layers=4, kv_heads=2, head_size=64, block_size=16, dtype="float32", itemsize=4)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_arena_is_page_aligned_and_takes_no_memory_untouched() -> None:
    blocks = LAYOUT.blocks_in(2 << 30)
    before = resident_bytes()
    arena = allocate_arena(LAYOUT, blocks, torch.float32, torch.device("cpu"))
    assert arena.data_ptr() % resource.getpagesize() == 0
    assert arena.shape == (blocks, *LAYOUT.shape)
    assert arena.is_contiguous()
    arena[-1] += 1.0
    assert float(arena[-1].min()) == float(arena[-1].max()) == 1.0
    assert float(arena[0].abs().max()) == 0.0
    assert resident_bytes() - before < 64 << 20


def test_an_arena_beyond_all_memory_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no memory for a KV arena .* less KV memory"):
        allocate_arena(LAYOUT, LAYOUT.blocks_in(1 << 60), torch.float32, torch.device("cpu"))
