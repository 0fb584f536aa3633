"""Blocks kept for decode legs to come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Reservation:
    request_id: str
    order: int
    """Place in line of the request to come: it was taken when the room was given."""

    blocks: list[int]
    early: int = 0


class Reservations:
    """By request id; counts their blocks."""

    def __init__(self) -> None:
        self._by_id: dict[str, Reservation] = {}
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, reservation: Reservation) -> None:
        self._by_id[reservation.request_id] = reservation
        self.blocks += len(reservation.blocks)

    def get(self, request_id: str) -> Reservation | None:
        return self._by_id.get(request_id)

    def take(self, request_id: str) -> Reservation | None:
        reservation = self._by_id.pop(request_id, None)
        if reservation is not None:
            self.blocks -= len(reservation.blocks)
        return reservation
