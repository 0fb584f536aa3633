"""The workers file: how local mode tells the router which workers there are (pods' labels do it in Kubernetes)."""

from __future__ import annotations

import msgspec


class WorkerEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    name: str
    host: str
    port: int
    pool: str
    """Home pool: `prefill` or `decode`."""

    role: str | None = None
    """The role the router serves it in; null: not set yet, the home pool counts after the grace period."""

    draining: bool = False
    """It is to leave: what runs on it goes on, nothing new is sent."""


class WorkersFile(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[WorkerEntry]
