"""The routing gear: where a request's two phases run, and whether it can still meet its objective. Pure.

Three answers beside the usual split of prefill and decode (design section 8, gear 1, and R6):

- *overflow*: the prefill queue is over its share of the TTFT objective, so the prompt is computed on a decode worker
  that has TPOT head-room, in chunks that the worker itself keeps within the objective;
- *short*: what the decode worker would have to compute fits one mixed step, and both phases there are over sooner than
  the way over a prefill worker and the hand-off: no KV is moved;
- *refused*: wherever it goes, its first token is expected later than the objective allows.

The same code places requests in the router and in replays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from forebay_router import choice
from forebay_router.candidate import Candidate, Key
from forebay_router.choice import NoPair, Pair

QUEUE_SHARE = 0.7
"""Of the TTFT objective: a prompt that would wait longer in the prefill pool may go to a decoder. The rest covers
bursts that arrive before it is computed."""

STEP_SHARE = 0.6
"""Of the TPOT objective: a decoder with slower steps takes no prompt. Its mixed steps take up to MIXED_SHARE of it, so
this is what its mean gap can afford."""

MIXED_SHARE = 0.9
"""Of the TPOT objective: what a step that also computes prompt tokens may take. The rest is for the hand-off's gap."""

Convertible = Literal["never", "overflow", "always"]
CONVERTIBLE: tuple[Convertible, ...] = ("never", "overflow", "always")


@dataclass(frozen=True, slots=True)
class Policy:
    """Times in seconds; an objective of infinity is none."""

    ttft_seconds: float = math.inf
    tpot_seconds: float = math.inf
    convertible: Convertible = "never"
    """When decode workers may compute prompts: for *overflow* only, or `always`: *short* prompts too."""

    refusal_factor: float = 0.0
    """Refuse when the predicted TTFT is over so many times the objective. 0: never."""

    @property
    def step_seconds(self) -> float:
        """The longest step that a decoding request should see."""
        return MIXED_SHARE * self.tpot_seconds

    @property
    def latest_seconds(self) -> float:
        """The longest TTFT that is not refused."""
        return self.refusal_factor * self.ttft_seconds if self.refusal_factor > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Together:
    """Both phases on one decode worker."""

    worker: Candidate
    kind: str
    """`overflow` | `short`"""

    seconds: float
    """Predicted TTFT."""


@dataclass(frozen=True, slots=True)
class Split:
    pair: Pair
    seconds: float | None
    """Predicted TTFT; None: no worker's velocity is known."""


@dataclass(frozen=True, slots=True)
class Refused:
    seconds: float
    """Predicted TTFT."""

    retry_after: float
    """When it might be met, if nothing else arrives."""

    short: Literal["prefill", "decode"] = "prefill"
    """The role whose workers take too long."""


def place(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    policy: Policy,
    *,
    handoff_seconds: float = 0.0,
    answer_tokens: float = 0.0,
    turn: int = 0,
    excluded: Collection[Key] = (),
) -> Split | Together | Refused | NoPair:
    """Choose for a prompt of `prompt_tokens` tokens.

    `handoff_seconds`: what moving KV and joining the decode worker's batch takes, as measured; 0: unknown.
    `answer_tokens`: mean length of answers, for when decode slots will be free; 0: unknown.
    """
    pair = choice.pick_pair(candidates, prompt_tokens, turn, excluded)
    if isinstance(pair, NoPair):
        return pair
    velocity = choice.known_velocity(candidates)
    if velocity is None:
        return Split(pair, None)
    computed = choice.prefill_seconds(pair.prefill, prompt_tokens, velocity)
    decodes = [c for c in candidates if c.role == "decode" and c.key not in excluded and c.health == pair.decode.health]
    together: Together | None = None
    if policy.convertible == "always":
        together = short(decodes, prompt_tokens, policy, velocity, computed + handoff_seconds, turn)
    if policy.convertible != "never":
        together = together or overflow(decodes, prompt_tokens, policy, velocity, computed, turn)
    if together is not None:
        return together
    seconds = max(computed, slot_seconds(decodes, prompt_tokens, answer_tokens))
    idle = not pair.prefill.queued_tokens and seconds == computed
    if seconds > policy.latest_seconds and not idle:
        short_of: Literal["prefill", "decode"] = "prefill" if seconds == computed else "decode"
        return Refused(seconds, seconds - policy.latest_seconds, short_of)
    return Split(pair, seconds)


def mixed_velocity(candidate: Candidate, policy: Policy, velocity: float) -> float:
    """Prompt tokens a second that a decode worker computes beside its decodes without making a step too long.

    Its own measure where there is one; else its velocity over the time that the decodes leave of such a step.
    """
    if not candidate.step_seconds:
        return candidate.velocity or velocity
    if candidate.mixed_velocity:
        return candidate.mixed_velocity
    return (candidate.velocity or velocity) * max(0.0, 1.0 - candidate.step_seconds / policy.step_seconds)


def able(decodes: Iterable[Candidate], prompt_tokens: int, policy: Policy, velocity: float) -> list[Candidate]:
    """Decode workers that may compute a prompt, with the velocity they have for it: those with TPOT head-room, a place
    and blocks."""
    found = []
    for candidate in decodes:
        mixed = mixed_velocity(candidate, policy, velocity)
        crowded, _ = choice.decode_load(candidate, prompt_tokens)
        if mixed > 0 and not crowded and candidate.step_seconds < STEP_SHARE * policy.tpot_seconds:
            found.append(replace(candidate, velocity=mixed))
    return found


def overflow(
    decodes: Iterable[Candidate],
    prompt_tokens: int,
    policy: Policy,
    velocity: float,
    computed: float,
    turn: int = 0,
) -> Together | None:
    """The decode worker that has the prompt computed soonest, when the prefill pool takes too long (`computed`) and
    longer than that."""
    if computed <= QUEUE_SHARE * policy.ttft_seconds:
        return None
    best = choice.pick_prefill(able(decodes, prompt_tokens, policy, velocity), prompt_tokens, turn)
    if best is None:
        return None
    seconds = choice.prefill_seconds(best, prompt_tokens, velocity)
    return Together(best, "overflow", seconds) if seconds < computed else None


def short(
    decodes: Iterable[Candidate],
    prompt_tokens: int,
    policy: Policy,
    velocity: float,
    split_seconds: float,
    turn: int = 0,
) -> Together | None:
    """A decode worker that computes what it lacks of the prompt in one step that makes no one's gap too long, and has
    then saved time: `split_seconds` is when a split request decodes. Prompts that wait there count too, so that a
    decode worker gets one such prompt a step at most.
    """
    if math.isinf(policy.step_seconds):
        return None
    best = choice.pick_prefill(able(decodes, prompt_tokens, policy, velocity), prompt_tokens, turn)
    if best is None:
        return None
    seconds = choice.prefill_seconds(best, prompt_tokens, velocity)
    return Together(best, "short", seconds) if seconds <= min(policy.step_seconds, split_seconds) else None


def slot_seconds(decodes: Sequence[Candidate], prompt_tokens: int, answer_tokens: float) -> float:
    """When a decode worker will have room for a request: 0 where one has, else by how fast answers end; 0: unknown.

    Room is what workers admit by: a place, and blocks for the prompt. The bound that a client sets on its answer says
    little, and may be more than any worker has. Answers end at the rate at which tokens are made over the mean answer's
    length. Whoever waits there already has its turn first.
    """
    if not decodes or any(not choice.decode_load(c, prompt_tokens)[0] for c in decodes):
        return 0.0
    made = sum(c.decoding / c.step_seconds for c in decodes if c.step_seconds > 0)
    if not made or not answer_tokens:
        return 0.0
    return (1 + sum(c.waiting_pulls for c in decodes)) * answer_tokens / made
