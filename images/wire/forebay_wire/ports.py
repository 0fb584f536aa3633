"""Ports on which workers serve their KV cache to each other: what listens there is what NetworkPolicies open."""

from __future__ import annotations

from typing import Final

TRANSFER_FIRST: Final = 20000
TRANSFER_LAST: Final = 20999
"""A random free port of the range, one for each listener. Below Linux's own range for outgoing connections (32768 and
up), which would collide."""
