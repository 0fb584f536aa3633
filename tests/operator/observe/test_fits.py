"""Speed from counters: which increments count, and how near the fit comes to a worker whose speed is known."""

from __future__ import annotations

import math
import random

import pytest

from forebay_engine.perf import load
from forebay_operator.calibrate.believed import workers_of
from forebay_operator.observe.fits import COLD_SECONDS, Capacity, Watched
from forebay_operator.observe.worker_counters import NONE, Counters, Page
from support.capacity import decode_capacity


def steps(batch: float, context: float, seconds: float, count: int = 100) -> Counters:
    return NONE._replace(
        decode_steps=count,
        decode_seconds=count * seconds,
        decode_sequences=count * batch,
        decode_resident=count * batch * context,
    )


@pytest.mark.parametrize("name", ["slow", "h100-llama-8b", "a100-llama-70b", "h200-llama-70b"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_fit_finds_a_known_workers_capacity(name: str, seed: int) -> None:
    """Seen at loads from a fifth of the capacity to all of it, with 5 % noise, it knows the batch that holds TPOT."""
    model, rng = load(name), random.Random(seed)
    context = 1000
    most = decode_capacity(model, context)
    capacity = Capacity()
    for _ in range(40):
        batch = rng.uniform(0.2, 1.0) * most
        each = context * rng.uniform(0.7, 1.3)
        seconds = model.decode_seconds(round(batch), round(batch * each)) * rng.uniform(0.95, 1.05)
        capacity.add(steps(batch, each, seconds))
        capacity.add(NONE._replace(prompt_tokens=4000, prompt_seconds=model.prefill_seconds(4000)))
    fitted = capacity.workers(model.kv_capacity_tokens, 256)
    assert fitted is not None
    assert fitted.prefill_velocity == pytest.approx(4000 / model.prefill_seconds(4000))
    for share in (0.25, 0.5, 1.0):
        batch = share * most
        seconds = fitted.weights_seconds + fitted.sequence_seconds * batch + fitted.resident_seconds * batch * context
        assert seconds == pytest.approx(model.decode_seconds(round(batch), round(batch * context)), rel=0.06)


def test_one_load_says_nothing_of_the_slope_and_the_prior_does() -> None:
    capacity = Capacity()
    capacity.add(steps(64, 1000, 0.02))
    capacity.add(NONE._replace(prompt_tokens=1000, prompt_seconds=0.1))
    fitted = capacity.workers(100_000, 256)
    assert fitted is not None
    assert fitted.weights_seconds == pytest.approx(0.01, rel=0.01)
    at = fitted.weights_seconds + fitted.sequence_seconds * 64 + fitted.resident_seconds * 64_000
    assert at == pytest.approx(0.02, rel=0.001)


def test_what_it_started_from_shares_a_step_out_until_loads_differ() -> None:
    """Batch 1 was seen; of batch 64 the file knows."""
    slow = load("slow")
    capacity = Capacity([9.0])
    capacity.start_from(workers_of(slow))
    assert capacity.workers(100_000, 256) is None, "what was learnt before is forgotten"
    for _ in range(9):
        capacity.add(steps(1, 1000, 1.2 * slow.decode_seconds(1, 1000)))
    capacity.add(NONE._replace(prompt_tokens=1000, prompt_seconds=0.1))
    fitted = capacity.copy().workers(100_000, 256)
    assert fitted is not None
    at = fitted.weights_seconds + fitted.sequence_seconds * 64 + fitted.resident_seconds * 64_000
    assert at == pytest.approx(1.2 * slow.decode_seconds(64, 64_000), rel=0.01)


def test_nothing_is_believed_before_both_phases_were_measured() -> None:
    capacity = Capacity()
    capacity.add(NONE._replace(prompt_tokens=1000, prompt_seconds=0.1))
    assert capacity.workers(1000, 8) is None
    capacity.add(steps(4, 100, 0.02))
    assert capacity.workers(1000, 8) is not None


def test_one_slow_worker_does_not_move_the_median() -> None:
    capacity = Capacity()
    capacity.add(steps(4, 100, 0.02))
    for seconds in (0.1, 0.1, 0.1, 9.0):
        capacity.add(NONE._replace(prompt_tokens=1000, prompt_seconds=seconds))
    fitted = capacity.workers(1000, 8)
    assert fitted is not None
    assert fitted.prefill_velocity == 10_000


@pytest.mark.parametrize(
    "gone",
    [
        NONE._replace(decode_steps=20, decode_seconds=1, decode_sequences=19, decode_resident=100),
        NONE._replace(decode_steps=20, decode_seconds=1, decode_sequences=1e-300, decode_resident=1e15),
        NONE._replace(decode_steps=20, decode_seconds=1e-300, decode_sequences=20, decode_resident=100),
        NONE._replace(prompt_tokens=1000, prompt_seconds=1e-310),
    ],
)
def test_steps_that_no_worker_makes_teach_nothing(gone: Counters) -> None:
    """A step without a sequence, and speeds beyond all measure."""
    capacity = Capacity()
    capacity.add(gone)
    assert capacity == Capacity()


def page(n: float) -> Page:
    return Page(Counters(1000 * n, 0.1 * n, 100 * n, 2 * n, 400 * n, 40_000 * n, 3 * n))


class TestWhichIncrementsCount:
    def test_from_the_second_look_on(self) -> None:
        watched = Watched("e", "prefill", 0.0, cold=False)
        assert watched.look(page(5), 1.0) is None
        gone = watched.look(page(6), 2.0)
        assert gone is not None
        assert gone.prompt_tokens == 1000
        assert watched.credited.prompt_tokens == 1000

    def test_not_over_a_change_of_roles(self) -> None:
        watched = Watched("e", "prefill", 0.0, cold=False)
        watched.look(page(1), 1.0)
        watched.in_role("decode")
        assert watched.look(page(2), 2.0) is None
        assert watched.look(page(3), 3.0) is not None

    def test_not_while_cold(self) -> None:
        watched = Watched("e", "prefill", 0.0, cold=True)
        watched.look(page(1), 1.0)
        assert watched.look(page(2), COLD_SECONDS - 1) is None
        assert watched.look(page(3), COLD_SECONDS + 1) is not None

    def test_not_over_a_restart(self) -> None:
        watched = Watched("e", "decode", 0.0, cold=False)
        watched.look(page(5), 1.0)
        watched.restarted("f", 2.0)
        assert watched.look(page(1), 2.0) is None
        assert watched.look(page(2), 40.0) is not None
        assert watched.credited.prompt_tokens == 1000

    def test_a_vllm_decode_workers_prompts_were_computed_elsewhere(self) -> None:
        """Where decode workers are the most, the median of all was the speed of one step after a pull."""
        capacity = Capacity()
        for role, velocity in (("prefill", 5000.0), ("decode", 200_000.0), ("decode", 200_000.0), ("decode", 9e5)):
            watched = Watched(role, role, 0.0, cold=False)
            for n in (1, 2):
                tokens, gaps = 2000.0 * n, 0.0 if role == "prefill" else 400.0 * n
                totals = Counters(tokens, tokens / velocity, gaps, gaps * 0.02, gaps, 0.0, 0.0)
                gone = watched.look(Page(totals, batch=4.0, context=100.0), float(n))
            assert gone is not None
            capacity.add(gone)
        learnt = capacity.workers(1000, 8)
        assert learnt is not None
        assert learnt.prefill_velocity == pytest.approx(5000.0)
        assert len(capacity.cells) == 1

    def test_our_own_decode_workers_prompts_count(self) -> None:
        """A convertible decoder computes them, and its counters hold nothing else."""
        watched = Watched("e", "decode", 0.0, cold=False)
        watched.look(page(1), 1.0)
        gone = watched.look(page(2), 2.0)
        assert gone is not None
        assert gone.prompt_tokens == 1000

    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e16])
    def test_not_with_a_part_that_is_out_of_range(self, value: float) -> None:
        """What is credited once is there for good."""
        watched = Watched("e", "decode", 0.0, cold=False)
        watched.look(page(1), 1.0)
        spoilt = page(2).totals._replace(decode_resident=value)
        assert watched.look(Page(spoilt), 2.0) is None
        assert watched.look(page(3), 3.0) is None, "it went backwards, or from what is no number"
        assert watched.look(page(4), 4.0) == pytest.approx(page(1).totals)
        assert watched.credited == pytest.approx(page(1).totals)

    def test_what_is_credited_never_falls(self) -> None:
        watched = Watched("e", "decode", 0.0, cold=False)
        before = watched.credited
        for at, n in enumerate((3, 7, 2, 4, 4, 9)):
            watched.look(page(n), float(at))
            assert all(new >= old for new, old in zip(watched.credited, before, strict=True))
            before = watched.credited
