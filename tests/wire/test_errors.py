import json

import pytest

from forebay_wire.errors import ApiError


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
            "code": None,
        }
    }
