"""The workers' roles and the two slow gears: role switch and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay_operator.api.labels import Pool
from forebay_operator.replay.worker import Worker


@dataclass(frozen=True, slots=True)
class Gear:
    """How a worker changes pools."""

    name: str
    """`role`, or `replica-N` with N seconds of start-up."""

    seconds: float
    """Role: until the router uses the new role. Replica: from an empty worker to a ready one in the other pool."""

    drains: bool
    """Replica: what runs there ends first (or is handed on), and the worker takes nothing new meanwhile."""


def role_gear(seconds: float = 1.0) -> Gear:
    return Gear("role", seconds, drains=False)


def replica_gear(seconds: float) -> Gear:
    return Gear(f"replica-{seconds:g}", seconds, drains=True)


def parse_gear(text: str) -> Gear:
    """`role`, `replica-30`, ... Raises ValueError."""
    if text == "role":
        return role_gear()
    kind, _, seconds = text.partition("-")
    if kind == "replica" and seconds.isdigit():
        return replica_gear(float(seconds))
    raise ValueError(f"{text!r} is no gear; write role, or replica-N with N seconds of start-up")


@dataclass(slots=True)
class Member:
    worker: Worker
    role: Pool | None
    target: Pool
    ready_at: float = 0.0
    draining: bool = False


class Fleet:
    """N workers, each with a role and a target role. Every move is of one worker."""

    def __init__(
        self,
        workers: Sequence[Worker],
        prefill: int,
        gear: Gear,
        drain_seconds: float,
        hand_on: Callable[[Worker, float], None],
    ) -> None:
        """`hand_on`: (worker, now), gives its requests to others, when it has drained for `drain_seconds`."""
        self.gear = gear
        self._drain_seconds = drain_seconds
        self._hand_on = hand_on
        roles: list[Pool] = ["prefill" if i < prefill else "decode" for i in range(len(workers))]
        self.members = [Member(worker, role, role) for worker, role in zip(workers, roles, strict=True)]
        self.moves = 0
        self.move_seconds: list[float] = []
        """How long each ended move took."""
        self._began: dict[int, float] = {}
        self.prefills: list[Worker] = []
        self.decodes: list[Worker] = []
        self._index()

    def _index(self) -> None:
        self.prefills = [m.worker for m in self.members if m.role == "prefill"]
        self.decodes = [m.worker for m in self.members if m.role == "decode"]

    @property
    def moving(self) -> bool:
        return bool(self._began)

    def targets(self) -> tuple[int, int]:
        prefill = sum(1 for m in self.members if m.target == "prefill")
        return prefill, len(self.members) - prefill

    def retarget(self, prefill: int, now: float) -> int:
        """Start the moves towards `prefill` prefill workers; returns how many were started.

        A move that has not let go of its old pool's worker yet is taken back first; then the emptiest worker moves.
        The last serving worker of a pool stays.
        """
        started = 0
        while (have := self.targets()[0]) != prefill:
            source: Pool = "prefill" if have > prefill else "decode"
            goal: Pool = "decode" if source == "prefill" else "prefill"
            member = self._victim(source)
            if member is None:
                break
            self._move(member, goal, now)
            started += 1
        return started

    def _victim(self, source: Pool) -> Member | None:
        coming = [m for m in self.members if m.target == source and m.role is None and m.draining]
        if coming:
            return min(coming, key=lambda m: m.worker.index)
        serving = [m for m in self.members if m.target == source and m.role == source]
        if len(serving) < 2:
            return None
        return min(serving, key=lambda m: (m.worker.in_flight, m.worker.queued_tokens, m.worker.index))

    def _move(self, member: Member, goal: Pool, now: float) -> None:
        member.target = goal
        self.moves += 1
        if member.draining:
            member.draining = False
            member.role = goal
            self._began.pop(member.worker.index, None)
        else:
            member.role = None
            member.draining = self.gear.drains
            member.ready_at = now + self.gear.seconds
            self._began[member.worker.index] = now
        self._index()

    def advance(self, now: float) -> None:
        """End drains and start-ups that are due."""
        if not self._began:
            return
        for member in self.members:
            if member.role is not None:
                continue
            if member.draining:
                if member.worker.in_flight:
                    if now - self._began[member.worker.index] < self._drain_seconds - 1e-9:
                        continue
                    self._hand_on(member.worker, now)
                member.draining = False
                member.ready_at = now + self.gear.seconds
            if now >= member.ready_at:
                member.role = member.target
                self.move_seconds.append(now - self._began.pop(member.worker.index))
                self._index()
