import json

import msgspec
import pytest

from forebay_wire.errors import MAX_MESSAGE, MAX_PARAM, ApiError, bad_json


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_openai_shape(status, kind):
    error = ApiError(status, "temperature is -1, at least 0 is allowed", param="temperature")
    assert json.loads(error.json()) == {
        "error": {
            "message": "temperature is -1, at least 0 is allowed",
            "type": kind,
            "param": "temperature",
            "code": "overloaded" if status == 429 else None,
        }
    }


def test_what_a_client_wrote_is_repeated_within_bounds():
    """A field's name may be as long as a body."""
    name = "x" * 8_000_000
    error = ApiError(400, f"{name}: not a known field", param=name)
    assert len(error.body.message) == MAX_MESSAGE
    assert len(error.body.param) == MAX_PARAM
    assert len(error.json()) < MAX_MESSAGE + MAX_PARAM + 200


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b'{"prompt": "x", "seed": 1e400}', "seed", "out of range"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens", "out of range"),
        (b'{"model": "m", "prompt": ["a", "\xff"]}', "prompt", "UTF-8"),
        (b'{"model": "m", "prompt": "\\ud800"}', "prompt", "surrogate"),
        (b'{"model": "m", "prompt": "\\ud800\\ud800"}', "prompt", "surrogate"),
        (b'{"model": "m", "messages": [{"content": "a\\udc00b"}]}', "messages", "surrogate"),
        (b'{"\\ud800": "m"}', None, "JSON"),
        (b'{"prompt": "\\ud83d\\ude00"', None, "truncated"),
        (b'{"prompt": "\\\\ud800"', None, "truncated"),
        (b'{"prompt": ' + b"[" * 100_000, None, "recursion"),
        (b"[1]", None, "`object`"),
        (b"nul", None, "truncated"),
    ],
)
def test_a_body_that_cannot_be_decoded_names_the_field(raw, param, words):
    try:
        msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as failure:
        error = bad_json(raw, failure)
    assert (error.status, error.body.param) == (400, param)
    assert words in error.body.message
    assert error.body.message.startswith(param or "the body is not a JSON object")
