"""Which worker takes a request. Pure: snapshots in, names out; the caller counts `turn` up so that ties rotate."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from forebay_router.candidate import Candidate, Health, Key

_NAME = operator.attrgetter("name")

TIE_SECONDS = 0.005
TIE_SHARE = 0.05
"""Scores closer than 5 ms, or 5 % of the best, are noise of the reports' age: they rotate."""

CACHED_SLACK = 0.1
"""Of a decode worker's capacity: how much fuller than the emptiest it may be to be preferred for what it has cached.
Decode steps get longer with every resident token, so all requests there pay for what one saves."""


def _usable(candidates: Iterable[Candidate], excluded: Collection[Key]) -> list[Candidate]:
    """Those that may be tried, the best health only."""
    suspect = Health.SUSPECT
    left = [c for c in candidates if c.health <= suspect and not (excluded and c.key in excluded)]
    return [c for c in left if c.health < suspect] or left


def _rotate(ties: Sequence[Candidate], turn: int) -> Candidate:
    if len(ties) == 1:
        return ties[0]
    ordered = sorted(ties, key=_NAME)
    return ordered[turn % len(ordered)]


def prefill_seconds(candidate: Candidate, prompt_tokens: int, velocity: float) -> float:
    """Expected time until this prompt is computed there: its queue and what of it is not cached, at the worker's
    measured velocity.

    `velocity` stands in where the worker has not measured its own. One that has just changed roles still decodes what
    it had: prompts get what its mixed steps leave.
    """
    speed = candidate.velocity or velocity
    if candidate.decoding and 0 < candidate.mixed_velocity < speed:
        speed = candidate.mixed_velocity
    return (candidate.queued_tokens + candidate.uncached(prompt_tokens)) / speed


def known_velocity(candidates: Iterable[Candidate]) -> float | None:
    """The median of those that have measured one, tokens a second; it stands in for those that have not."""
    known = [c.velocity for c in candidates if c.velocity > 0]
    if not known or min(known) == max(known):
        return known[0] if known else None
    return statistics.median(known)


def pick_prefill(
    candidates: Iterable[Candidate], prompt_tokens: int, turn: int = 0, excluded: Collection[Key] = ()
) -> Candidate | None:
    """The worker that has the prompt computed soonest.

    A cached beginning counts as the time it saves, no more: once the queue of its worker is longer than that, another
    worker computes the beginning and has it from then on too. So what all prompts begin with is soon everywhere.
    """
    usable = _usable(candidates, excluded)
    if not usable:
        return None
    velocity = known_velocity(usable) or 1.0
    scores = [prefill_seconds(c, prompt_tokens, velocity) for c in usable]
    best = min(scores)
    limit = best + max(TIE_SECONDS, TIE_SHARE * best)
    return _rotate(_most_cached([c for c, score in zip(usable, scores, strict=True) if score <= limit]), turn)


def _most_cached(ties: list[Candidate]) -> list[Candidate]:
    """Those with the longest cached beginning, give or take a block."""
    if len(ties) == 1:
        return ties
    most = max(c.cached_tokens for c in ties)
    return [c for c in ties if c.cached_tokens > most - c.block_size]


def decode_load(candidate: Candidate, tokens: int) -> tuple[bool, float]:
    """(has no room, how full): a worker with room always comes first.

    How full is the larger of batch over its cap and KV in use over the pool, plus the resident tokens' share, which is
    what a decode step's time grows with.
    """
    block_size, total, free = candidate.block_size, candidate.total_blocks, candidate.free_blocks
    running, most = candidate.running, candidate.max_running
    crowded = free * block_size < tokens or 0 < most <= running
    batch = running / most if most else 0.0
    if not total:
        return crowded, batch
    used = 1.0 - free / total
    return crowded, (batch if batch > used else used) + candidate.resident_tokens / (total * block_size)


def pick_decode(
    candidates: Iterable[Candidate],
    tokens: int,
    turn: int = 0,
    excluded: Collection[Key] = (),
    compat_hash: str | None = None,
) -> Candidate | None:
    """The emptiest decode worker with room for `tokens`; with `compat_hash`, of those that can read its KV.

    One that is little fuller is preferred when it has the beginning cached: it reads so much less KV from elsewhere.
    """
    usable = _usable((c for c in candidates if compat_hash is None or c.compat_hash == compat_hash), excluded)
    if not usable:
        return None
    loads = [decode_load(c, tokens) for c in usable]
    crowded, load = min(loads)
    limit = load * (1 + TIE_SHARE) + 1e-9
    near, ties = [], []
    for candidate, (full, other) in zip(usable, loads, strict=True):
        if full == crowded:
            if candidate.cached_tokens and other <= load + CACHED_SLACK:
                near.append(candidate)
            if other <= limit:
                ties.append(candidate)
    return _rotate(_most_cached(near or ties), turn)


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Candidate
    decode: Candidate


@dataclass(frozen=True, slots=True)
class NoPair:
    """Why the two legs cannot run on two workers; `kind` is the label of the degraded metric."""

    kind: str
    """`no_prefill` | `no_decode` | `no_compatible_pair`"""


def pick_pair(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    turn: int = 0,
    excluded: Collection[Key] = (),
) -> Pair | NoPair:
    """A prefill worker and a decode worker that can read each other's KV."""
    prefills = _usable((c for c in candidates if c.role == "prefill"), excluded)
    decodes = _usable((c for c in candidates if c.role == "decode"), excluded)
    if not prefills or not decodes:
        return NoPair("no_prefill" if not prefills else "no_decode")
    hashes = {c.compat_hash for c in decodes}
    prefill = pick_prefill((c for c in prefills if c.compat_hash in hashes), prompt_tokens, turn)
    if prefill is None:
        return NoPair("no_compatible_pair")
    decode = pick_decode(decodes, prompt_tokens, turn, compat_hash=prefill.compat_hash)
    assert decode is not None
    return Pair(prefill, decode)


def pick_any(
    candidates: Sequence[Candidate],
    tokens: int,
    turn: int = 0,
    excluded: Collection[Key] = (),
    *,
    mixed: bool,
) -> Candidate | None:
    """A worker for both phases or for the rest of an answer: of the decode pool, else (`mixed`) of any."""
    decode = pick_decode((c for c in candidates if c.role == "decode"), tokens, turn, excluded)
    if decode is not None and decode.health == Health.READY:
        return decode
    other = pick_decode(candidates, tokens, turn, excluded) if mixed else None
    if decode is None or (other is not None and other.health < decode.health):
        return other
    return decode
