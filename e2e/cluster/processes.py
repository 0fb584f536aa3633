"""Long-lived processes that outlive the command that starts them, known by files that a kill -9 leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

END_SECONDS: Final = 10.0


def start(name: str, *command: object, pids: Path, logs: Path, cwd: Path | None = None) -> int:
    """In a session of its own, with its output in `logs`. Returns the process id."""
    with (logs / f"{name}.log").open("ab") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=cwd,
        )
    (pids / name).write_text(f"{process.pid} {_start_time(process.pid)}")
    return process.pid


def pid_of(pidfile: Path) -> int | None:
    """None unless that very process runs: its start time tells it from a later one of the same number."""
    try:
        number, started = pidfile.read_text().split()
        stat = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, ValueError, IndexError):
        return None
    return int(number) if stat[19] == started and stat[0] != "Z" else None


def kill(pidfile: Path) -> None:
    """Raises TimeoutError."""
    pid = pid_of(pidfile)
    if pid is not None:
        _end(pid, lambda: pid_of(pidfile) is None)


def kill_users_of(folder: Path) -> list[int]:
    """End every process that has `folder` in its arguments, but this one and those it came from; return their ids.

    What a kill -9 of `up` left between a process's start and the writing of its file is found only so.
    """
    mark, own = f"{folder}/".encode(), set(_ancestors(os.getpid()))
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            if mark in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    for pid in found:
        _end(pid, partial(_is_gone, pid))
    return found


def children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def program(pid: int) -> str:
    """The name of its program, or "" when it is gone."""
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def _end(pid: int, gone: Callable[[], bool]) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + END_SECONDS
    while not gone():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} is still there {END_SECONDS:.0f} s after SIGKILL")
        time.sleep(0.02)


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def resident(pid: int | None) -> int:
    """KiB of memory, 0 for None or a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)
