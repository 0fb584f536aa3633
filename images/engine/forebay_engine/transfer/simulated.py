"""The twin of NIXL for simulated workers: real sockets, real one-sided semantics, 16 bytes a block.

A block's content is its tag. The owner's server thread serves whatever tag lies in the block now, asking nobody, so a
block that was refilled meanwhile reads as success with another request's content, as RDMA does it. Only time and volume
are faked: a read lasts as long as the performance model says the real bytes would take.

Wire format, little-endian: request `magic u32, count u32, count x block u32`; answer `status u32, count x 16 bytes`
(status 0), or `status u32` alone. A lease word: request `magic u32, place u32`, answer `status u32, 8 bytes`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay_engine.kv.lease_words import COUNT, WORD_BYTES, LeaseMark, LeaseWords
from forebay_engine.transfer.base import TransferError, check_blocks
from forebay_wire.messages import Handshake
from forebay_wire.ports import TRANSFER_FIRST, TRANSFER_LAST
from forebay_wire.urls import host_port, split_host_port

log = logging.getLogger(__name__)

TAG_BYTES = 16
PIECE_BLOCKS = 64
"""Blocks read at one moment: a long read sees its blocks at different times, as a real one does."""

MAX_CONNECTIONS = 256
MAX_BLOCKS_PER_REQUEST = 4096
IDLE_SECONDS = 300.0
_MAGIC = 0x46424B56
_WORD_MAGIC = 0x46424B57
_HEAD = struct.Struct("<II")
_STATUS = struct.Struct("<I")
_OK, _REFUSED = 0, 1
PORTS = range(TRANSFER_FIRST, TRANSFER_LAST + 1)


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    used: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


def listener(host: str, ports: range = PORTS) -> socket.socket:
    """On a random free port of those that NetworkPolicies open. Raises OSError when none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(ports, len(ports)):
        try:
            return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"serving the simulated KV cache: none of the ports {ports.start} to {ports.stop - 1} of {host} is free; "
        "end some of the workers there",
    )


class TagServer:
    """Serves one arena's tags from one thread; bounded in connections, in what each may ask, and in idle time."""

    def __init__(
        self, host: str, num_blocks: int, read_tags: Callable[[Sequence[int]], bytes], words: LeaseWords | None
    ) -> None:
        self._num_blocks = num_blocks
        self._read_tags = read_tags
        self._words = words
        self._listener = listener(host)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._clients: set[_Client] = set()
        self._thread = threading.Thread(target=self._run, name="forebay-tags", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(timeout=IDLE_SECONDS / 10):
                    if key.fileobj is self._wake_out:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                now = time.monotonic()
                for client in [c for c in self._clients if now - c.used > IDLE_SECONDS]:
                    self._drop(client)
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            for sock in (self._listener, self._wake_in, self._wake_out):
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._clients) >= MAX_CONNECTIONS:
                sock.close()
                log.warning("refused a reader: %d are connected, the limit", MAX_CONNECTIONS)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _Client(sock, time.monotonic())
            self._clients.add(client)
            self._selector.register(sock, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    def _serve(self, client: _Client, events: int) -> None:
        client.used = time.monotonic()
        try:
            if events & selectors.EVENT_READ:
                data = client.sock.recv(1 << 16)
                if not data:
                    self._drop(client)
                    return
                client.received += data
                if not self._answer(client):
                    self._drop(client)
                    return
            if client.unsent:
                del client.unsent[: client.sock.send(client.unsent)]
            # While an answer is unsent nothing more is read: a reader that does not read can't fill our memory.
            self._selector.modify(client.sock, selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ, client)
        except BlockingIOError:
            self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        except OSError:
            self._drop(client)

    def _answer(self, client: _Client) -> bool:
        """Answers every whole request received; False on one that breaks the format."""
        while len(client.received) >= _HEAD.size:
            magic, count = _HEAD.unpack_from(client.received)
            if magic == _WORD_MAGIC:
                del client.received[: _HEAD.size]
                known = self._words is not None and count < COUNT
                client.unsent += _STATUS.pack(_OK if known else _REFUSED)
                if self._words is not None and known:
                    client.unsent += self._words.read(count)
                continue
            if magic != _MAGIC or count > MAX_BLOCKS_PER_REQUEST:
                return False
            end = _HEAD.size + 4 * count
            if len(client.received) < end:
                return True
            blocks = struct.unpack_from(f"<{count}I", client.received, _HEAD.size)
            del client.received[:end]
            if all(block < self._num_blocks for block in blocks):
                client.unsent += _STATUS.pack(_OK) + self._read_tags(blocks)
            else:
                client.unsent += _STATUS.pack(_REFUSED)
        return True


@dataclass(eq=False, slots=True)
class _Peer:
    host: str
    port: int
    num_blocks: int
    num_words: int
    idle: list[socket.socket] = field(default_factory=list)
    """Connections between two reads; one read has one for itself."""


class SimulatedTransport:
    """transfer/base.py: Transport. Thread-safe."""

    needs_progress = False

    def __init__(
        self,
        *,
        host: str,
        block_bytes: int,
        num_blocks: int,
        read_tags: Callable[[Sequence[int]], bytes],
        write_tags: Callable[[Sequence[int], bytes], None],
        transfer_seconds: Callable[[int], float],
        words: LeaseWords | None = None,
        connect_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host` is the address peers reach this process at. `transfer_seconds(bytes)`: how long the real read of that
        many bytes takes. `read_tags(blocks)` and `write_tags(blocks, tags)` move 16 bytes a block, in order, and are
        called from other threads than the step thread. `words` is served to readers of our leases."""
        self._host = host
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._write_tags = write_tags
        self._transfer_seconds = transfer_seconds
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._server = TagServer(host, num_blocks, read_tags, words)
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def agent(self) -> bytes:
        return host_port(self._host, self._server.port).encode()

    def knows(self, engine_id: str) -> bool:
        return engine_id in self._peers

    def in_use(self) -> str:
        return "Simulated"

    def progress(self) -> None:
        pass

    def add_peer(self, handshake: Handshake) -> None:
        if handshake.block_bytes != self._block_bytes or handshake.num_blocks <= 0:
            raise TransferError(
                f"engine {handshake.engine_id} has {handshake.num_blocks} blocks of {handshake.block_bytes} bytes; "
                f"this one's have {self._block_bytes}: only equal blocks can be read",
                reason="refused",
            )
        try:
            host, port = split_host_port(handshake.agent.decode("ascii", "replace"))
        except ValueError as error:
            raise TransferError(
                f"engine {handshake.engine_id} does not speak the simulated transport; both sides must use the same",
                reason="refused",
            ) from error
        with self._lock:
            if handshake.engine_id in self._peers:
                return
        peer = _Peer(host, port, handshake.num_blocks, handshake.num_words)
        sock = self._connect(peer, self._clock() + self._connect_timeout)
        with self._lock:
            peer = self._peers.setdefault(handshake.engine_id, peer)
            peer.idle.append(sock)

    def remove_peer(self, engine_id: str) -> None:
        with self._lock:
            peer = self._peers.pop(engine_id, None)
        for sock in peer.idle if peer is not None else ():
            sock.close()

    def read(
        self,
        engine_id: str,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
        cancel: threading.Event | None = None,
        lease: LeaseMark | None = None,
    ) -> bool:
        deadline = self._clock() + timeout
        with self._lock:
            peer = self._peers.get(engine_id)
            sock = _take_open(peer.idle) if peer is not None else None
        if peer is None:
            raise TransferError(f"engine {engine_id} is not connected: handshake first", reason="not_connected")
        try:
            check_blocks(remote_blocks, local_blocks, remote_total=peer.num_blocks, local_total=self._num_blocks)
            started = self._clock()
            for start in range(0, len(remote_blocks), PIECE_BLOCKS):
                stop = min(start + PIECE_BLOCKS, len(remote_blocks))
                self._pass_time(started + self._transfer_seconds(stop * self._block_bytes), deadline, cancel)
                if sock is None:
                    sock = self._connect(peer, deadline)
                tags = self._tags(sock, remote_blocks[start:stop], deadline)
                self._write_tags(local_blocks[start:stop], tags)
            if lease is None or not peer.num_words:
                return False
            self._pass_time(0.0, deadline, cancel)
            if sock is None:
                sock = self._connect(peer, deadline)
            word = self._ask(sock, _HEAD.pack(_WORD_MAGIC, lease.epoch % peer.num_words), WORD_BYTES, deadline)
            return int.from_bytes(word, "little") == lease.word
        except TransferError as error:
            # An answer may still be on its way, so the connection can't be used again.
            if sock is not None and error.reason != "refused":
                sock.close()
                sock = None
            if error.reason == "disconnected":
                self.remove_peer(engine_id)
            raise
        finally:
            if sock is not None:
                self._put_back(engine_id, peer, sock)

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        for engine_id in list(self._peers):
            self.remove_peer(engine_id)

    def _put_back(self, engine_id: str, peer: _Peer, sock: socket.socket) -> None:
        with self._lock:
            if self._peers.get(engine_id) is peer and not self._closed.is_set():
                peer.idle.append(sock)
                return
        sock.close()

    def _pass_time(self, until: float, deadline: float, cancel: threading.Event | None) -> None:
        """Wait until `until`; raises at the deadline, on cancel, or when closed."""
        while True:
            if cancel is not None and cancel.is_set():
                raise TransferError("read was cancelled", reason="cancelled")
            if self._closed.is_set():
                raise TransferError("the transport is closed", reason="closed")
            now = self._clock()
            if now >= deadline:
                raise TransferError("read took longer than it may", reason="timeout")
            left = min(until, deadline) - now
            if left <= 0:
                return
            # One event can be waited for; the other is looked at every 20 ms.
            (cancel or self._closed).wait(min(left, 0.02))

    def _connect(self, peer: _Peer, deadline: float) -> socket.socket:
        try:
            sock = socket.create_connection((peer.host, peer.port), timeout=max(0.001, deadline - self._clock()))
        except TimeoutError as error:
            raise TransferError(f"no connection to {peer.host}:{peer.port} in time", reason="timeout") from error
        except OSError as error:
            raise TransferError(f"no connection to {peer.host}:{peer.port}: {error}", reason="disconnected") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _tags(self, sock: socket.socket, blocks: Sequence[int], deadline: float) -> bytes:
        request = _HEAD.pack(_MAGIC, len(blocks)) + struct.pack(f"<{len(blocks)}I", *blocks)
        return self._ask(sock, request, TAG_BYTES * len(blocks), deadline)

    def _ask(self, sock: socket.socket, request: bytes, answer_bytes: int, deadline: float) -> bytes:
        try:
            sock.settimeout(max(0.001, deadline - self._clock()))
            sock.sendall(request)
            (status,) = _STATUS.unpack(self._receive(sock, _STATUS.size, deadline))
            if status != _OK:
                raise TransferError("the owner refused a place outside its arena or its words", reason="refused")
            return self._receive(sock, answer_bytes, deadline)
        except TimeoutError as error:
            raise TransferError("the owner did not answer in time", reason="timeout") from error
        except OSError as error:
            raise TransferError(f"the owner's connection broke: {error}", reason="disconnected") from error

    def _receive(self, sock: socket.socket, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            sock.settimeout(max(0.001, deadline - self._clock()))
            part = sock.recv(length - len(data))
            if not part:
                raise ConnectionResetError("closed by the owner")
            data += part
        return bytes(data)


def _take_open(idle: list[socket.socket]) -> socket.socket | None:
    """A connection its owner has not closed meanwhile (it does so after IDLE_SECONDS); the others are closed."""
    while idle:
        sock = idle.pop()
        try:
            sock.setblocking(False)
            sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return sock
        except OSError:
            pass
        sock.close()
    return None
