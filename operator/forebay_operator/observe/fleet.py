"""The workers a model should have, as whoever runs them knows: names, addresses and roles to be. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from forebay_operator.api.labels import Pool


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    target: Pool
    """The role it has or is to have."""

    address: str = ""
    """host:port of its HTTP server; empty while it has none."""

    serving: bool = True
    """False: it is known to take no requests (starting, draining, gone), whatever a router still says."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """As many members as there should be workers: one that is missing is a member without an address."""

    members: tuple[Member, ...] = ()
    routers: tuple[str, ...] = ()
    """host:port of every ready router. Load is known only when all of them answer."""
