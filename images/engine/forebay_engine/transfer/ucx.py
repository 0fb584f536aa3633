"""UCX beneath NIXL: the environment it is given, and what its own protocol table says it does."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_TLS = {
    "auto": None,  # all UCX can do; lists without tcp or RDMA are refused at start (no peer failure handler)
    "tcp": "tcp",
    "shared-memory": "tcp,cma",  # tcp for wire-up and for noticing a dead peer; cma moves the bytes
    "rdma": "ib",
    "nvlink": "cuda_ipc,cuda_copy,tcp",
}


class TransportUnavailable(RuntimeError):
    """The transport asked for can't work on this machine."""


def has_infiniband(sys_class: Path = Path("/sys/class/infiniband")) -> bool:
    return sys_class.is_dir() and any(sys_class.iterdir())


_CUDA_TLS = {"tcp": ",cuda_copy", "shared-memory": ",cuda_copy,cuda_ipc", "rdma": ",cuda_copy", "nvlink": ""}
"""Added where the arena is in a GPU: UCX takes its memory for a GPU's only with one of these. cuda_ipc is the way
between two GPUs of one host, so `tcp` does without it."""


def environment(transport: str, *, infiniband: bool, log_file: str, cuda: bool = False) -> dict[str, str]:
    """Variables UCX needs before NIXL is imported. What the operator set already wins over these.

    `cuda`: memory of a GPU will be registered. Raises TransportUnavailable.
    """
    if transport not in _TLS:
        raise TransportUnavailable(f"transport {transport!r} is not one of {', '.join(_TLS)}")
    if transport == "rdma" and not infiniband:
        raise TransportUnavailable(
            "transport rdma: this machine shows no RDMA device in /sys/class/infiniband; give the pod one "
            "(spec.transfer.rdma) or set spec.transfer.transport to Auto"
        )
    env = {
        "NIXL_LOG_LEVEL": "WARN",
        # Prints one table per kind of connection: the only truthful source for in_use().
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_FILE": log_file,
        "UCX_LOG_FILE_SIZE": "8m",
    }
    tls = _TLS[transport]
    if tls is not None:
        env["UCX_TLS"] = tls + (_CUDA_TLS[transport] if cuda else "")
    if not infiniband:
        # The bundled libnl-route crashes at exit when the ib module was loaded; without a device it is of no use.
        env["UCX_MODULES"] = "^ib"
        # One rail: splitting a host copy over several makes it slower (tcp 0.80 -> 1.26 GB/s at 6 MB, measured).
        env["UCX_MAX_RMA_RAILS"] = "1"
    return env


@dataclass(frozen=True, slots=True)
class Route:
    """How UCX reads one range of sizes from one kind of peer: a row of its table."""

    agent: str
    low: int
    high: float
    description: str
    config: str

    @property
    def one_sided(self) -> bool:
        """False when the peer's processor may have to answer (software emulation): such a read can't be called back."""
        return self.description.startswith("zero-copy") and self.transport in ("RDMA", "SharedMemory")

    @property
    def transport(self) -> str:
        kinds = {_kind(name) for name in re.findall(r"([a-z][a-z0-9_]*)/", self.config)}
        return next((kind for kind in _WORST_FIRST if kind in kinds), "Unknown")  # several lanes wait for the slowest


def _kind(name: str) -> str:
    if name == "tcp":
        return "TCP"
    if name in ("cma", "knem", "xpmem", "posix", "sysv", "self"):
        return "SharedMemory"
    if name.split("_")[0] in ("rc", "dc", "ud", "gga"):
        return "RDMA"
    # cuda_ipc too: UCX names it alike over NVLink and over PCIe.
    return "Unknown"


LOOK_SECONDS = 1.0
_LIBC = ctypes.CDLL(None)
_WORST_FIRST = ("Unknown", "TCP", "SharedMemory", "RDMA")
_STAMP = re.compile(r"^\[[^\]]*\]\s*\[[^\]]*\]\s*")
_HEADER = re.compile(r"(?P<agent>\S+) (?P<where>self|intra-node|inter-node)\b.* cfg#\d+")
_READ = "remote memory read by ucp_get"
_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class RouteParser:
    """Takes UCX's log line by line; in its tables a row's meaning depends on the titles above it."""

    def __init__(self) -> None:
        self._agent: str | None = None
        self._reading = False

    def feed(self, lines: Iterable[str]) -> list[Route]:
        """The rows that describe reads from other processes, in the order UCX printed them."""
        routes: list[Route] = []
        for line in lines:
            text = _STAMP.sub("", line).strip()
            if not text.startswith("|"):
                continue
            cells = [cell.strip() for cell in text.strip("|").split("|")]
            if len(cells) == 1:
                header = _HEADER.match(cells[0])
                if header:
                    self._agent = header["agent"] if header["where"] != "self" else None
                    self._reading = False
                else:
                    self._reading = self._agent is not None and cells[0].startswith(_READ)
            elif len(cells) == 3 and self._reading and self._agent is not None:
                bounds = _bounds(cells[0])
                if bounds is not None:
                    routes.append(Route(self._agent, *bounds, cells[1], cells[2]))
        return routes


def _bounds(text: str) -> tuple[int, float] | None:
    low, _, high = text.partition("..")
    first = _size(low)
    last = first if not high else _size(high)
    return None if first is None or last is None else (int(first), last)


def _size(text: str) -> float | None:
    if text == "inf":
        return float("inf")
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _SUFFIX[match[2]] if match else None


class ProtocolTable:
    """Routes of one agent, for reads of `size` bytes, read from this process's UCX log as it grows. Thread-safe."""

    def __init__(
        self, log_file: IO[bytes] | None, agent: str, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = log_file
        self._agent = agent
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._parser = RouteParser()
        self._offset = 0
        self._looked = -math.inf
        self._routes: tuple[Route, ...] = ()
        self._in_use = "Unknown"

    def routes(self) -> tuple[Route, ...]:
        """As UCX has printed them by now. Empty while no peer was read, or when its log does not go to a file of
        ours."""
        if self._file is not None:
            with self._lock:
                self._look(self._file)
        return self._routes

    def in_use(self) -> str:
        """The slowest of the transports in use, since a worker promises no better than its worst peer.

        As last looked at, LOOK_SECONDS ago at most: a look costs 0.06 ms, and every pull asks.
        """
        if self._clock() >= self._looked + LOOK_SECONDS:
            self.routes()
        return self._in_use

    def _look(self, file: IO[bytes]) -> None:
        self._looked = self._clock()
        _LIBC.fflush(None)  # UCX writes through stdio: the table just printed may still be in its buffer
        length = os.fstat(file.fileno()).st_size
        if length <= self._offset:
            return
        new = os.pread(file.fileno(), length - self._offset, self._offset)
        whole = new.rfind(b"\n") + 1  # the rest of a line that is being written comes next time
        self._offset += whole
        lines = new[:whole].decode(errors="replace").splitlines()
        self._routes += tuple(
            route
            for route in self._parser.feed(lines)
            if self._agent.startswith(route.agent) and route.low <= self._size <= route.high
        )
        kinds = {route.transport for route in self._routes}
        self._in_use = next((kind for kind in _WORST_FIRST if kind in kinds), "Unknown")
        # UCX's warnings go to this file too: hand them on, so that they are not lost.
        for line in [line for line in lines if " WARN " in line or " ERROR " in line][:20]:
            log.warning("UCX: %s", _STAMP.sub("", line).strip())


class Process:
    """What UCX reads once per process: environment and log file. One instance, `PROCESS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self.log_file: IO[bytes] | None = None
        """None while UCX was not started, or when the operator sends its log elsewhere."""

    @contextlib.contextmanager
    def starting(self, transport: str, *, cuda: bool = False) -> Iterator[None]:
        """Around the import of NIXL and the making of an agent: the environment both read, and no longer.

        A child process must not inherit it: its log would be ours. Raises TransportUnavailable.
        """
        with self._lock:
            first = self._folder is None
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="forebay-ucx-"))
            path = self._folder / "log"
            wanted = environment(transport, infiniband=has_infiniband(), log_file=str(path), cuda=cuda)
            ours = {name: value for name, value in wanted.items() if name not in os.environ}
            os.environ.update(ours)
            try:
                yield
            finally:
                for name in ours:
                    del os.environ[name]
                if first:
                    self._keep_log(path, readable={"UCX_LOG_FILE", "UCX_PROTO_INFO"} <= set(ours))

    def _keep_log(self, path: Path, *, readable: bool) -> None:
        """Hold the log by descriptor only, so that no way of dying leaves a file behind."""
        if readable:
            try:
                self.log_file = path.open("rb")
                path.unlink()
            except OSError as error:
                log.warning("UCX's log can't be read, the transport in use stays Unknown: %s", error)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


PROCESS = Process()
