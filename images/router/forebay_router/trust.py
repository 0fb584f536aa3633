"""Who may call, and what of a call is believed."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from pathlib import Path

from forebay_wire import headers
from forebay_wire.secret import BadSecretFile, read_file

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?")
_MAX_KEYS = 10_000


def load_api_keys(path: Path) -> tuple[bytes, ...]:
    """One key a line; blank lines and lines that begin with # are left out."""
    lines = [line.strip() for line in read_file(path, "API key").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise BadSecretFile(f"the API key file {path} holds no key; leave --api-keys-file out to serve without keys")
    if len(keys) > _MAX_KEYS:
        raise BadSecretFile(f"the API key file {path} holds {len(keys)} keys, at most {_MAX_KEYS} are allowed")
    return keys


class ApiKeys:
    """Checks a client's bearer. Compares digests of equal length, against every key, so that time tells nothing."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def allows(self, authorization: str | None) -> bool:
        if not self._digests:
            return True
        offered = hashlib.sha256(headers.bearer(authorization) or b"").digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, offered)
        return found


def request_id(offered: str | None) -> str:
    """The client's id where it is harmless in headers, logs and file names; else a fresh one."""
    if offered is not None and headers.is_request_id(offered):
        return offered
    return uuid.uuid4().hex


def traceparent(offered: str | None) -> str | None:
    """A well-formed W3C trace context, or None."""
    return offered if offered is not None and _TRACEPARENT.fullmatch(offered) else None
