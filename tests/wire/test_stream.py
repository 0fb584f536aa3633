from hypothesis import given
from hypothesis import strategies as st

from forebay_wire.stream import event, parse


@given(
    st.lists(st.integers(0, 2**31)),
    st.none() | st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])),
)
def test_ids_and_data_come_back(ids, text):
    data = None if text is None else b"x" + text.encode()
    raw = event(ids, data)
    if not ids and data is None:
        assert raw == b""
        return
    assert raw.endswith(b"\n\n")
    assert parse(raw[:-2]) == (ids, [] if data is None else [data])


def test_comment_comes_before_its_data():
    assert event([1, 22], b"{}") == b": t 1 22\ndata: {}\n\n"
    assert event([3], None) == b": t 3\n\n"
    assert event([], b"{}") == b"data: {}\n\n"


def test_foreign_comments_are_ignored():
    assert parse(b": keep-alive\ndata: {}") == ([], [b"{}"])
