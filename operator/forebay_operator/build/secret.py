"""The per-model secret: bearer of internal endpoints and key of the transfer parameters' signature."""

from __future__ import annotations

import base64
from typing import Any, Final

from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import token_secret_name

KEY: Final = "token"
MIN_BYTES: Final = 32


def token_secret(model: DisaggregatedModel, token: bytes) -> dict[str, Any]:
    """`token` is made once by the caller, from a secure source, and never changed: pods read it at start only.

    Raises ValueError for one that is too short or that a header can't carry.
    """
    if len(token) < MIN_BYTES or not token.isascii() or len(token.split()) != 1:
        raise ValueError(f"a token must be at least {MIN_BYTES} ASCII characters without blanks")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, token_secret_name(model.metadata.name), "token"),
        "type": "Opaque",
        "immutable": True,
        "data": {KEY: base64.b64encode(token).decode()},
    }
