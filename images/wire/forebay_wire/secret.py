"""Files that hold a secret: read once at start. Their content is in no error."""

from __future__ import annotations

from pathlib import Path

MAX_SECRET_FILE = 1024 * 1024
"""Bytes. A file above this is the wrong one."""


class BadSecretFile(ValueError):
    """A token or key file that cannot be used; the text names the file and the remedy, never its content."""


def read_file(path: Path, what: str) -> bytes:
    """The content of the `what` file. Raises BadSecretFile."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_FILE + 1)
    except OSError as error:
        raise BadSecretFile(
            f"cannot read the {what} file {path}: {error.strerror}; check its path and rights"
        ) from error
    if len(content) > MAX_SECRET_FILE:
        raise BadSecretFile(f"the {what} file {path} is over {MAX_SECRET_FILE} bytes; this cannot be the right one")
    return content


def read_token(path: Path) -> bytes:
    """The per-model secret, without surrounding white space. Raises BadSecretFile."""
    token = read_file(path, "token").strip()
    if not token.isascii() or len(token.split()) != 1:
        raise BadSecretFile(f"the token file {path} must hold one line of ASCII without blanks")
    return token
