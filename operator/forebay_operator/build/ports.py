"""Ports of the pods, once: what containers listen on is what NetworkPolicies open."""

from __future__ import annotations

from typing import Final

HTTP: Final = 8000

UCX_TCP_FIRST: Final = 20000
UCX_TCP_LAST: Final = 20999
"""UCX listens on a random free port of the range, one for each interface of each of its contexts. Below Linux's own
range for outgoing connections (32768 and up), which would collide."""

UCX_TCP_PORT_RANGE: Final = f"{UCX_TCP_FIRST}-{UCX_TCP_LAST}"
"""Value of the variable of that name."""
