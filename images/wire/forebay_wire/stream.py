"""Token ids inside a worker's SSE stream: a comment line before the data line, dropped by the router.

An event is `: t 17 32\\ndata: {...}\\n\\n`; one whose text is held back has no data line. The ids and the data of one
event stand or fall together, so the router counts an id as delivered exactly when its text is.
"""

from __future__ import annotations

PREFIX = b": t "
DONE = b"data: [DONE]\n\n"


def event(token_ids: list[int], data: bytes | None) -> bytes:
    """One SSE event with token ids; `data` is the JSON payload, None when nothing may be shown yet."""
    head = PREFIX + b" ".join(b"%d" % t for t in token_ids) + b"\n" if token_ids else b""
    body = b"data: " + data + b"\n" if data is not None else b""
    return head + body + b"\n" if head or body else b""


def parse(raw: bytes) -> tuple[list[int], list[bytes]]:
    """Token ids and data payloads of one event (without its blank line)."""
    ids: list[int] = []
    data: list[bytes] = []
    for line in raw.split(b"\n"):
        if line.startswith(PREFIX):
            ids.extend(int(t) for t in line[len(PREFIX) :].split())
        elif line.startswith(b"data:"):
            data.append(line[5:].lstrip())
    return ids, data
