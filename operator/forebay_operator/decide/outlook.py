"""A slow gear's look ahead: misses until the present regime ends, and what its end costs.

A move of minutes is caught by the traffic that comes back: it serves that traffic with the wrong split until the way
back is over, and with the queues that the present regime leaves. Both count in requests, since a regime of few and long
requests may leave queues to one of many and short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay_operator.decide import fluid
from forebay_operator.decide.fluid import Course, Load, Model
from forebay_operator.decide.memory import Before, Memory, Queues
from forebay_operator.decide.regime import WORSE
from forebay_operator.decide.types import Policy, Split

MOST_SECONDS = 1200.0
"""What is further off than this changes no choice between splits."""

MOST_SLOTS = 150
"""Of one roll: a longer one takes longer slots."""

AFTER_SECONDS = 600.0
AFTER_SLOT = 4
"""How long the old traffic is rolled out, in slots of so many seconds: it is a steady flow."""

STRESS = 1.3
"""A split is also rolled out at this load, for a tenth of its cost: of two that hold now, the one with reserve wins."""

STRESS_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Outlook:
    stay: float
    """Seconds that the present regime is expected to go on."""

    rate: float
    """Its requests per second."""

    wrong_seconds: float
    """From the next regime's start until a move back is over."""

    load: Load
    """What comes back, as a steady flow of one slot."""

    model: Model
    shares: dict[str, float]
    """Misses that each split had of it, by prefill workers."""

    best: Split
    """The split with the least of them."""

    most: float
    """Requests of the present kind that fit a decoder."""

    heavier: float
    """KV of a present request over that of one that comes back..."""

    longer: float
    """...and its output length likewise."""

    @property
    def back_rate(self) -> float:
        return self.load.requests[0]

    @property
    def requests(self) -> float:
        """How many the misses are counted of."""
        return self.rate * self.stay + self.back_rate * self.wrong_seconds

    def cost(
        self, split: Split, load: Load, model: Model, course: Course, queues: Queues, decode_scale: float
    ) -> float:
        """Expected share of misses."""
        if self.requests <= 0:
            return 0.0
        slot = max(fluid.slot_of(self.stay), -(-int(self.stay) // MOST_SLOTS))
        args = (load, model, course, queues, self.stay)
        normal = fluid.roll(*args, decode_scale=decode_scale, slot=slot)
        stress = fluid.roll(*args, scale=STRESS, decode_scale=decode_scale, slot=2 * slot)
        share = (1 - STRESS_SHARE) * fluid.share(normal) + STRESS_SHARE * fluid.share(stress)
        missed = share * self.rate * self.stay
        return (missed + self._caught(split) + self._left_over(split, normal[2])) / self.requests

    def risk(self, split: Split, stay: Split) -> float:
        """Requests that `split` would miss more than `stay`, were the old traffic back at once."""
        return max(0.0, self._caught(split) - self._caught(stay))

    def _caught(self, split: Split) -> float:
        return self.shares.get(str(split.prefill), 0.0) * self.back_rate * self.wrong_seconds

    def _left_over(self, split: Split, left: Queues) -> float:
        """Misses of the old traffic that the queues `left` by the present one add, in requests."""
        room = self.most * split.decode
        waiting = max(0.0, left.decoding - room)
        if not waiting and left.prefill_seconds <= fluid.QUEUE_SHARE * self.model.ttft * split.prefill:
            return 0.0
        # What runs holds more KV than a request of the old kind; what waits also takes longer to be answered.
        running = (left.decoding - waiting) * self.heavier
        queues = Queues(left.prefill_seconds, running + waiting * self.heavier * self.longer)
        share, least = (self.shares.get(str(q.prefill), 0.0) for q in (split, self.best))
        course = Course(split, split if share - least <= WORSE else self.best, self.wrong_seconds)
        args = (self.load, self.model, course)
        with_them, _, _ = fluid.roll(*args, queues, AFTER_SECONDS, slot=AFTER_SLOT)
        without, _, _ = fluid.roll(*args, Queues(), AFTER_SECONDS, slot=AFTER_SLOT)
        return max(0.0, with_them - without)


def outlook(
    stay: float,
    wrong_seconds: float,
    load: Load,
    model: Model,
    velocity: float,
    splits: Sequence[Split],
    present: Split,
    policy: Policy,
    memory: Memory,
) -> Outlook | None:
    """`load`, `model`: the present traffic's. In a first regime, what comes back is more of the same.

    None: nothing was seen yet.
    """
    assert policy.ttft_seconds is not None
    assert policy.tpot_seconds is not None
    before = memory.pending or memory.before or Before.of(memory)
    traffic = before.traffic
    if traffic.requests <= 0 or traffic.seconds <= 0:
        return None
    rate = traffic.requests / traffic.seconds
    work = traffic.prompt_tokens / traffic.seconds / velocity
    output = traffic.output_tokens / traffic.requests
    context = traffic.context_tokens / traffic.requests
    back = Load([work], [rate], output, context, work / rate)
    return Outlook(
        stay=min(stay, MOST_SECONDS),
        rate=sum(load.requests) / max(1, len(load.requests)),
        wrong_seconds=wrong_seconds,
        load=back,
        model=fluid.model_of(
            back,
            policy.workers,
            memory.decode_factor,
            policy.ttft_seconds,
            policy.tpot_seconds,
            policy.convertible,
            velocity,
        ),
        shares=before.shares,
        best=min(splits, key=lambda q: (before.shares.get(str(q.prefill), 0.0), abs(q.prefill - present.prefill))),
        most=model.most,
        heavier=max(1.0, load.context / max(1.0, context)),
        longer=max(1.0, load.output / max(1.0, output)),
    )
