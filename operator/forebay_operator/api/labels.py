"""Names of the API group, labels and pools, once."""

from __future__ import annotations

from typing import Final, Literal

from forebay_wire.labels import DRAINING, MODEL, POOL, ROLE

__all__ = [
    "API_VERSION",
    "DRAINING",
    "FIELD_MANAGER",
    "GROUP",
    "KIND",
    "MODEL",
    "POOL",
    "POOLS",
    "REVISION",
    "ROLE",
    "VERSION",
    "Pool",
    "other",
]

GROUP: Final = "serving.forebay.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "DisaggregatedModel"

REVISION: Final = "forebay.dev/revision"
FIELD_MANAGER: Final = "forebay-operator"
"""Of every server-side apply of a child."""

Pool = Literal["prefill", "decode"]
POOLS: Final[tuple[Pool, Pool]] = ("prefill", "decode")


def other(pool: Pool) -> Pool:
    return "decode" if pool == "prefill" else "prefill"
