"""Where a library comes from, and what happens where none can be had."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forebay_engine.executor import forward  # noqa: E402
from forebay_engine.executor.torch_executor import TorchExecutor  # noqa: E402
from forebay_engine.kernels import compiler  # noqa: E402
from forebay_engine.kernels.compiler import LEVELS, KernelsUnavailable, find_library, level_of  # noqa: E402
from forebay_engine.kernels.library import Kernels, load_kernels  # noqa: E402
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep  # noqa: E402

PLAIN = LEVELS["x86_64"][-1]
AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (frozenset(), "x86-64"),
        (AVX2, "x86-64-v3"),
        (AVX2 - {"fma"}, "x86-64"),
        (AVX512, "x86-64-v4"),
        (AVX512 - {"avx512vl"}, "x86-64-v3"),
        (AVX512 | {"avx512_bf16"}, "x86-64-v4-bf16"),
        (AVX2 | {"avx512_bf16"}, "x86-64-v3"),
    ],
)
def test_the_best_level_that_the_processor_has(flags: frozenset[str], name: str) -> None:
    assert level_of("x86_64", flags).name == name


def test_an_unknown_machine_has_none() -> None:
    with pytest.raises(KernelsUnavailable, match="riscv64"):
        level_of("riscv64", frozenset())


def fake_compiler(folder: Path, script: str) -> Path:
    file = folder / "fake-cc"
    file.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "fake 1" && exit 0\n{script}\n')
    file.chmod(0o755)
    return file


COPY = 'while [ "$1" != -o ]; do shift; done; echo made >> "$2"; echo run >> "$(dirname "$0")/runs"'


def test_compiled_once_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, COPY)))
    first, took = find_library(PLAIN, "float32", tmp_path / "cache")
    again, none = find_library(PLAIN, "float32", tmp_path / "cache")
    assert first == again
    assert took > 0 == none
    assert (tmp_path / "runs").read_text() == "run\n"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [first.name], "nothing but the library is left"
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_sources_options_compiler_and_dtype_are_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = fake_compiler(tmp_path, COPY)
    monkeypatch.setenv("CC", str(cc))
    names = {find_library(level, dtype, tmp_path)[0].name for level in LEVELS["x86_64"] for dtype in DTYPE_NAMES}
    cc.write_text(cc.read_text().replace("fake 1", "fake 2"))
    names.add(find_library(PLAIN, "float32", tmp_path)[0].name)
    sources = shutil.copytree(compiler.SOURCES, tmp_path / "cpu")
    (sources / "matmul.h").write_text((sources / "matmul.h").read_text() + "\n")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    names.add(find_library(PLAIN, "float32", tmp_path)[0].name)
    assert len(names) == len(LEVELS["x86_64"]) * 2 + 2


DTYPE_NAMES = ("float32", "bfloat16")


def test_several_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, COPY)))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_library(PLAIN, "float32", tmp_path / "cache")[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(found)) == 1
    assert len(found) == 4
    assert found[0].read_bytes().startswith(b"made\nforebay"), "each wrote a file of its own; the last took the name"
    assert find_library(PLAIN, "float32", tmp_path / "cache") == (found[0], 0.0)


@pytest.mark.parametrize("name", ["cache", "built"])
@pytest.mark.parametrize("damage", ["empty", "half", "last byte missing", "a page of zeros", "more at the end"])
def test_a_damaged_library_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, name: str
) -> None:
    """Loading one would end the process by SIGBUS or SIGSEGV, at every start."""
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, f"{COPY}; head -c 9000 /dev/urandom >> $2")))
    monkeypatch.setattr(compiler, "READY_MADE", tmp_path / "built")
    compiler.build_all(tmp_path / "built", "x86_64")
    if name == "cache":
        shutil.rmtree(tmp_path / "built")
    file, _ = find_library(PLAIN, "float32", tmp_path / "cache")
    assert file.parent.name == name
    good = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "half": good[: len(good) // 2],
            "last byte missing": good[:-1],
            "a page of zeros": good[:4096] + bytes(4096) + good[8192:],
            "more at the end": good + b"x",
        }[damage]
    )
    anew, took = find_library(PLAIN, "float32", tmp_path / "cache")
    assert anew.parent.name == "cache"
    assert took > 0
    assert find_library(PLAIN, "float32", tmp_path / "cache") == (anew, 0.0)


def test_work_folders_of_killed_processes_go_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, COPY)))
    old, young = tmp_path / "cache" / ".compiling-old", tmp_path / "cache" / ".compiling-young"
    for work in (old, young):
        work.mkdir(parents=True)
    (old / "part.so").write_text("half")
    os.utime(old, (0, 0))
    find_library(PLAIN, "float32", tmp_path / "cache")
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'step.c:1: error: no such thing' >&2; exit 3", ["failed (3)", "no such thing"]),
        ("printf 'error: kein Platz f\\374r mehr' >&2; exit 1", ["failed (1)", "kein Platz"]),
        ("echo 'ld: link failed: No space left\nld error: 1' >&2; exit 1", ["failed (1)", "No space left"]),
        ("exec sleep 60", ["took over 0.2 s"]),
    ],
)
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: list[str]) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.2)
    with pytest.raises(KernelsUnavailable) as failed:
        find_library(PLAIN, "float32", tmp_path / "cache")
    assert all(word in str(failed.value) for word in words)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("own", ["cc 'x", "/"])
def test_cc_that_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setenv("CC", own)
    with pytest.raises(KernelsUnavailable, match="CC"):
        find_library(PLAIN, "float32", tmp_path / "cache")


def test_a_user_without_a_home_computes_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FOREBAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(KernelsUnavailable, match="set FOREBAY_CACHE"):
        forward._kernel_cache()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="no GCC"):
        find_library(PLAIN, "float32", tmp_path / "cache")


def test_a_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, COPY)))
    (tmp_path / "cache").write_text("")
    with pytest.raises(KernelsUnavailable, match="FOREBAY_CACHE"):
        find_library(PLAIN, "float32", tmp_path / "cache")


def test_ready_made_libraries_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, COPY)))
    made = compiler.build_all(tmp_path / "built", "x86_64")
    assert len(made) == len(LEVELS["x86_64"]) * 2
    monkeypatch.setattr(compiler, "READY_MADE", tmp_path / "built")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    file, took = find_library(PLAIN, "bfloat16", tmp_path / "cache")
    assert file in made
    assert took == 0


def test_a_damaged_library_names_the_file(tmp_path: Path) -> None:
    damaged = tmp_path / "x.so"
    damaged.write_text("no library")
    with pytest.raises(KernelsUnavailable, match=r"x\.so.*delete it"):
        Kernels(damaged, torch.float32)


def test_amx_is_left_to_torch(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="AMX"):
        load_kernels(torch.bfloat16, AVX512 | {"avx512_bf16", "amx_bf16"}, tmp_path)


def test_without_kernels_a_worker_computes_by_torch_and_says_so(
    small_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def token(executor: TorchExecutor) -> int | None:
        params = SampleSpec(SamplingParams(temperature=0.0), [1, 2, 3], [])
        return executor.execute([SequenceStep("a", [1, 2, 3], 0, [0], params)])[0].token_id

    native = TorchExecutor(small_dir, kv_memory_bytes=8 << 20, dtype="float32")
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setattr(forward, "default_cache_dir", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        fallback = TorchExecutor(small_dir, kv_memory_bytes=8 << 20, dtype="float32")
    (record,) = [r for r in caplog.records if "CPU kernels" in r.message]
    assert "set CC to a C compiler" in record.message
    assert token(fallback) == token(native)
