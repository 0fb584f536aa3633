"""A worker's SSE stream on its way to the client: bytes in, bytes out.

The worker's comments are dropped, its token ids counted. Nothing is decoded per event, except until the first content
is seen (TTFT) and in a stream that interleaves several answers (their chunks are counted by index).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from forebay_wire.stream import PREFIX

MAX_EVENT = 8 * 1024 * 1024
"""An event longer than this is a broken stream."""

_DATA = b"data:"
_DONE = b"[DONE]"
_ERROR = b'{"error"'


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """What the router reads of a chunk, where it reads one."""

    choices: list[_Choice] = []
    created: int | None = None
    usage: dict[str, object] | None = None

    @property
    def has_content(self) -> bool:
        """A role-only chunk, a finish-only chunk and a usage chunk are not content (design section 6)."""
        for choice in self.choices:
            if choice.text:
                return True
            delta = choice.delta
            if delta and (delta.content or delta.reasoning_content or delta.refusal or delta.tool_calls):
                return True
        return False


_chunk = msgspec.json.Decoder(Chunk)


def read_chunk(payload: bytes | str) -> Chunk:
    """An unreadable payload reads as one without content."""
    try:
        return _chunk.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return Chunk()


class Splitter:
    """Cuts a byte stream into SSE events at blank lines (LF, as our workers and vLLM write).

    How the bytes were split on the way makes no difference; an unfinished last event is never given out.
    """

    def __init__(self) -> None:
        self._tail = b""

    @property
    def holds(self) -> bool:
        """An event is begun."""
        return bool(self._tail)

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, without their blank lines. Raises ValueError on one beyond MAX_EVENT."""
        if self._tail:
            data = self._tail + data
        end = data.rfind(b"\n\n")
        if end < 0:
            if len(data) > MAX_EVENT:
                raise ValueError(f"an event of more than {MAX_EVENT} bytes")
            self._tail = data
            return []
        self._tail = data[end + 2 :]
        return [event for part in data[:end].split(b"\n\n") if (event := part.strip(b"\n"))]


class Delivered:
    """What the client holds of a streamed answer, over all the workers it came from."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self.ids: list[int] = []
        """Token ids the client's chunks cover, in order (of all answers, where there are several)."""

        self.events = 0
        """Data events written."""

        self.by_index: Counter[int] = Counter()
        """`events` by answer; all under 0 when there is one."""

        self.content = False
        """Some text is out."""

        self.created: int | None = None
        self._last: bytes | str = b""

    def whole(self, *, usage_asked: bool) -> bool:
        """Whether nothing but [DONE] is missing. Of several answers this is not known."""
        chunk = read_chunk(self._last)
        if self.several or not chunk.choices:
            return not self.several and chunk.usage is not None
        return not usage_asked and chunk.choices[0].finish_reason is not None

    def note(self, payload: bytes | str) -> None:
        """Count one event's payload as written."""
        self.events += 1
        self._last = payload
        if self.several or not self.content:
            chunk = read_chunk(payload)
            self.content = self.content or chunk.has_content
            self.created = self.created or chunk.created
            self.by_index[_index(chunk) if self.several else 0] += 1
        else:
            self.by_index[0] += 1


def _index(chunk: Chunk) -> int:
    """-1: a chunk of no answer (usage)."""
    return chunk.choices[0].index if chunk.choices else -1


class Relay:
    """One leg's stream. `skip`: chunks per answer that the client has already, from a worker that died."""

    def __init__(self, delivered: Delivered, skip: Counter[int] | None = None) -> None:
        self._delivered = delivered
        self._skip = +Counter(skip or {})
        self._splitter = Splitter()
        self.done = False
        """[DONE] was read; it is not passed on: the caller writes the end."""

        self.error: str | None = None
        """Why the stream can go on no further: the worker's own error event, or broken framing. Not passed on."""

        self.ids = 0
        """Token ids of this leg."""

        self.content_events = 0
        """Events with text in the last `feed`, for inter-token times."""

    def feed(self, data: bytes) -> bytes:
        """What the client gets for these bytes of the worker's."""
        self.content_events = 0
        if self.done or self.error is not None:
            return b""
        if self._delivered.content and not (self._delivered.several or self._skip or self._splitter.holds):
            passed = self._one(data)
            if passed is not None:
                return passed
        out: list[bytes] = []
        try:
            for event in self._splitter.feed(data):
                if not self._event(event, out):
                    break
        except ValueError as error:
            self.error = str(error)
        return b"".join(out)

    def _one(self, data: bytes) -> bytes | None:
        """One token's event, as most reads bring it: `data` less its first line. None: it is something else."""
        comment, _, event = data.partition(b"\n")
        if not (comment.startswith(PREFIX) and event.startswith(_DATA) and event.find(b"\n\n") == len(event) - 2):
            return None
        payload, number = event[len(_DATA) : -2].lstrip(), comment[len(PREFIX) :]
        if event.count(b"\n") > 2 or payload == _DONE or payload.startswith(_ERROR) or not number.isdigit():
            return None
        self._delivered.ids.append(int(number))
        self.ids += 1
        self._delivered.note(payload)
        self.content_events = 1
        return event

    def _event(self, event: bytes, out: list[bytes]) -> bool:
        ids: list[bytes] = []
        if event.startswith(b":"):
            comment, _, event = event.partition(b"\n")
            if comment.startswith(PREFIX):
                ids = comment[len(PREFIX) :].split()
        if event and (not event.startswith(_DATA) or b"\n" in event):
            event = b"\n".join(line for line in event.split(b"\n") if not line.startswith(b":"))
        payload = event[len(_DATA) :].lstrip()
        if payload == _DONE:
            self.done = True
            return False
        if payload.startswith(_ERROR):
            self.error = "the worker sent an error event"
            return False
        numbers = [int(value) for value in ids]
        if self._skip and (not event or self._skipped(payload)):
            return True
        # Ids without a data line stand for text held back: whoever replays them holds it back too.
        self._delivered.ids.extend(numbers)
        self.ids += len(numbers)
        if event:
            self._delivered.note(payload)
            if self._delivered.content and (numbers or not self.ids):
                self.content_events += 1
            out.append(event + b"\n\n")
        return True

    def _skipped(self, payload: bytes) -> bool:
        index = _index(read_chunk(payload)) if self._delivered.several else 0
        if self._skip[index] <= 0:
            return False
        self._skip[index] -= 1
        if not +self._skip:
            self._skip.clear()
        return True
