"""Each condition from what was observed, one function a condition. Pure; they never read their own earlier verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from forebay_operator.api.conditions import Reason, Type
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.ratio import Ratio, parse_ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.decide import reasons
from forebay_operator.observe.types import DeploymentView, Observation, PodView, Problem, ProblemKind
from forebay_operator.status.pinning import Pinning
from forebay_operator.status.remedies import REMEDIES, describe
from forebay_operator.status.transport import TransportFacts, is_worse

UNPLACED_SECONDS: Final = 300.0
"""A pod that the cluster has had no node for so long, and has no node for by its labels and GPUs, needs a person."""

_MISSING: Final[dict[Pool, Reason]] = {"prefill": Reason.NO_PREFILL_WORKER, "decode": Reason.NO_DECODE_WORKER}

_LIMITS: Final = {
    reasons.LIMITED_BY_BOUNDS: "the bounds in scaling.prefill and scaling.decode",
    reasons.LIMITED_BY_RATIO: "scaling.ratio",
    reasons.LIMITED_BY_BUDGET: "scaling.maxGPUs",
    reasons.LIMITED_BY_RATE: "policies in scaling.behavior, or scaling.roleSwitching Disabled",
    reasons.LIMITED_BY_PAUSE: "scaling.pause, or a selectPolicy of Disabled in scaling.behavior",
}
"""Where a limit of the law's is set."""

_LIMITED: Final = {
    reasons.LIMITED_BY_RATIO: Reason.LIMITED_BY_RATIO,
    reasons.LIMITED_BY_BUDGET: Reason.LIMITED_BY_BUDGET,
    reasons.LIMITED_BY_RATE: Reason.LIMITED_BY_RATE,
    reasons.LIMITED_BY_PAUSE: Reason.LIMITED_BY_PAUSE,
}
_WANTS_MORE: Final = frozenset({reasons.AT_MOST, reasons.SHORT})
_WANTS_FEWER: Final = frozenset({reasons.AT_LEAST, reasons.IDLE})

Verdict = tuple[Literal["True", "False", "Unknown"], Reason, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions are made of."""

    spec: DisaggregatedModelSpec | None
    """None: it can't be read."""

    observation: Observation
    targets: Mapping[Pool, int]
    pinning: Pinning | None
    transport: TransportFacts
    now_unix: float
    limited_by: str | None = None
    """Of the last decision of the scaling law; None: there was none."""

    decided: frozenset[str] = frozenset()
    """The rules that made that decision (decide/reasons.py)."""

    @property
    def serving(self) -> dict[Pool, int]:
        return {pool: sum(not self._refused(pod) for pod in self.observation.in_role(pool)) for pool in POOLS}

    def _refused(self, pod: PodView) -> bool:
        """It is on a worse transport than transfer.required allows: its probe will fail, if it does not yet."""
        if self.spec is None or not self.spec.transfer.required or pod.load is None:
            return False
        return is_worse(pod.load.transport, self.spec.transfer.transport)

    @property
    def first_problem(self) -> str:
        ordered = sorted(self.observation.problems, key=lambda problem: not REMEDIES[problem.kind].stalls)
        return describe(ordered[0]) if ordered else ""


def ready(facts: Facts) -> Verdict:
    serving = facts.serving
    if facts.observation.router_ready == 0:
        return "False", Reason.NO_ROUTER, _because("no router is ready", facts)
    missing: list[Pool] = [pool for pool in POOLS if serving[pool] == 0]
    if len(missing) == len(POOLS):
        return "False", Reason.NO_WORKER, _because("no worker is ready", facts)
    if not missing:
        return "True", Reason.SERVING, f"{serving['prefill']} prefill and {serving['decode']} decode workers serve"
    gone = missing[0]
    if facts.spec is not None and facts.spec.router.fallback == "Refuse":
        return "False", _MISSING[gone], _because(f"no {gone} worker is ready and router.fallback is Refuse", facts)
    text = f"no {gone} worker is ready; the other role's {sum(serving.values())} do both phases"
    return "True", Reason.SERVING_DEGRADED, _because(text, facts)


def _because(text: str, facts: Facts) -> str:
    return f"{text}. {facts.first_problem}" if facts.first_problem else text


def reconciling(facts: Facts) -> Verdict:
    """What a change of the spec brings about, and nothing else: a rescale must not show in a GitOps tool."""
    observation = facts.observation
    if stalled(facts)[0] == "True":
        # kstatus takes the first of the two that is True: what waits for a person has failed, and is not in progress.
        return "False", Reason.STALLED, "it can't go on before a person has acted: see Stalled"
    routers = [d for d in observation.deployments if d.pool is None]
    if not routers or any(not any(d.pool == pool for d in observation.deployments) for pool in POOLS):
        return "True", Reason.STARTING, "children are being made"
    for pool in POOLS:
        if _rolls(observation, pool):
            return "True", Reason.ROLLING_OUT, f"{pool} workers are being moved to the latest revision"
    if any(_router_rolls(observation, router) for router in routers):
        return "True", Reason.ROLLING_OUT, "routers are being moved to the latest revision"
    if not any(facts.serving.values()) or observation.router_ready == 0:
        return "True", Reason.STARTING, _because("waiting for the first workers and a router", facts)
    return "False", Reason.UP_TO_DATE, "children are as the spec wants them"


def _rolls(observation: Observation, pool: Pool) -> bool:
    """An older revision's Deployment is there until the last worker of the latest one serves (act/plan.py), and longer
    where a pod of it is stuck Terminating."""
    mine = [d for d in observation.deployments if d.pool == pool]
    if not observation.wanted:
        return sum(d.replicas > 0 for d in mine) > 1
    older = [d for d in mine if d.name not in observation.wanted]
    latest = [d for d in mine if d.name in observation.wanted]
    return any(d.replicas for d in older) or (bool(older) and not any(observation.all_ready(d) for d in latest))


def _router_rolls(observation: Observation, router: DeploymentView) -> bool:
    if observation.wanted.get(router.name, router.revision) != router.revision:
        return True
    behind = router.observed_generation < router.generation
    return behind or router.updated < router.replicas or router.pods > router.updated


def stalled(facts: Facts) -> Verdict:
    stalling = [problem for problem in facts.observation.problems if REMEDIES[problem.kind].stalls]
    if stalling:
        more = f" (and {len(stalling) - 1} more)" if len(stalling) > 1 else ""
        return "True", REMEDIES[stalling[0].kind].reason, describe(stalling[0]) + more
    if facts.pinning is not None and facts.pinning.satisfied is False and _unplaced(facts):
        return "True", facts.pinning.reason, facts.pinning.message
    return "False", Reason.NOT_STALLED, "nothing needs a person"


def _unplaced(facts: Facts) -> bool:
    return any(
        pod.node is None and not pod.terminating and facts.now_unix - pod.created_unix >= UNPLACED_SECONDS
        for pod in facts.observation.pods
    )


def pools_available(facts: Facts) -> Verdict:
    serving = facts.serving
    text = ", ".join(f"{pool} {serving[pool]}/{facts.targets[pool]}" for pool in POOLS)
    for pool in POOLS:
        if serving[pool] < _fewest(facts.spec, pool):
            return "False", Reason.BELOW_MINIMUM, _because(f"{text}: {pool} is below its minimum", facts)
    for pool in POOLS:
        if serving[pool] < facts.targets[pool]:
            return "False", Reason.BELOW_TARGET, _because(f"{text}: {pool} is below its target", facts)
    return "True", Reason.AT_TARGET, text


def _fewest(spec: DisaggregatedModelSpec | None, pool: Pool) -> int:
    """A fixed pool's workers may serve in either role, down to one."""
    if spec is None or spec.pool(pool).replicas is not None:
        return 1
    return spec.bounds(pool).min_replicas


def pinning_satisfied(facts: Facts) -> Verdict:
    if facts.pinning is None:
        return "Unknown", Reason.INVALID_SPEC, "the spec can't be read"
    status: Literal["True", "False", "Unknown"] = (
        "Unknown" if facts.pinning.satisfied is None else "True" if facts.pinning.satisfied else "False"
    )
    return status, facts.pinning.reason, facts.pinning.message


def metrics_available(facts: Facts) -> Verdict:
    if facts.observation.router_ready == 0:
        return "False", Reason.METRICS_MISSING, "no router is ready to be asked; scaling holds"
    serving = [pod for pod in facts.observation.pods if pod.serving]
    silent = sum(pod.load is None for pod in serving)
    if (law := facts.observation.metrics) is not None:
        reasons = {"Missing": Reason.METRICS_MISSING, "Stale": Reason.METRICS_STALE}
        return "False", reasons.get(law.health, Reason.METRICS_INVALID), f"{law.message}; scaling holds"
    if facts.observation.latency is None and silent == len(serving):
        return "False", Reason.METRICS_MISSING, "routers could not be asked for load and latency; scaling holds"
    if silent:
        return "False", Reason.METRICS_STALE, f"{silent} of {len(serving)} workers have no fresh report; scaling holds"
    return "True", Reason.METRICS_FRESH, f"load of {len(serving)} workers is fresh"


def scaling_limited(facts: Facts) -> Verdict:
    if facts.observation.limits:
        return "True", Reason.NO_ROOM, "; ".join(facts.observation.limits)
    if facts.spec is not None and facts.spec.scaling.mode == "Off":
        return "False", Reason.SCALING_OFF, "scaling.mode is Off"
    if facts.limited_by is None:
        return "Unknown", Reason.NOT_DECIDED, "no scaling decision has been made yet"
    if facts.limited_by:
        limits = facts.limited_by.split(",")
        where = "; ".join(f"{limit} (set by {_LIMITS[limit]})" if limit in _LIMITS else limit for limit in limits)
        return "True", _limit_reason(limits[0], facts.decided), f"the last decision was limited by {where}"
    return "False", Reason.WITHIN_LIMITS, "the last decision was carried out in full"


def _limit_reason(limit: str, decided: frozenset[str]) -> Reason:
    if limit in _LIMITED:
        return _LIMITED[limit]
    if decided & _WANTS_MORE:
        return Reason.TOO_MANY_REPLICAS
    return Reason.TOO_FEW_REPLICAS if decided & _WANTS_FEWER else Reason.SPLIT_OUT_OF_BOUNDS


def ratio_within_bounds(facts: Facts) -> Verdict:
    serving = facts.serving
    if facts.spec is None or not all(serving.values()):
        return "Unknown", Reason.NO_WORKERS, "one role has no worker, so there is no ratio"
    bounds, now = facts.spec.scaling.ratio, Ratio(serving["prefill"], serving["decode"])
    inside = parse_ratio(bounds.min).at_most(now) and now.at_most(parse_ratio(bounds.max))
    text = f"{now} is {'within' if inside else 'outside'} {bounds.min} to {bounds.max}"
    return ("True", Reason.WITHIN_BOUNDS, text) if inside else ("False", Reason.OUT_OF_BOUNDS, text)


def transport_ready(facts: Facts) -> Verdict:
    unavailable: Sequence[Problem] = [p for p in facts.observation.problems if p.kind is ProblemKind.TRANSPORT]
    if unavailable:
        return "False", Reason.TRANSPORT_UNAVAILABLE, describe(unavailable[0])
    if facts.spec is not None and facts.spec.engine.type == "Simulated":
        return "True", Reason.SIMULATED, "a simulated engine moves no bytes"
    transport = facts.transport
    if not transport.known:
        return "Unknown", Reason.NOT_MEASURED, "no worker has moved KV yet"
    asked = "Auto" if facts.spec is None else facts.spec.transfer.transport
    shown = ", ".join(f"{count} x {name}" for name, count in transport.counts.items())
    worse = transport.worse_than(asked)
    if worse:
        remedy = REMEDIES[ProblemKind.TRANSPORT].text
        return "False", Reason.WORSE_THAN_ASKED, f"transfer.transport is {asked}; workers use {shown}; {remedy}"
    return "True", Reason.IN_USE if asked == "Auto" else Reason.AS_ASKED, f"workers use {shown}"


def paused(facts: Facts) -> Verdict:
    what = "None" if facts.spec is None else facts.spec.scaling.pause
    if what == "None":
        return "False", Reason.NOT_PAUSED, "scaling is not paused"
    return "True", Reason.BY_SPEC, f"scaling.pause is {what}; set it to None to go on"


def foreign_writer(facts: Facts) -> Verdict:
    contested = facts.observation.contested
    if contested:
        return "True", Reason.CONTESTED, "; ".join(contested)
    return "False", Reason.SOLE_WRITER, "nobody else writes what the operator writes"


CONDITIONS: Final = {
    Type.READY: ready,
    Type.RECONCILING: reconciling,
    Type.STALLED: stalled,
    Type.POOLS_AVAILABLE: pools_available,
    Type.PINNING_SATISFIED: pinning_satisfied,
    Type.METRICS_AVAILABLE: metrics_available,
    Type.SCALING_LIMITED: scaling_limited,
    Type.RATIO_WITHIN_BOUNDS: ratio_within_bounds,
    Type.TRANSPORT_READY: transport_ready,
    Type.PAUSED: paused,
    Type.FOREIGN_WRITER: foreign_writer,
}
