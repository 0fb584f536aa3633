"""HTTP/1.1 towards workers, as far as a router needs it: requests with a body out, one response at a time in. No I/O.

A relayed chunk costs a general client more than the network does; here it is cut out of its framing and no more.
RFC 9112: content-length, chunked and until-close bodies; interim (1xx) responses are skipped, trailers dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

MAX_HEAD = 64 * 1024
"""Of a response, in bytes: its load report is in it."""

MAX_CHUNK_LINE = 1024
_NO_BODY = (204, 304)
_BLANK = " \t"
_HEX = b"0123456789abcdefABCDEF"


class BadResponse(Exception):
    """What came is no HTTP response, or ends before its end."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Mapping[str, str]
    """Names in lower case; of several of a name the last."""


def request_head(method: str, path: str, fields: Mapping[str, str], length: int) -> bytes:
    """Start line and fields of a request whose body has `length` bytes.

    Raises ValueError for a value that would end its line."""
    lines = [f"{method} {path} HTTP/1.1\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in fields.items()]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError(f"a header of {method} {path} holds a line break")
    return f"{text}content-length: {length}\r\n\r\n".encode("utf-8", "surrogateescape")


class _State(enum.Enum):
    HEAD = enum.auto()
    SIZED = enum.auto()
    """`_left` bytes of the body, or of the chunk and its line end, are to come."""

    SIZE_LINE = enum.auto()
    TRAILER = enum.auto()
    UNTIL_CLOSE = enum.auto()
    COMPLETE = enum.auto()


class ResponseReader:
    """One response. How its bytes were split on the way makes no difference to what comes out, joined."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.keep = True
        """The connection may serve another request once this one is `complete`."""

        self._state = _State.HEAD
        self._held = b""
        """The beginning of something that is read whole: a head, a line."""

        self._left = 0
        self._chunked = False

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`. Raises BadResponse."""
        if self._held:
            data, self._held = self._held + data, b""
        if self._state is _State.SIZE_LINE:
            # A chunk of its own, whole, is what a stream's events come as.
            end = data.find(b"\r\n")
            if end > 0 and data.endswith(b"\r\n") and (size := _chunk_size(data[:end])) and len(data) == size + end + 4:
                return data[end + 2 : -2]
        parts: list[bytes] = []
        at = 0
        while (after := self._step(data, at, parts)) is not None:
            at = after
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _step(self, data: bytes, at: int, parts: list[bytes]) -> int | None:
        """Take one thing in; where the next begins, or None when more bytes are needed."""
        match self._state:
            case _State.SIZED:
                return self._take(data, at, parts)
            case _State.SIZE_LINE:
                line, after = self._line(data, at, MAX_CHUNK_LINE)
                if line is None:
                    return None
                size = _chunk_size(line)
                # With the line end behind it.
                self._state, self._left = (_State.SIZED, size + 2) if size else (_State.TRAILER, 0)
                return after
            case _State.TRAILER:
                line, after = self._line(data, at, MAX_HEAD)
                if line is None:
                    return None
                if not line:
                    self._state = _State.COMPLETE
                return after
            case _State.HEAD:
                return self._read_head(data, at)
            case _State.UNTIL_CLOSE:
                parts.append(data[at:])
                return None
            case _State.COMPLETE:
                if at < len(data):
                    # Nobody asked for more: what comes next on this connection could not be trusted.
                    self.keep = False
                return None

    def _take(self, data: bytes, at: int, parts: list[bytes]) -> int | None:
        if at == len(data):
            return None
        frame = 2 if self._chunked else 0
        body = data[at : at + max(0, self._left - frame)]
        end = min(len(data), at + self._left)
        line_end = data[at + len(body) : end]
        if line_end and not b"\r\n"[2 - self._left + len(body) :].startswith(line_end):
            raise BadResponse("a chunk is longer than its size says")
        if body:
            parts.append(body)
        self._left -= end - at
        if self._left == 0:
            self._state = _State.SIZE_LINE if self._chunked else _State.COMPLETE
        return end

    def _line(self, data: bytes, at: int, limit: int) -> tuple[bytes | None, int]:
        """A line without its end, and where the next begins; None: it is not here yet, what is there is kept."""
        end = data.find(b"\r\n", at)
        if (end if end >= 0 else len(data)) - at > limit:
            raise BadResponse(f"a line of more than {limit} bytes")
        if end < 0:
            self._held = data[at:]
            return None, at
        return data[at:end], end + 2

    def _read_head(self, data: bytes, at: int) -> int | None:
        end = data.find(b"\r\n\r\n", at)
        if (end if end >= 0 else len(data)) - at > MAX_HEAD:
            raise BadResponse(f"a response head of more than {MAX_HEAD} bytes")
        if end < 0:
            self._held = data[at:]
            return None
        version, head = _parse_head(data[at:end])
        if 100 <= head.status < 200:
            if head.status == 101:
                raise BadResponse("status 101, which nobody asked for")
            return end + 4
        self.head = head
        connection = head.headers.get("connection", "").lower()
        self.keep = "close" not in connection and (version != b"HTTP/1.0" or "keep-alive" in connection)
        self._begin_body(head)
        return end + 4

    def _begin_body(self, head: Head) -> None:
        coding, length = head.headers.get("transfer-encoding"), head.headers.get("content-length")
        if head.status in _NO_BODY:
            self._state = _State.COMPLETE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise BadResponse(f"transfer-encoding {coding!r:.100}, which is not supported")
            self._chunked, self._state = True, _State.SIZE_LINE
            if length is not None:
                # The chunks are what counts, but whoever wrote both may have meant another end.
                self.keep = False
        elif length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 15:
                raise BadResponse(f"content-length {length!r:.100}")
            self._left = int(length)
            self._state = _State.SIZED if self._left else _State.COMPLETE
        else:
            self.keep, self._state = False, _State.UNTIL_CLOSE

    def end(self) -> None:
        """The connection was closed in good order. Raises BadResponse when the response is not whole."""
        self.keep = False
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.COMPLETE
        if not self.complete:
            raise BadResponse("the connection was closed before the response ended")


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].rstrip()
    # int() alone takes signs, underscores and 0x too.
    if not digits or len(digits) > 12 or digits.strip(_HEX):
        raise BadResponse(f"chunk size {line!r:.100}")
    return int(digits, 16)


def _parse_head(raw: bytes) -> tuple[bytes, Head]:
    start, _, rest = raw.partition(b"\r\n")
    version, code = start[:8], start[9:12]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not (len(code) == 3 and code.isdigit()) or start[8:13:4].strip():
        raise BadResponse(f"status line {start!r:.100}")
    fields: dict[str, str] = {}
    for line in rest.decode("utf-8", "surrogateescape").split("\r\n") if rest else ():
        name, colon, value = line.partition(":")
        if not colon or not name or name[0] in _BLANK or name[-1] in _BLANK:
            raise BadResponse(f"header line {line!r:.100}")
        name, value = name.lower(), value.strip(_BLANK)
        if name == "content-length" and fields.get(name, value) != value:
            raise BadResponse(f"content-length {fields[name]!r:.100} and {value!r:.100}")
        fields[name] = value
    return version, Head(int(code), fields)
