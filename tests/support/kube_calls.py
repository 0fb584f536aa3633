"""A request as the fake API server sees it, and its refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message or reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass
class Call:
    verb: str
    plural: str
    namespace: str
    name: str
    subresource: str
    body: Any
    query: dict[str, str]

    @property
    def write(self) -> bool:
        return self.verb not in ("get", "list", "watch")

    @property
    def changes(self) -> bool:
        return self.write and "dryRun" not in self.query

    def __str__(self) -> str:
        return f"{self.verb} {self.plural}{'/' + self.subresource if self.subresource else ''} {self.name}"
