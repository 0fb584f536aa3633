"""One Observation from what routers and workers answer, and what is said of it when they do not."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay_operator.decide import Bounds, Decision, Gear, Memory, Policy, Workers, decide, reasons
from forebay_operator.observe.assemble import Assembler, Unanswered
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.router_report import ReportedLoad, ReportedWorker, RouterReport, Totals
from forebay_operator.observe.traffic import Health, Observation, Signal
from forebay_operator.observe.worker_counters import NONE, Counters, Page

ROUTER = "10.0.0.1:8000"
OTHER = "10.0.0.2:8000"
FLEET = Fleet(
    (Member("p0", "prefill", "10.0.1.1:8000"), Member("d0", "decode", "10.0.1.2:8000"), Member("d1", "decode")),
    (ROUTER,),
)
LOAD = ReportedLoad(engine_id="e", running=3, decoding=2, free_blocks=10, total_blocks=100, max_running=64)


def worker(name: str, role: str | None = None, state: str = "ready", age: float = 0.1, **load: Any) -> ReportedWorker:
    role = role or ("prefill" if name.startswith("p") else "decode")
    return ReportedWorker(name, role, state, age, msgspec.structs.replace(LOAD, **load))


def report(requests: int = 0, tokens: int = 0, cached: int = 0, instance: str = "i", **more: Any) -> RouterReport:
    totals = Totals(requests, tokens, cached, **more)
    return RouterReport(totals, (worker("p0"), worker("d0"), worker("d1")), instance)


def signal(observation: Observation, name: str) -> Signal:
    return next(s for s in observation.signals if s.name == name)


def offered(observation: Observation) -> list[tuple[float, int, int]]:
    return [(a.at, a.requests, a.prompt_tokens) for a in observation.arrivals]


class TestTotals:
    def test_the_first_look_is_a_baseline(self) -> None:
        first = Assembler().look(FLEET, {ROUTER: report(1000, 50_000)}, {}, 100.0)
        assert (first.arrivals, first.finished) == ((), 0)
        assert signal(first, "offered load").health == Health.ZERO

    def test_arrivals_are_whole_seconds(self) -> None:
        made = Assembler()
        made.look(FLEET, {ROUTER: report()}, {}, 100.2)
        assert offered(made.look(FLEET, {ROUTER: report(2, 20)}, {}, 100.9)) == []
        assert offered(made.look(FLEET, {ROUTER: report(3, 30)}, {}, 101.4)) == [(101.0, 3, 30)]
        late = made.look(FLEET, {ROUTER: report(10, 100)}, {}, 104.0)
        assert offered(late) == [(102.0, 2, 23), (103.0, 2, 23), (104.0, 3, 24)]

    def test_cached_tokens_are_taken_off_when_they_become_known(self) -> None:
        """A prompt is offered at once, and that half of it was cached is known with its first token."""
        made = Assembler()
        made.look(FLEET, {ROUTER: report()}, {}, 100.0)
        assert offered(made.look(FLEET, {ROUTER: report(1, 1000)}, {}, 101.0)) == [(101.0, 1, 1000)]
        assert offered(made.look(FLEET, {ROUTER: report(1, 1000, 500)}, {}, 102.0)) == [(102.0, 0, 0)]
        assert offered(made.look(FLEET, {ROUTER: report(2, 2000, 500)}, {}, 103.0)) == [(103.0, 1, 500)]

    def test_a_router_that_starts_anew_resets_nothing(self) -> None:
        made = Assembler()
        made.look(FLEET, {ROUTER: report(100, 1000, finished=90)}, {}, 100.0)
        made.look(FLEET, {ROUTER: report(110, 1100, finished=95)}, {}, 101.0)
        after = made.look(FLEET, {ROUTER: report(4, 40, instance="j", finished=2)}, {}, 102.0)
        assert (offered(after), after.finished) == ([(102.0, 4, 40)], 7)
        assert signal(after, f"router {ROUTER}").health == Health.RESET
        assert signal(after, "offered load").health == Health.RESET
        onwards = made.look(FLEET, {ROUTER: report(5, 50, instance="j", finished=3)}, {}, 103.0)
        assert signal(onwards, "offered load").health == Health.FRESH

    def test_two_routers_are_added_up(self) -> None:
        made, fleet = Assembler(), Fleet(FLEET.members, (ROUTER, OTHER))
        made.look(fleet, {ROUTER: report(5), OTHER: report(7, instance="o")}, {}, 100.0)
        both = made.look(fleet, {ROUTER: report(6, 10), OTHER: report(9, 30, instance="o")}, {}, 101.0)
        assert offered(both) == [(101.0, 3, 40)]

    def test_half_of_the_routers_is_no_observation(self) -> None:
        """Load of one of two routers would look like half the demand."""
        made, fleet = Assembler(), Fleet(FLEET.members, (ROUTER, OTHER))
        answers = {ROUTER: report(), OTHER: report(instance="o")}
        made.look(fleet, answers, {}, 100.0)
        silent = answers | {OTHER: Unanswered("no answer within 1 s")}
        held = made.look(fleet, silent, {}, 101.0)
        assert (held.taken_at, held.arrivals) == (100.0, ())
        late = signal(held, f"router {OTHER}")
        assert (late.health, late.needed, late.age_seconds) == (Health.STALE, False, 1.0)
        assert signal(made.look(fleet, silent, {}, 107.0), f"router {OTHER}").needed
        back = made.look(fleet, {ROUTER: report(8), OTHER: report(8, instance="o")}, {}, 108.0)
        assert sum(a.requests for a in back.arrivals) == 16, "nothing that was counted meanwhile is lost"

    def test_counting_goes_on_after_another_observer(self) -> None:
        made = Assembler(base=Totals(finished=500, generated_tokens=9000))
        made.look(FLEET, {ROUTER: report(finished=3)}, {}, 100.0)
        assert made.look(FLEET, {ROUTER: report(finished=5)}, {}, 101.0).finished == 502

    def test_parts_of_misses_are_added_up_over_routers_and_restarts(self) -> None:
        made, fleet = Assembler(), Fleet(FLEET.members, (ROUTER, OTHER))

        def look(here: MissedIn | None, there: MissedIn | None, at: float, instance: str = "i") -> MissedIn | None:
            answers = {
                ROUTER: report(missed_in=here, instance=instance),
                OTHER: report(missed_in=there, instance="o"),
            }
            return made.look(fleet, answers, {}, at).missed_in

        assert look(MissedIn(90), MissedIn(70), 100.0) == MissedIn()
        assert look(MissedIn(92, decode=1), MissedIn(70, 3), 101.0) == MissedIn(2, 3, 1)
        assert look(MissedIn(failed=4), MissedIn(70, 3), 102.0, "j") == MissedIn(2, 3, 1, failed=4), "it started anew"
        assert look(MissedIn(failed=4), None, 103.0, "j") is None, "of one of two it would look like half"
        assert look(MissedIn(failed=5), MissedIn(70, 9), 104.0, "j") == MissedIn(2, 3, 1, failed=5)
        assert look(MissedIn(failed=5), MissedIn(71, 9), 105.0, "j") == MissedIn(3, 3, 1, failed=5)
        assert look(MissedIn(), MissedIn(71, 9), 106.0, "j") == MissedIn(3, 3, 1, failed=5), (
            "backwards: it started anew"
        )

    def test_parts_of_misses_go_on_after_another_observer(self) -> None:
        for before in (MissedIn(7), None):
            made = Assembler(base=Totals(missed_in=before))
            made.look(FLEET, {ROUTER: report(missed_in=MissedIn(3))}, {}, 100.0)
            seen = made.look(FLEET, {ROUTER: report(missed_in=MissedIn(5))}, {}, 101.0)
            assert seen.missed_in == MissedIn(9 if before else 2)


class TestTrust:
    def test_without_a_router_nothing_is_known(self) -> None:
        seen = Assembler().look(Fleet(FLEET.members, ()), {}, {}, 100.0)
        assert (seen.finished, signal(seen, "routers").health) == (None, Health.MISSING)

    def test_html_is_invalid_and_missing_is_missing(self) -> None:
        for invalid, health in ((True, Health.INVALID), (False, Health.MISSING)):
            made, answer = Assembler(), Unanswered("why", invalid)
            made.look(FLEET, {ROUTER: answer}, {}, 100.0)
            seen = signal(made.look(FLEET, {ROUTER: answer}, {}, 110.0), f"router {ROUTER}")
            assert (seen.health, seen.needed) == (health, True)

    def test_a_serving_worker_that_is_silent_is_stale(self) -> None:
        answer = RouterReport(Totals(), (worker("p0", age=9.0), worker("d0", "decode", "dead", 9.0), worker("d1")), "i")
        seen = Assembler().look(FLEET, {ROUTER: answer}, {}, 100.0)
        frozen, dead = signal(seen, "worker p0 load"), signal(seen, "worker d0 load")
        assert (frozen.health, frozen.needed) == (Health.STALE, True)
        assert not dead.needed, "routers have given it up: that it is silent is no news"
        loads = {w.name: w for w in seen.workers}
        assert (loads["d0"].role, loads["d0"].decoding, loads["d1"].decoding) == (None, 0, 2)

    def test_old_figures_keep_their_doubts_when_the_router_falls_silent(self) -> None:
        made = Assembler()
        workers = (worker("p0", age=100.0), worker("d0"), worker("d1"))
        made.look(FLEET, {ROUTER: RouterReport(Totals(), workers, "i")}, {}, 100.0)
        seen = made.look(FLEET, {ROUTER: Unanswered("late")}, {}, 101.0)
        assert [(s.name, s.health) for s in seen.signals if s.needed] == [("worker p0 load", Health.STALE)]
        healed = made.look(FLEET, {ROUTER: report()}, {}, 102.0)
        assert signal(healed, "worker p0 load").health == Health.FRESH

    def test_the_freshest_of_two_reports_counts(self) -> None:
        old, new = worker("p0", age=4.0, running=1), worker("p0", age=0.2, running=2)
        fleet = Fleet(FLEET.members[:1], (ROUTER, OTHER))
        answers = {ROUTER: RouterReport(Totals(), (old,), "i"), OTHER: RouterReport(Totals(), (new,), "o")}
        assert Assembler().look(fleet, answers, {}, 100.0).workers[0].requests == 2

    def test_a_worker_that_nobody_reports_is_on_its_way(self) -> None:
        seen = Assembler().look(FLEET, {ROUTER: RouterReport(Totals(), (), "i")}, {}, 100.0)
        assert [(w.name, w.role, w.target) for w in seen.workers] == [
            ("p0", None, "prefill"),
            ("d0", None, "decode"),
            ("d1", None, "decode"),
        ]
        assert not any(s.needed and s.health == Health.MISSING for s in seen.signals)

    def test_a_member_that_is_known_not_to_serve_does_not(self) -> None:
        fleet = Fleet((Member("p0", "prefill", serving=False),), (ROUTER,))
        assert Assembler().look(fleet, {ROUTER: report()}, {}, 100.0).workers[0].role is None

    def test_pages_of_no_use_are_said_and_hold_nothing(self) -> None:
        made = Assembler()
        page = Page(NONE)
        made.look(FLEET, {ROUTER: report()}, {"p0": page, "d0": Unanswered("status 500", invalid=True)}, 100.0)
        seen = made.look(FLEET, {ROUTER: report()}, {}, 104.0)
        good, bad, never = (signal(seen, f"worker {name} fits") for name in ("p0", "d0", "d1"))
        assert (good.health, good.age_seconds) == (Health.FRESH, 4.0)
        assert (bad.health, bad.needed, bad.note) == (Health.INVALID, False, "status 500")
        assert never.health == Health.MISSING

    def test_a_new_process_is_cold(self) -> None:
        made = Assembler()
        made.look(FLEET, {ROUTER: report()}, {}, 100.0)
        again = RouterReport(Totals(), (worker("p0", engine_id="f"), worker("d0"), worker("d1")), "i")
        assert signal(made.look(FLEET, {ROUTER: again}, {}, 101.0), "worker p0 fits").health == Health.COLD
        assert signal(made.look(FLEET, {ROUTER: again}, {}, 140.0), "worker p0 fits").health == Health.MISSING


def test_one_page_out_of_range_spoils_no_later_look() -> None:
    made = Assembler()
    for at in range(5):
        totals = NONE._replace(decode_steps=100.0 * at, decode_resident=math.nan if at == 1 else 1000.0 * at)
        seen = made.look(FLEET, {ROUTER: report()}, {"d0": Page(totals)}, 100.0 + at)
    (learnt,) = [worker for worker in seen.workers if worker.name == "d0"]
    assert (learnt.decode_steps, learnt.decode_resident) == (200, 2000)


def test_speed_is_learnt_from_pages() -> None:
    made = Assembler()
    answers = {ROUTER: report()}
    made.look(FLEET, answers, {"p0": Page(NONE), "d0": Page(NONE)}, 100.0)
    assert made.workers() is None
    prompts = NONE._replace(prompt_tokens=5000, prompt_seconds=1.0)
    decodes = Counters(0, 0, 100, 2.0, 400, 40_000, 2.0)
    seen = made.look(FLEET, answers, {"p0": Page(prompts), "d0": Page(decodes)}, 115.0)
    learnt = made.workers()
    assert learnt is not None
    assert (learnt.prefill_velocity, learnt.kv_tokens, learnt.max_batch) == (5000, 1600, 64)
    d0 = next(w for w in seen.workers if w.name == "d0")
    assert (d0.decode_steps, d0.decode_seconds, d0.decode_batch, d0.decode_resident) == (100, 2.0, 400, 40_000)


ANSWERS = st.sampled_from(["good", "silent", "html", "restart", "frozen", "empty", "strange roles"])
POLICY = Policy(
    ttft_seconds=1.0,
    tpot_seconds=0.05,
    gear=Gear(1.0, False),
    workers=Workers(5000, 0.02, 1e-7, 16_000, sequence_seconds=0.0005),
    bounds=Bounds(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ANSWERS, max_size=60), st.integers(0, 2**32))
@example(["good", "good", "good", "good", "frozen", "silent"], 0)
def test_whatever_comes_the_law_holds_or_decides(kinds: list[str], seed: int) -> None:
    """Never a crash, never a total that changes; a move only on a look at which everything that is needed was there."""
    rng, made, memory = random.Random(seed), Assembler(), Memory()
    requests, instance = 0, 0
    for second, kind in enumerate(["good"] * 60 + kinds):
        now = 1000.0 + second + rng.random() / 2
        if kind == "restart":
            instance, requests = instance + 1, 0
        requests += rng.randrange(20)
        loads = {"queued_prefill_tokens": rng.randrange(20_000), "decoding": rng.randrange(60)}
        workers = tuple(worker(name, **loads) for name in ("p0", "d0", "d1"))
        if kind == "frozen":
            workers = (worker("p0", age=100.0), *workers[1:])
        if kind == "empty":
            workers = ()
        if kind == "strange roles":
            workers = tuple(msgspec.structs.replace(w, role="both") for w in workers)
        totals = Totals(requests, requests * 900, finished=requests // 2, generated_tokens=requests * 50)
        answer: RouterReport | Unanswered = RouterReport(totals, workers, str(instance))
        if kind in ("silent", "html"):
            answer = Unanswered(kind, invalid=kind == "html")
        observed = made.look(FLEET, {ROUTER: answer}, {}, now)
        decision, memory = decide(observed, POLICY, memory, now)
        check(decision, kind)


def check(decision: Decision, kind: str) -> None:
    assert decision.target.total == 3
    assert decision.reason
    if kind in ("silent", "html", "frozen"):
        assert decision.target == decision.before
    if kind == "frozen":
        assert decision.reason == reasons.METRICS_STALE
