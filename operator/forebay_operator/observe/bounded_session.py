"""A requests Session for an address that somebody else chose: no redirects, and answers of bounded size and time."""

from __future__ import annotations

import http.client
import io
import socket
import time
from functools import partial
from typing import Any, Final

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError
from urllib3.util.connection import allowed_gai_family
from urllib3.util.retry import Retry

MAX_BYTES: Final = 32 * 1024 * 1024
_PART: Final = 64 * 1024
_SENT: Final = 16 * 1024
"""A TLS record: what one send with a timeout sends at most."""


class BoundedSession(requests.Session):  # type: ignore[misc] # (requests has no types)
    """A redirect is an answer like others: it could lead to an address that only its asker may reach.

    One request at a time: they share a deadline.
    """

    def __init__(self, seconds: float, max_bytes: int = MAX_BYTES) -> None:
        """`seconds`: for a whole answer, from connecting on; requests' own timeout is for each read of it."""
        super().__init__()
        # Proxies and .netrc are of the process, not of whoever chose the address.
        self.trust_env = False
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._deadline = _Deadline()
        self._adapter = _Adapter(self._deadline)
        self.mount("http://", self._adapter)
        self.mount("https://", self._adapter)

    def get_adapter(self, *_: Any, **__: Any) -> HTTPAdapter:
        """Whatever else has been mounted: it would have no bounds."""
        return self._adapter

    def get_redirect_target(self, _: Any) -> None:
        """Even where it follows no redirect, requests reads the whole of its body, however long."""

    def request(self, *words: Any, **options: Any) -> requests.Response:
        """Raises requests' exceptions, and ValueError for an answer that is too long. A `timeout` is for the whole."""
        seconds = min(self._seconds, options.get("timeout") or self._seconds)
        self._deadline.begin(seconds)
        options |= {"timeout": seconds, "stream": True, "allow_redirects": False}
        response = super().request(*words, **options)
        held = bytearray()
        try:
            for part in response.iter_content(_PART):
                held += part
                if len(held) > self._max_bytes:
                    raise ValueError(f"the answer has more than {self._max_bytes} bytes")
                # Unpacking takes time too.
                self._deadline.left()
        except TimeoutError as error:
            raise requests.Timeout(str(error)) from error
        finally:
            response.close()
        # Where requests itself keeps what it has read.
        response._content = bytes(held)
        return response

    def close(self) -> None:
        """From any thread. A request in flight ends with its next byte, or at its deadline; no other begins."""
        self._deadline.closed = True
        super().close()


class _Deadline:
    """Of the one request in flight."""

    closed = False

    def begin(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, more than 0."""
        if self.closed:
            raise ConnectionAbortedError("the session is closed")
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer timed out")
        return left


class _Reader(io.RawIOBase):
    """Each read has the time that is left. The usual one has the whole time again for each byte that comes.

    With TLS too: CPython's timeout there is for a whole record, and for the whole handshake.
    """

    def __init__(self, raw: Any, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        # The socket is closed when the last of its files is.
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *words: Any, deadline: _Deadline, **options: Any) -> None:
        super().__init__(sock, *words, **options)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock, deadline))


class _Connection(HTTPConnection):
    def __init__(self, *words: Any, deadline: _Deadline, **options: Any) -> None:
        super().__init__(*words, **options)
        self._deadline = deadline
        self.response_class = partial(_Response, deadline=deadline)  # type: ignore[assignment]

    def _new_conn(self) -> socket.socket:
        """urllib3's own has the whole time again for each address of the name."""
        try:
            # Nothing ends a lookup before its time: it has what resolv.conf gives it.
            found = socket.getaddrinfo(self._dns_host.strip("[]"), self.port, allowed_gai_family(), socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise NameResolutionError(self.host, self, error) from error
        failed: OSError = OSError("the name has no address")
        for tried, (family, kind, protocol, _, address) in enumerate(found):
            try:
                return self._connected(socket.socket(family, kind, protocol), address, len(found) - tried)
            except OSError as error:
                failed = error
        if isinstance(failed, TimeoutError):
            raise ConnectTimeoutError(self, f"Connection to {self.host} timed out") from failed
        raise NewConnectionError(self, f"Failed to establish a new connection: {failed}") from failed

    def _connected(self, sock: socket.socket, address: Any, untried: int) -> socket.socket:
        try:
            for option in self.socket_options or ():
                sock.setsockopt(*option)
            # One address that drops packets leaves time for the others.
            sock.settimeout(self._deadline.left() / untried)
            sock.connect(address)
            # A TLS handshake has this.
            sock.settimeout(self._deadline.left())
        except BaseException:
            sock.close()
            raise
        return sock

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        for start in range(0, len(data), _SENT):
            self.sock.settimeout(self._deadline.left())
            super().send(data[start : start + _SENT])


class _TLSConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class _Adapter(HTTPAdapter):  # type: ignore[misc] # (requests has no types)
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__(max_retries=Retry(total=0))
        self.poolmanager.pool_classes_by_scheme = {
            "http": partial(_Pool, deadline=deadline),
            "https": partial(_TLSPool, deadline=deadline),
        }
