"""Names of the API group, labels and pools, once."""

from __future__ import annotations

from typing import Final, Literal

GROUP: Final = "serving.forebay.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "DisaggregatedModel"

MODEL: Final = "forebay.dev/model"
POOL: Final = "forebay.dev/pool"
"""Home pool; part of the Deployment's selector."""

REVISION: Final = "forebay.dev/revision"
ROLE: Final = "forebay.dev/role"
"""What the router uses the worker for. Set on pods by the operator alone: no template carries it."""

DRAINING: Final = "forebay.dev/draining"
"""`true` on a worker that is to leave: routers send it nothing new. Set by the operator alone."""

FIELD_MANAGER: Final = "forebay-operator"
"""Of every server-side apply of a child."""

Pool = Literal["prefill", "decode"]
POOLS: Final[tuple[Pool, Pool]] = ("prefill", "decode")
