"""The state folder of one `forebay up`: lock, token, workers file, control socket, logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import psutil

from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.logs import open_log
from forebay_wire.discovery import WorkersFile

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_VOLATILE = ("control.sock", "token", "workers.json", "processes.json")
_Pid = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
_LEFTOVER_SECONDS = 5.0
_LEFTOVER_POLL_SECONDS = 0.05


def state_root() -> Path:
    """$XDG_STATE_HOME/forebay, else ~/.local/state/forebay."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "forebay"


class StateFolder:
    def __init__(self, name: str, root: Path | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} is no name; use at most 63 lower-case letters, digits and '-', a letter first")
        self.name = name
        self.path = (root or state_root()) / name
        self.logs = self.path / "logs"
        self.token_file = self.path / "token"
        self.workers_file = self.path / "workers.json"
        self.up_log = self.logs / "up.log"
        self._processes = self.path / "processes.json"
        self._lock: int | None = None

    def create(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.path, self.logs):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise LocalError(f"cannot make the state folder {self.path}: {error}; set XDG_STATE_HOME") from error

    def acquire(self) -> None:
        """Make this process the one `up` of this name, until it ends however it ends. Raises LocalError when there is
        another. Then clear what an earlier one left."""
        self.create()
        # Never handed to a child (close-on-exec), so the lock is gone exactly when this process is.
        with self._told("open its lock"):
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:
                # Another `up` of this name discarded the folder since we opened the file.
                raise BlockingIOError(errno.EAGAIN, "discarded")
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise LocalError(f"cannot lock {self.path / 'lock'}: {error}") from error
            raise LocalError(
                f"{self.name} is already up (process {holder or 'unknown'}); "
                f"end it with `forebay down --name {self.name}` or choose another --name"
            ) from None
        self._lock = lock
        # Who holds it is told to people only: a full disk ends nothing here.
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._end_leftovers()
        self.clear()

    def running(self) -> bool:
        """True while some process holds the lock."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def clear(self) -> None:
        """Remove all but the logs. Raises LocalError."""
        with self._told("remove what an earlier `forebay up` left"):
            for name in _VOLATILE:
                (self.path / name).unlink(missing_ok=True)

    def release(self) -> None:
        with contextlib.suppress(LocalError):
            self.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the folder of an `up` that never ran, unless it holds something: logs of workers, say. Call it before
        `release`, or when nobody holds the lock."""
        try:
            lock = self._lock if self._lock is not None else os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            with contextlib.suppress(OSError):
                if lock != self._lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if set(os.listdir(self.path)) <= {"lock", "logs", *_VOLATILE} and not os.listdir(self.logs):
                    self.clear()
                    (self.path / "lock").unlink()
                    self.logs.rmdir()
                    self.path.rmdir()
        except LocalError:
            pass  # it stays, as it would have without this
        finally:
            if lock != self._lock:
                os.close(lock)

    def make_token(self) -> str:
        """The secret between router and workers, one per `up`."""
        token = secrets.token_hex(32)
        self.write("token", token.encode())
        return token

    def write(self, name: str, content: bytes) -> None:
        """Replace a file whole: a reader sees the old content or the new. Mode 0600. Raises LocalError, the old content
        in place."""
        temporary = self.path / f".{name}.tmp"
        with self._told(f"write {name}"):
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.path / name)

    def start_up_log(self) -> BinaryIO:
        """An empty log of a detached `up`. Raises LocalError."""
        with self._told("write the log"):
            self.up_log.unlink(missing_ok=True)
            return open_log(self.up_log)

    def up_log_error(self) -> str:
        """What an `up` that failed said last, without `error: `. Empty where it said no such thing."""
        said = self.up_log_tail(1)
        return said.removeprefix("error: ") if said.startswith("error: ") else ""

    def up_log_tail(self, lines: int = 5) -> str:
        """Its last lines; says so where it can't be read."""
        try:
            return "\n".join(self.up_log.read_text(errors="replace").strip().splitlines()[-lines:])
        except OSError as error:
            return f"(its log {self.up_log} can't be read: {error.strerror})"

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LocalError(
                f"cannot {what} in the state folder {self.path}: {error.strerror}; mend that or set XDG_STATE_HOME"
            ) from error

    def write_workers(self, workers: WorkersFile) -> None:
        self.write("workers.json", msgspec.json.format(msgspec.json.encode(workers)))

    def record_processes(self, processes: Mapping[int, float]) -> None:
        """Process ids and their start times: what a next `up` looks for when this one is killed."""
        self.write("processes.json", json.dumps({str(pid): started for pid, started in processes.items()}).encode())

    def _end_leftovers(self) -> None:
        """Children die with their supervisor, but not before its lock is free: wait for them, their ports are ours."""
        try:
            recorded = msgspec.json.decode(self._processes.read_bytes(), type=dict[_Pid, float])
        except (OSError, msgspec.DecodeError):
            return
        alive: list[psutil.Process] = []
        for pid, started in recorded.items():
            try:
                process = psutil.Process(pid)
                # A number may belong to another process by now; the start time tells.
                if process.create_time() == started:
                    alive += [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
        alive = _wait_gone(alive)
        for process in alive:
            process.kill()
        alive = _wait_gone(alive)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            raise LocalError(f"processes {pids} of an earlier `forebay up` of {self.name} do not end; end them first")


def _wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those still there after 5 s. A zombie is gone: it holds no port, and its new parent reaps it when it likes."""
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while True:
        processes = [process for process in processes if is_alive(process)]
        if not processes or time.monotonic() >= deadline:
            return processes
        time.sleep(_LEFTOVER_POLL_SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie, and when the number belongs to another process by now."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_pid_alive(pid: int) -> bool:
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def running_names(root: Path | None = None) -> list[str]:
    """Names of the `up`s that run now."""
    base = root or state_root()
    try:
        names = sorted(entry.name for entry in base.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    return [name for name in names if StateFolder(name, base).running()]


def choose_running(name: str | None) -> StateFolder:
    """The `up` named, or the only one there is. Raises InputError or LocalError with what runs."""
    names = running_names()
    if name is not None:
        folder = StateFolder(name)
        if name not in names:
            raise LocalError(f"nothing named {name} is up" + (f"; up: {', '.join(names)}" if names else ""))
        return folder
    if not names:
        raise LocalError("nothing is up; start with `forebay up FILE`")
    if len(names) > 1:
        raise InputError(f"several are up: {', '.join(names)}; say which with --name")
    return StateFolder(names[0])
