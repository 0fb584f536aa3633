"""Compiled inner loops: they are found, they say what they say interpreted, and edits are never shadowed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import native

from forebay_operator.replay.fast import FastWorker

ROWS = """
    import json, pathlib, sys
    from bench import native

    native.use(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    from bench.rescale.cases import Case
    from bench.rescale.play import play
    import forebay_operator.replay.fast

    rows = []
    for gear, on, policy in (
        ("role", True, "forebay"),
        ("replica-30", False, "demand"),
        ("role", False, "fixed:1:7"),
        ("role", False, "oracle"),
    ):
        (row,) = play([Case("mix", "heavy", gear, on, policy, 0, scale=0.03)])
        rows.append({name: value for name, value in row.items() if name not in ("cpu_s", "decide_ms")})
    print(json.dumps([forebay_operator.replay.fast.__file__, rows]))
"""


def rows_of(*words: str) -> tuple[str, list[dict[str, object]]]:
    command = [sys.executable, "-c", textwrap.dedent(ROWS), *words]
    done = subprocess.run(command, cwd=native.ROOT, capture_output=True, text=True, check=True, timeout=300)
    file, rows = json.loads(done.stdout)
    return file, rows


@pytest.mark.timeout(600)
def test_compiled_loops_give_the_same_rows() -> None:
    try:
        folder = native.built()
    except native.Missing as missing:
        pytest.skip(f"the replay's loops cannot be compiled here: {missing}")
    compiled, fast = rows_of(str(folder))
    interpreted, slow = rows_of()
    assert Path(compiled).is_relative_to(folder)
    assert Path(interpreted).suffix == ".py"
    assert fast == slow
    assert len({row["attainment"] for row in fast}) > 1


def test_what_was_imported_before_is_told() -> None:
    assert FastWorker.__module__ in native.MODULES
    with pytest.raises(native.NotBuilt, match=r"forebay_operator\.replay\.fast.* were imported before"):
        native.use(Path("anywhere"))


def test_an_edited_source_and_other_flags_are_other_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in native.SOURCES:
        (tmp_path / folder).mkdir(parents=True)
    file = tmp_path / "operator" / "one.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(native, "ROOT", tmp_path)
    seen = {native._digest()}
    file.write_text("a = 2\n")
    seen.add(native._digest())
    monkeypatch.setenv("CFLAGS", "-O3")
    seen.add(native._digest())
    assert len(seen) == 3


def _no_compiler(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)


def _no_mypy(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise native.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(native.importlib.metadata, "version", absent)


def _no_folder(cache: Path, _: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the cache should be")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_no_compiler, r"no C compiler: .* is not on PATH"),
        (_no_mypy, r"mypy is not installed \(pip install"),
        (_no_folder, r"cache.*: (File exists|Not a directory)"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, pytest.MonkeyPatch], None], says: str
) -> None:
    spoil(tmp_path / "cache", monkeypatch)
    with pytest.raises(native.Missing, match=says):
        native.built(tmp_path / "cache")


def _made(work: Path) -> None:
    for name in native.MODULES:
        file = native._library(work / "lib", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (work / "lib" / "abc__mypyc.so").touch()


def test_half_a_build_is_built_again_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_build", _made)
    for number in range(native.KEPT + 3):
        (tmp_path / f"old-{number}").mkdir()
        os.utime(tmp_path / f"old-{number}", (number, number))
    folder = native.built(tmp_path)
    assert native.built(tmp_path) == folder
    assert len(list(tmp_path.iterdir())) == native.KEPT
    lost = native._library(folder, "forebay_operator.replay.fast")
    lost.unlink()
    with pytest.raises(ImportError, match="compiled form is gone"):
        native._Compiled(folder).find_spec("forebay_operator.replay.fast", None)
    assert native.built(tmp_path) == folder
    assert lost.is_file()


def test_sources_that_are_edited_meanwhile_are_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_build", _made)
    states = itertools.count()
    monkeypatch.setattr(native, "_digest", lambda: f"state-{next(states)}")
    with pytest.raises(native.NotBuilt, match="edited while they were compiled"):
        native.built(tmp_path)
    assert list(tmp_path.iterdir()) == []
