"""Secret files: what is taken, and errors that never quote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay_wire.secret import MAX_SECRET_FILE, BadSecretFile, read_token


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"se cret", b"two\nlines", "caf\u00e9".encode(), b"cret" * MAX_SECRET_FILE, None],
    ids=["empty", "blank", "two words", "two lines", "not ASCII", "huge", "absent"],
)
def test_bad_token_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSecretFile) as caught:
        read_token(path)
    assert str(path) in str(caught.value)
    assert "cret" not in str(caught.value).replace(str(path), "")


def test_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadSecretFile, match="Is a directory"):
        read_token(tmp_path)


def test_a_good_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"abc\n")
    assert read_token(tmp_path / "token") == b"abc"
