"""Ports of the pods, once: what containers listen on is what NetworkPolicies open."""

from __future__ import annotations

from typing import Final

from forebay_wire.ports import TRANSFER_FIRST, TRANSFER_LAST

HTTP: Final = 8000

UCX_TCP_FIRST: Final = TRANSFER_FIRST
UCX_TCP_LAST: Final = TRANSFER_LAST
"""UCX has a listener for each interface of each of its contexts; the simulated transport has one."""

UCX_TCP_PORT_RANGE: Final = f"{UCX_TCP_FIRST}-{UCX_TCP_LAST}"
"""Value of the variable of that name."""
