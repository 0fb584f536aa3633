"""A cgroup (version 1) for each node in every hierarchy: all its containers are below."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from e2e.cluster.state import Node

ROOT: Final = Path("/sys/fs/cgroup")
REMOVE_SECONDS: Final = 10.0


def version_1() -> bool:
    return (ROOT / "memory").is_dir()


def make(node: Node) -> None:
    for folder in _folders(node):
        folder.mkdir(exist_ok=True)
    # A new cpuset group starts empty, and takes no process.
    for name in ("cpuset.cpus", "cpuset.mems"):
        (ROOT / "cpuset" / node.namespace / name).write_text((ROOT / "cpuset" / name).read_text())


def remove(node: Node) -> list[Path]:
    """The kernel reaps the last tasks a moment after their end. Returns what stayed."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        for top in _folders(node):
            for path, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    continue
        left = [folder for folder in _folders(node) if folder.exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _folders(node: Node) -> list[Path]:
    return [d / node.namespace for d in sorted(ROOT.iterdir()) if d.is_dir() and not d.is_symlink()]
