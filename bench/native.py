"""The inner loops of the replay and of the law, compiled by mypyc as they are: the same answers in a third of the time.

Built once for each state of the sources, into the user's cache and never beside them: an edited file is compiled
again, never shadowed by what it was. It wants a C compiler; without one, and for every other use of these modules, the
sources run as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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
BUILD_SECONDS = 400.0
KEPT = 8
"""Builds, of as many states of the sources; the ones used last stay."""

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


class NotBuilt(RuntimeError):
    """Nothing compiled can be used: why."""


class Missing(NotBuilt):
    """What this machine lacks for building, or where it may not write."""


def built(cache: Path | None = None) -> Path:
    """The folder of the modules compiled from the sources as they are now; takes half a minute the first time.

    `cache`: where builds are kept; None: below the user's cache. Raises Missing, or NotBuilt with what went wrong.
    """
    try:
        cache = cache or _cache()
        folder = cache / _digest()
        if _complete(folder):
            with contextlib.suppress(OSError):
                os.utime(folder)
            return folder
        _check_tools()
        print("compiling the replay's inner loops (half a minute, once)", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-", ignore_cleanup_errors=True) as work:
            _build(Path(work))
            if cache / _digest() != folder:
                raise NotBuilt("sources were edited while they were compiled")
            _take(Path(work, "lib"), folder)
        _forget(cache)
    except importlib.metadata.PackageNotFoundError as error:
        raise Missing(f"{error.name} is not installed (pip install -e '.[dev]')") from error
    except OSError as error:
        raise Missing(f"{error.filename or cache}: {error.strerror or error}") from error
    return folder


def _cache() -> Path:
    try:
        home = Path.home()
    except RuntimeError as error:
        raise Missing(str(error)) from error
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "forebay" / "native"


def _compiler() -> str:
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]


def _check_tools() -> None:
    if shutil.which(_compiler()) is None:
        raise Missing(f"no C compiler: {_compiler()} is not on PATH")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise Missing(f"no headers of Python {sys.version_info.major}.{sys.version_info.minor} (python3-dev)")


def _complete(folder: Path) -> bool:
    """One that is being removed, or was half, is none."""
    return any(folder.glob("*__mypyc*")) and all(_library(folder, name).is_file() for name in MODULES)


def _library(folder: Path, module: str) -> Path:
    return folder / f"{module.replace('.', os.sep)}{SUFFIX}"


def _take(made: Path, folder: Path) -> None:
    if not _complete(made):
        raise NotBuilt("the compiler said nothing and left modules out")
    if not _complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        made.rename(folder)
    except OSError:
        # Another process was first.
        if not _complete(folder):
            raise


def _forget(cache: Path) -> None:
    """All but the builds used last. Others may do the same at the same time."""
    used: list[tuple[float, Path]] = []
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            used.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(used, reverse=True)[KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


def use(folder: Path | None) -> None:
    """From now on import MODULES from `folder`; None: as they are. Raises NotBuilt when one was imported before."""
    if folder is None:
        return
    early = sorted(MODULES & sys.modules.keys())
    if early:
        raise NotBuilt(f"{', '.join(early)} were imported before their compiled forms could be")
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
        found = PathFinder.find_spec(fullname, [str(_library(self._folder, fullname).parent)])
        if found is None:
            # Not to be found as a source instead, without a word.
            raise ImportError(f"{fullname}: its compiled form is gone from {self._folder}", name=fullname)
        return found


def _files() -> list[Path]:
    return [ROOT / folder / f"{name.replace('.', '/')}.py" for folder, names in SOURCES.items() for name in names]


def _digest() -> str:
    """Of all sources, for compiled code relies on what other modules' types were, and of what compiles them how."""
    made_by = (
        importlib.metadata.version("mypy"),
        sys.version,
        sysconfig.get_platform(),
        _compiler(),
        os.environ.get("CFLAGS", ""),
        sorted(MODULES),
        _SCRIPT,
    )
    digest = hashlib.sha256(repr(made_by).encode())
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
