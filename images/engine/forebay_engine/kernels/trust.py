"""Whether a library in the cache may be loaded: whoever can write it can run anything in this process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from forebay_engine.kernels.compiler import KernelsUnavailable


def check_trusted(library: Path) -> None:
    """Raises KernelsUnavailable when another user than this process's, or root, can change `library`."""
    for path, remedy in (
        (library.parent, "set FOREBAY_CACHE to a folder of your own"),
        (library, "delete it to have it made anew"),
    ):
        try:
            found = path.stat()
        except OSError as error:
            raise KernelsUnavailable(f"looking at {path} failed: {error}; {remedy}") from error
        if found.st_uid not in (0, os.geteuid()):
            raise KernelsUnavailable(
                f"{path} belongs to user {found.st_uid}, not to this process's, {os.geteuid()}, or root; {remedy}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KernelsUnavailable(
                f"other users can change {path} (mode {stat.filemode(found.st_mode)}); chmod go-w it, or {remedy}"
            )
