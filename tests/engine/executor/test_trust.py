"""A cached library that somebody else may have written is not loaded."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forebay_engine.kernels import trust  # noqa: E402
from forebay_engine.kernels.compiler import LEVELS, KernelsUnavailable, find_library  # noqa: E402
from forebay_engine.kernels.library import load_kernels  # noqa: E402
from forebay_engine.kernels.trust import check_trusted  # noqa: E402


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    file = folder / "x.so"
    file.touch(0o644)
    return file


def test_one_s_own_is_trusted(library: Path) -> None:
    check_trusted(library)
    library.parent.chmod(0o755)
    check_trusted(library)


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o757, 0o1777])
def test_a_folder_that_others_write(library: Path, mode: int) -> None:
    library.parent.chmod(mode)
    with pytest.raises(KernelsUnavailable, match="FOREBAY_CACHE"):
        check_trusted(library)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_write(library: Path, mode: int) -> None:
    library.chmod(mode)
    with pytest.raises(KernelsUnavailable, match=r"x\.so.*delete it"):
        check_trusted(library)


@pytest.mark.parametrize("whose", ["folder", "file"])
def test_another_user_s(library: Path, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(library if whose == "file" else library.parent, 4242, -1)
    else:
        monkeypatch.setattr(trust.os, "geteuid", lambda: 4242)
    with pytest.raises(KernelsUnavailable, match="belongs to user"):
        check_trusted(library)


def test_what_is_compiled_here_is_trusted_under_any_umask_and_only_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cc = tmp_path / "cc"
    cc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done; echo made > "$2"\n')
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    umask = os.umask(0)
    try:
        check_trusted(find_library(LEVELS[platform.machine()][-1], "float32", tmp_path / "kernels")[0])
    finally:
        os.umask(umask)
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="other users can change"):
        load_kernels(torch.float32, frozenset(), tmp_path / "kernels")
