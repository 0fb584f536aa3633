"""An HTTP server in a thread that answers as no server should."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

Answer = Callable[[socket.socket, threading.Event], None]
"""To one connection, whose request has been read; ends when the event is set."""


def drip(head: bytes, *, byte: bytes = b" ", every: float = 0.05, times: int = 60) -> Answer:
    """`head` at once, then `byte` again and again."""

    def answer(client: socket.socket, stop: threading.Event) -> None:
        client.sendall(head)
        for _ in range(times):
            client.sendall(byte)
            if stop.wait(every):
                return

    return answer


def flood(head: bytes, sent: list[int], *, size: int = 1 << 26) -> Answer:
    """`head` and as many bytes as somebody reads, up to `size`. `sent`: how many, part by part."""

    def answer(client: socket.socket, stop: threading.Event) -> None:
        client.sendall(head)
        for block in repeat(b"x" * (1 << 16), size >> 16):
            client.sendall(block)
            sent.append(len(block))
            if stop.is_set():
                return

    return answer


def whole(body: bytes) -> Answer:
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    def answer(client: socket.socket, _: threading.Event) -> None:
        client.sendall(head.encode() + body)

    return answer


def silence(_: socket.socket, stop: threading.Event) -> None:
    stop.wait()


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Its host and port. Each request has a connection and a thread of its own."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def one(client: socket.socket) -> None:
        # Whoever asked may have gone.
        with client, contextlib.suppress(OSError):
            if client.recv(1 << 16):
                answer(client, stop)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            if stop.is_set():
                client.close()
                return
            threads.append(threading.Thread(target=one, args=(client,), daemon=True))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            stop.set()
            # Wakes accept().
            socket.create_connection(("127.0.0.1", port)).close()
            accepting.join()
