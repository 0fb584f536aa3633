"""Labels of workers' pods: what the operator sets and the router reads."""

from __future__ import annotations

from typing import Final

MODEL: Final = "forebay.dev/model"
POOL: Final = "forebay.dev/pool"
"""Home pool; part of the Deployment's selector."""

ROLE: Final = "forebay.dev/role"
"""What the router uses the worker for. Set on pods by the operator alone: no template carries it."""

DRAINING: Final = "forebay.dev/draining"
"""On a worker that is to leave: routers send it nothing new. Set by the operator alone."""
