"""The inner loops of the replay and of the law, compiled by mypyc as they are: the same answers in a third of the time.

Built once for each state of the sources, into the user's cache and never beside them: an edited file is compiled
again, never shadowed by what it was. It wants a C compiler; without one, and for every other use of these modules, the
sources run as they are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "operator": (
        "forebay_operator.decide.fluid",
        "forebay_operator.replay.cluster",
        "forebay_operator.replay.fast",
        "forebay_operator.replay.fleet",
        "forebay_operator.replay.job",
        "forebay_operator.replay.routing",
        "forebay_operator.replay.stretch",
        "forebay_operator.replay.worker",
    ),
    "images/router": ("forebay_router.choice", "forebay_router.gear"),
}
"""Folder -> its modules, in a replay's profile the ones that cost most. Not those whose classes are msgspec's: mypyc
drops what a class statement tells its metaclass."""

MODULES = frozenset(name for names in SOURCES.values() for name in names)
BUILD_SECONDS = 600.0
KEPT_SECONDS = 7 * 86400.0
"""How long a build that nobody uses any more stays."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "native"


class NotBuilt(RuntimeError):
    """What is missing, or the last lines that the compiler said."""


def built(cache: Path = CACHE) -> Path:
    """The folder of the modules compiled from the sources as they are now; takes half a minute the first time.

    Raises NotBuilt.
    """
    folder = cache / _digest()
    if folder.is_dir():
        folder.touch()
        return folder
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise NotBuilt(f"no C compiler: {compiler} is not on PATH")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise NotBuilt(f"no headers of Python {sys.version_info.major}.{sys.version_info.minor} (python3-dev)")
    print("compiling the replay's inner loops (half a minute, once)", file=sys.stderr, flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
        _build(Path(work))
        try:
            Path(work, "lib").rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
    for other in cache.iterdir():
        if time.time() - other.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def use(folder: Path | None) -> None:
    """From now on import MODULES from `folder`; None: as they are. Before any of them is imported."""
    if folder is None:
        return
    early = sorted(MODULES & sys.modules.keys())
    if early:
        raise RuntimeError(f"{', '.join(early)} were imported before their compiled forms could be")
    # The code that they share lies beside the packages.
    sys.path.append(str(folder))
    sys.meta_path.insert(0, _Compiled(folder))


class _Compiled(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        package = fullname.rpartition(".")[0].replace(".", os.sep)
        return PathFinder.find_spec(fullname, [str(self._folder / package)])


def _files() -> list[Path]:
    return [ROOT / folder / f"{name.replace('.', '/')}.py" for folder, names in SOURCES.items() for name in names]


def _digest() -> str:
    """Of all sources, for compiled code relies on what other modules' types were, and of what compiles them."""
    digest = hashlib.sha256(f"{importlib.metadata.version('mypy')} {sys.version} {sorted(MODULES)}".encode())
    for folder in ("operator", "images"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:24]


_SCRIPT = """
import sys
from mypyc.build import mypycify
from setuptools import setup
work, *files = sys.argv[1:]
setup(
    name="native",
    packages=[],
    ext_modules=mypycify(["--config-file", "pyproject.toml", *files], target_dir=work + "/c"),
    script_args=["build_ext", "--build-lib", work + "/lib", "--build-temp", work + "/temp"],
)
"""


def _build(work: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(work), *(str(file.relative_to(ROOT)) for file in _files())]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"not compiled within {error.timeout:g} s") from error
    if done.returncode:
        raise NotBuilt("mypyc failed: " + " / ".join((done.stdout + done.stderr).strip().splitlines()[-4:]))
