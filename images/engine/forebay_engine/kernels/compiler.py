"""From the C sources in cpu/ to a shared library for this processor: found ready-made, found in the cache, or compiled.

`python -m forebay_engine.kernels.compiler` compiles all variants of this machine's architecture into the package, for
images that have no compiler (images/engine/Dockerfile).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
READY_MADE = Path(__file__).parent / "built"
COMPILE_SECONDS = 60.0
"""It takes 2 on a free core. A start that waits longer than this for a compiler goes on without."""

_ABANDONED_SECONDS = 3600.0
"""A compiler's work folder of this age belongs to a process that was killed."""

_SEAL = b"forebay-kernels:"
_DIGEST_BYTES = 16
"""A library ends in _SEAL and its own digest, which the system's loader does not look at. A file that lost its end or a
page (full disk, power cut) does not fail to load: it ends the process (SIGBUS, SIGSEGV), and so each start after it."""

_WORK_PREFIX = ".compiling-"
_OPTIONS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
_ELEMENTS = {"bfloat16": "1", "float32": "0"}


class KernelsUnavailable(Exception):
    """Why there is no library for this machine; says what would change that."""


@dataclass(frozen=True, slots=True)
class Level:
    """A processor generation to compile for. The libraries of one never run on less."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]
    """Flags of /proc/cpuinfo."""


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = {
    "x86_64": (
        Level("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
        Level("x86-64-v4", ("-march=x86-64-v4",), _AVX512),
        Level("x86-64-v3", ("-march=x86-64-v3",), _AVX2),
        Level("x86-64", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (Level("armv8-a", ("-march=armv8-a",), frozenset()),),
}
"""By machine, best first."""


def level_of(machine: str, cpu_flags: frozenset[str]) -> Level:
    """The best level that the processor has. Raises KernelsUnavailable for an unknown architecture."""
    for level in LEVELS.get(machine, ()):
        if level.needs <= cpu_flags:
            return level
    raise KernelsUnavailable(f"no kernels for machine {machine!r}; there are some for {', '.join(LEVELS)}")


def find_library(level: Level, dtype: str, cache: Path) -> tuple[Path, float]:
    """The library for `level` and `dtype` (bfloat16 or float32), and the seconds it took to compile (0: it was there).

    A damaged one counts as none and is made anew. Several processes may call it at once. Raises KernelsUnavailable when
    there is none and none can be made.
    """
    ready = READY_MADE / _file_name(level, dtype, "")
    if _intact(ready):
        return ready, 0.0
    compiler = _compiler()
    final = cache / _file_name(level, dtype, _version_of(compiler))
    if _intact(final):
        return final, 0.0
    return final, _compile(compiler, level, dtype, final)


def build_all(folder: Path, machine: str) -> list[Path]:
    """Every level and dtype of `machine`, into `folder` under the names that find_library looks for."""
    made = []
    for level in LEVELS.get(machine, ()):
        for dtype in _ELEMENTS:
            made.append(folder / _file_name(level, dtype, ""))
            _compile(_compiler(), level, dtype, made[-1])
    return made


def _file_name(level: Level, dtype: str, compiler: str) -> str:
    """What the library depends on is in its name: a change of sources, options or compiler never meets an old one."""
    digest = hashlib.blake2b(repr((_OPTIONS, level.options, compiler)).encode(), digest_size=8)
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{level.name}-{dtype}-{digest.hexdigest()}.so"


def _intact(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    made = content[: -len(_SEAL) - _DIGEST_BYTES]
    return content == made + _seal(made)


def _seal(made: bytes) -> bytes:
    return _SEAL + hashlib.blake2b(made, digest_size=_DIGEST_BYTES).digest()


def _compiler() -> list[str]:
    """$CC, else cc or gcc. The sources use GCC's vector extensions (`__builtin_shuffle`), which clang lacks."""
    try:
        own = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise KernelsUnavailable(f"CC is {os.environ['CC']!r}, which is no command: {error}") from error
    if own:
        return own
    for name in ("cc", "gcc"):
        if path := shutil.which(name):
            return [path]
    raise KernelsUnavailable("no GCC (cc or gcc) on PATH; install it, for example Debian's gcc and libc6-dev")


def _version_of(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"], 10.0)


def _compile(compiler: Sequence[str], level: Level, dtype: str, final: Path) -> float:
    started = time.monotonic()
    try:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=_WORK_PREFIX) as work:
            made = Path(work) / final.name
            element = f"-DFOREBAY_BF16={_ELEMENTS[dtype]}"
            command = [*compiler, *_OPTIONS, *level.options, element, str(SOURCES / "step.c"), "-o", str(made), "-lm"]
            _run(command, COMPILE_SECONDS)
            with made.open("r+b") as file:
                file.write(_seal(file.read()))
            made.chmod(0o755)  # whatever the umask is: trust.py
            os.replace(made, final)
    except OSError as error:
        raise KernelsUnavailable(
            f"no place for compiled kernels in {final.parent}: {error}; set FOREBAY_CACHE to a writable folder"
        ) from error
    return time.monotonic() - started


def _remove_abandoned(cache: Path) -> None:
    for work in cache.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if time.time() - work.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(work, ignore_errors=True)


def _run(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{shlex.join(command)} took over {seconds:g} s") from error
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} does not start: {error}; set CC to a C compiler") from error
    if done.returncode != 0:
        said = done.stderr.splitlines()
        lines = [line for line in said if "error" in line or "failed" in line] or said  # a linker's reasons "failed"
        raise KernelsUnavailable(f"{shlex.join(command)} failed ({done.returncode}): {'; '.join(lines[:3])}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CPU kernels of every level of this architecture.")
    parser.add_argument("--into", type=Path, default=READY_MADE, help="default: the package's own folder")
    try:
        for file in build_all(parser.parse_args().into, platform.machine()):
            sys.stdout.write(f"{file}\n")
    except KernelsUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
