"""A requests Session for an address that somebody else chose: no redirects, and answers of bounded size and time."""

from __future__ import annotations

import time
from typing import Any, Final

import requests

MAX_BYTES: Final = 32 * 1024 * 1024
_PART: Final = 64 * 1024


class BoundedSession(requests.Session):  # type: ignore[misc] # (requests has no types)
    """A redirect is an answer like others: it could lead to an address that only its asker may reach."""

    def __init__(self, seconds: float, max_bytes: int = MAX_BYTES) -> None:
        """`seconds`: for a whole answer; requests' own timeout is for each read of it."""
        super().__init__()
        # Proxies and .netrc are of the process, not of whoever chose the address.
        self.trust_env = False
        self._seconds = seconds
        self._max_bytes = max_bytes

    def request(self, *words: Any, **options: Any) -> requests.Response:
        """Raises requests' exceptions, and ValueError for an answer that is too long."""
        deadline = time.monotonic() + self._seconds
        response = super().request(*words, **{**options, "stream": True, "allow_redirects": False})
        held = bytearray()
        try:
            for part in response.iter_content(_PART):
                held += part
                if len(held) > self._max_bytes:
                    raise ValueError(f"the answer has more than {self._max_bytes} bytes")
                if time.monotonic() > deadline:
                    raise requests.Timeout("the answer timed out")
        finally:
            response.close()
        # Where requests itself keeps what it has read.
        response._content = bytes(held)
        return response
