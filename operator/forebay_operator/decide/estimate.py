"""From observations to the load and the workers' true speed: windows, fits, output length."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from dataclasses import dataclass, replace
from operator import itemgetter

from forebay_operator.decide.attribute import without_old
from forebay_operator.decide.evidence import WINDOWS_SECONDS, beyond_chance, differs
from forebay_operator.decide.fluid import QUEUE_SHARE, Load
from forebay_operator.decide.memory import Memory, Totals, WorkerTotals
from forebay_operator.decide.types import Policy, Workers
from forebay_operator.observe.missed import sane
from forebay_operator.observe.traffic import Observation, WorkerLoad

WINDOW_SECONDS = 60.0
"""A minute: some turnovers of the decode batch."""

KEPT_SECONDS = 240.0
"""Arrivals kept: a slow move is judged by a window as long as it takes."""

SHORT_SECONDS = 20.0
"""A burst's length: what only this window sees is not yet a regime."""

RECENT_SECONDS = 10.0
OUTPUT_SECONDS = 30.0
CHANGED_SECONDS = (5.0, 10.0)
"""In these, answers that end are of another length where they are more or fewer than chance explains."""

PRIOR_ANSWERS = 5.0
"""Weight of the old output length, in answers."""

TOTALS_SECONDS = 600.0
SAMPLES = 24
"""Velocity samples kept per pool; their median counts, so a cold worker's or a stalled step's sample does not."""

LEAST_TOKENS = 2048
"""Prompt tokens that make a velocity sample: one full step."""

LEAST_STEPS = 20
FACTOR_LIMITS = (0.25, 4.0)
_AT = itemgetter(0)


def absorb(observation: Observation, policy: Policy, memory: Memory) -> None:
    """Take a fit observation into `memory`. One that was taken before is skipped: a call twice counts once."""
    if observation.taken_at <= memory.seen_at:
        return
    if memory.started_at is None:
        memory.started_at = observation.taken_at
    memory.seen_at = observation.taken_at
    newest = memory.arrivals[-1][0] if memory.arrivals else -1.0
    memory.arrivals += [(a.at, a.requests, a.prompt_tokens) for a in observation.arrivals if a.at > newest]
    if memory.arrivals:
        newest = memory.arrivals[-1][0]
        memory.arrivals = [a for a in memory.arrivals if a[0] > newest - KEPT_SECONDS]
    _absorb_totals(observation, memory)
    for worker in observation.workers:
        _absorb_worker(worker, policy.workers, memory)
    names = {worker.name for worker in observation.workers}
    memory.workers = {name: totals for name, totals in memory.workers.items() if name in names}


def _absorb_totals(observation: Observation, memory: Memory) -> None:
    totals = Totals(
        observation.taken_at,
        observation.generated_tokens or 0,
        observation.finished or 0,
        observation.refused or 0,
        (observation.missed_ttft or 0) + (observation.missed_tpot or 0),
        sane(observation.missed_in),
    )
    memory.totals.append(totals)
    memory.totals = [without_old(t, totals.at) for t in memory.totals if t.at > totals.at - TOTALS_SECONDS]
    if memory.output > 0:
        for seconds in CHANGED_SECONDS:
            tokens, answers = _ended(memory, totals.at - seconds)
            if tokens > 0 and differs(answers, tokens / memory.output):
                # Other answers end than did: what was before says nothing of them.
                memory.output_since = max(memory.output_since, totals.at - seconds)
                if answers < tokens / memory.output:
                    memory.earlier_context = 0.0
                elif memory.context > memory.earlier_context:
                    memory.earlier_context, memory.earlier_prompt = memory.context, memory.prompt
                break
    tokens, answers = _ended(memory, max(memory.output_since, totals.at - OUTPUT_SECONDS))
    if memory.output <= 0:
        memory.output = tokens / answers if answers > 0 and tokens > 0 else 0.0
    elif answers + tokens > 0:
        # Tokens made over answers ended moves while the long answers of a new regime still run; a mean over ended
        # answers would not.
        memory.output = max(1.0, (tokens + PRIOR_ANSWERS * memory.output) / (answers + PRIOR_ANSWERS))


def _ended(memory: Memory, since: float) -> tuple[int, int]:
    """(tokens made, answers ended) from the first totals at `since` or later until the last."""
    last = memory.totals[-1]
    first = next(t for t in memory.totals if t.at > since - 1e-6)
    return last.generated - first.generated, last.finished - first.finished


def _absorb_worker(worker: WorkerLoad, believed: Workers, memory: Memory) -> None:
    before = memory.workers.get(worker.name)
    now = WorkerTotals(
        worker.prefill_tokens,
        worker.prefill_seconds,
        worker.decode_seconds,
        worker.decode_steps,
        worker.decode_batch,
        worker.decode_resident,
        worker.role or "",
    )
    if before is not None and before.role and before.role == now.role:
        tokens, seconds = now.prefill_tokens - before.prefill_tokens, now.prefill_seconds - before.prefill_seconds
        if tokens >= LEAST_TOKENS and seconds > 0:
            _sample(memory.prefill_samples, tokens / seconds / believed.prefill_velocity)
            memory.prefill_factor = statistics.median(memory.prefill_samples)
        steps = now.decode_steps - before.decode_steps
        batch, resident = now.decode_batch - before.decode_batch, now.decode_resident - before.decode_resident
        spent = now.decode_seconds - before.decode_seconds
        if steps >= LEAST_STEPS and batch >= steps and resident >= 0 and spent > 0:
            mean = batch / steps
            expected = steps * step_seconds(believed, mean, resident / steps)
            if expected > 0:
                _sample(memory.decode_samples, spent / expected)
                memory.decode_factor = statistics.median(memory.decode_samples)
    memory.workers[worker.name] = now


def step_seconds(workers: Workers, batch: float, resident: float) -> float:
    """A decode step as believed."""
    memory = workers.weights_seconds + workers.sequence_seconds * batch + workers.resident_seconds * resident
    return workers.overhead_seconds + max(memory, workers.compute_seconds * batch)


def _sample(samples: list[float], value: float) -> None:
    low, high = FACTOR_LIMITS
    samples.append(min(high, max(low, value)))
    del samples[:-SAMPLES]


@dataclass(frozen=True, slots=True)
class Earlier:
    """Requests that still decode, of traffic that has ended and had longer answers."""

    requests: float
    context: float
    """Mean tokens of one..."""

    left: float
    """...and those that it still makes: of a running answer as many as it has made, in the mean."""

    arriving_context: float
    """Mean tokens of a request that is none of them."""


@dataclass(frozen=True, slots=True)
class Estimate:
    velocity: float
    """Measured prefill tokens per second of a worker."""

    output: float
    context: float
    mean_prefill: float
    queued_seconds: float
    """Prefill worker-seconds that wait."""

    decoding: float
    """Requests in the decode phase or waiting for it."""

    resident_tokens: float
    earlier: Earlier | None
    arrivals: tuple[tuple[float, int, int], ...]

    def load(self, seconds: float) -> Load:
        """The last `seconds` of arrivals."""
        # Of four minutes of them, and asked some ten times in a look.
        window = self.arrivals[bisect_right(self.arrivals, self.arrivals[-1][0] - seconds, key=_AT) :]
        return Load(
            prefill_seconds=[tokens / self.velocity for _, _, tokens in window],
            requests=[float(requests) for _, requests, _ in window],
            output=self.output,
            context=self.context,
            mean_prefill=self.mean_prefill,
        )

    def ahead(self, seconds: float) -> Load:
        """As load(), of what arrives alone."""
        load = self.load(seconds)
        return replace(load, context=self.earlier.arriving_context) if self.earlier is not None else load

    def demand(self, policy: Policy, decode_factor: float, seconds: float = SHORT_SECONDS) -> tuple[float, float]:
        """Workers' worth of load: prompt tokens over velocity; resident tokens over what a worker may hold at TPOT."""
        recent = self.load(seconds)
        prefill = sum(recent.prefill_seconds) / max(1, len(recent.prefill_seconds))
        return prefill, self.decoding * self.context / max(1.0, self.capacity(policy, decode_factor))

    def pressure(self, policy: Policy, decode_factor: float) -> tuple[float, float]:
        """Workers needed now: prefill to compute what arrived lately and, within the TTFT objective, what waits."""
        recent = self.load(RECENT_SECONDS)
        arriving = sum(recent.prefill_seconds) / max(1, len(recent.prefill_seconds))
        waiting = self.queued_seconds / max(RECENT_SECONDS, policy.ttft_seconds or 0.0)
        _, decode = self.demand(policy, decode_factor)
        return arriving + waiting, decode

    def surge(self, policy: Policy, serving: float, busy: float, since: float) -> float:
        """Workers that prefill needs by the last few seconds alone; 0 where they say nothing that is sure.

        `serving` workers count as full at `busy` of their time. Sure is what chance does not explain: more prompts than
        a full pool gets; or more than came in the minute before, and a queue that ends beyond the TTFT objective. That
        minute begins with the last move (`since`), which was made for what came until then.
        """
        objective = policy.ttft_seconds or math.inf
        late = self.queued_seconds > serving * max(0.0, objective - self.mean_prefill)
        for seconds in WINDOWS_SECONDS:
            recent = self.arrivals[-seconds:]
            came = sum(requests for _, requests, _ in recent)
            work = sum(tokens for _, _, tokens in recent) / self.velocity
            if recent[0][0] <= recent[-1][0] - seconds or work <= 0:
                # Seconds are missing, or nothing came.
                continue
            if beyond_chance(came, busy * serving * seconds * came / work):
                return (work / seconds + self.queued_seconds / max(seconds, policy.ttft_seconds or 0.0)) / busy
            minute = self.arrivals[-seconds - int(WINDOW_SECONDS) : -seconds]
            before = [requests for at, requests, _ in minute if at > since]
            known = len(before) >= SHORT_SECONDS
            if late and known and beyond_chance(came, seconds * sum(before) / len(before)):
                return serving + 1.0
        return 0.0

    def absorbed(self, policy: Policy, decode_factor: float, decoders: int) -> float:
        """Prefill workers' worth of prompts that `decoders` convertible decoders take beside what they decode.

        A decoder that spends the share x of its time in mixed steps, r times as long as its own, decodes as much only
        if demand * (1 + x (r - 1)) still fits.
        """
        workers = policy.workers
        if not policy.convertible or not 0 < workers.mixed_seconds < math.inf:
            return 0.0
        _, decode = self.demand(policy, decode_factor)
        if decode >= decoders:
            return 0.0
        tokens = self.decoding * self.context / decoders
        step = decode_factor * step_seconds(workers, self.decoding / decoders, tokens)
        slower = max(0.0, workers.mixed_seconds / max(step, 1e-6) - 1)
        most = (decoders / decode - 1) / slower if decode > 0 and slower > 0 else math.inf
        speed = min(1.0, workers.mixed_chunk / workers.mixed_seconds / self.velocity)
        return min(QUEUE_SHARE, most) * speed * decoders

    def capacity(self, policy: Policy, decode_factor: float) -> float:
        """Context tokens of one decode worker whose step meets the TPOT objective and which fit its KV."""
        workers = policy.workers
        fits = 0.95 * workers.kv_tokens
        if policy.tpot_seconds is None:
            # What a step takes bounds the batch no more; its places still do.
            return min(fits, workers.max_batch * self.context)
        per_token = workers.resident_seconds + workers.sequence_seconds / max(1.0, self.context)
        fixed = workers.weights_seconds + workers.overhead_seconds
        if per_token <= 0:
            return fits
        return max(1.0, min(fits, (policy.tpot_seconds / decode_factor - fixed) / per_token))


def estimate(observation: Observation, policy: Policy, memory: Memory) -> Estimate | None:
    """None: no request in the window. Keeps in `memory` what the next look compares with."""
    newest = memory.arrivals[-1][0] if memory.arrivals else 0.0
    since = max(newest - WINDOW_SECONDS, min(newest - RECENT_SECONDS, memory.output_since))
    minute = [a for a in memory.arrivals if a[0] > since]
    requests = sum(a[1] for a in minute)
    tokens = sum(a[2] for a in minute)
    if requests <= 0 or tokens <= 0:
        return None
    velocity = policy.workers.prefill_velocity * memory.prefill_factor
    output = max(1.0, memory.output or 128.0)
    resident = sum(w.resident_tokens for w in observation.workers)
    decoding = sum(w.decoding for w in observation.workers)
    waiting = sum(w.waiting_pulls for w in observation.workers)
    prompt = tokens / requests
    context = prompt + output / 2
    earlier: Earlier | None = None
    if decoding >= 10:
        earlier = _earlier(float(decoding), resident / decoding, prompt, output, memory)
        # Long answers stay longer, so those that run are longer than those that arrive.
        context = max(context, resident / decoding)
        memory.context, memory.prompt = resident / decoding, prompt
    return Estimate(
        velocity=velocity,
        output=output,
        context=context,
        mean_prefill=prompt / velocity,
        queued_seconds=sum(w.queued_prefill_tokens for w in observation.workers) / velocity,
        decoding=float(decoding + waiting),
        resident_tokens=float(resident),
        earlier=earlier,
        arrivals=tuple(memory.arrivals),
    )


def _earlier(decoding: float, context: float, prompt: float, output: float, memory: Memory) -> Earlier | None:
    """What is left of the traffic before answers became shorter; forgets it when nothing is.

    `context` is the mean of a mix: of requests as long as those that ran then, and of new ones. Those are taken as
    prompt + output tokens long: the mean where answers end as if by chance.
    """
    new = prompt + output
    if memory.earlier_context <= new or context <= new:
        memory.earlier_context = 0.0
        return None
    share = min(1.0, (context - new) / (memory.earlier_context - new))
    return Earlier(share * decoding, memory.earlier_context, memory.earlier_context - memory.earlier_prompt, new)
