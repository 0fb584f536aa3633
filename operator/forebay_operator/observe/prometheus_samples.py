"""Answers of Prometheus' HTTP API to the reports and pages that a direct look would give. Pure.

Ages are between Prometheus' own clock at the query and its own clock at the scrape: whose clock is ahead of whose does
not matter.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from forebay_operator.api.labels import Pool
from forebay_operator.build.names import child_name, router_name
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.router_report import BadReport, ReportedLoad, ReportedWorker, RouterReport, Totals
from forebay_operator.observe.worker_counters import ENGINE, MOST, VLLM, BadMetrics, Page, page_of
from forebay_wire import metrics as names

ROUTER: Final[Mapping[str, str]] = {
    names.ROUTER_OFFERED_REQUESTS: "offered_requests",
    names.ROUTER_OFFERED_PROMPT_TOKENS: "offered_tokens",
    names.ROUTER_CACHED_PROMPT_TOKENS: "cached_tokens",
    names.ROUTER_GENERATED_TOKENS: "generated_tokens",
    names.ROUTER_IN_OBJECTIVE: "in_objective",
    names.ROUTER_REQUESTS: "requests",
    names.ROUTER_MISSED: "missed_in",
}
LOAD: Final[Mapping[str, str]] = {
    names.ENGINE_RUNNING: "running",
    names.ENGINE_WAITING: "waiting",
    names.ENGINE_WAITING_PULLS: "waiting_pulls",
    names.ENGINE_DECODING: "decoding",
    names.ENGINE_QUEUED_PREFILL: "queued_prefill_tokens",
    names.ENGINE_RESIDENT_TOKENS: "resident_decode_tokens",
    names.ENGINE_KV_BLOCKS: "total_blocks",
    names.ENGINE_KV_USAGE: "usage",
}
VLLM_LOAD: Final[Mapping[str, str]] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
}
CACHE: Final = "vllm:cache_config_info"
MAX_BLOCK_SIZE: Final = 1 << 20
NEVER_YET: Final = frozenset({"requests", "generated_tokens", "cached_tokens", "in_objective", "missed_in"})
"""Counters that a router exports from its first request on; the last one, never where it is too old."""

Sample = tuple[Mapping[str, str], float]
"""Labels and value."""


_CUT: Final = 58
"""Kubernetes cuts a pod's name to so many characters and adds five."""


def router_pods(model: str) -> str:
    """Pattern of the names of a model's router pods, and of no other model's, such as one named `<model>-router`."""
    name = router_name(model)
    return f"{name}-[a-z0-9]+(-[a-z0-9]+)?" if len(name) < _CUT else f"{name[:_CUT]}[a-z0-9]+"


def worker_pods(model: str) -> str:
    """Pattern of the names of a model's worker pods, of all revisions. A revision begins with a hexadecimal digit."""
    pools: tuple[Pool, ...] = ("prefill", "decode")
    names = [child_name(model, pool, "0" * 8).removesuffix("0" * 8) for pool in pools]
    return f"({'|'.join(names)})[0-9a-f][a-z0-9]*(-[a-z0-9]+){{0,2}}"


def selector(wanted: Sequence[str], namespace: str, pods: str) -> str:
    """PromQL for the latest samples of these metrics, of pods whose name matches the pattern."""
    of = "|".join(re.escape(name).replace("\\", "\\\\") for name in wanted)
    return f'{{__name__=~"{of}",namespace="{namespace}",pod=~"{pods}"}}'


def samples(result: Any) -> list[Sample]:
    """Of an instant query's `result`. Raises BadReport for anything that is not a vector of plain numbers in range.

    vLLM tells its cache's size in labels: those are numbers too.
    """
    if not isinstance(result, list):
        raise BadReport(f"the answer is no vector of samples: {str(result)[:80]!r}")
    found: list[Sample] = []
    for entry in result:
        try:
            labels, value = entry["metric"], float(entry["value"][1])
            name = labels.get("__name__", "a sample")
            plain = all(isinstance(text, str) for text in labels.values())
        except (TypeError, KeyError, IndexError, ValueError, AttributeError):
            plain = False
        if not plain:
            raise BadReport(f"the answer holds no sample: {str(entry)[:80]!r}")
        if not (math.isfinite(value) and 0 <= value <= MOST):
            raise BadReport(f"{name} of pod {labels.get('pod', '?')} is {value}; it must be from 0 to {MOST:g}")
        if name == CACHE:
            _blocks(labels)
        found.append((labels, value))
    return found


def by_pod(found: Sequence[Sample]) -> dict[str, list[Sample]]:
    pods: dict[str, list[Sample]] = defaultdict(list)
    for labels, value in found:
        if "pod" not in labels:
            raise BadReport("samples carry no label `pod`: scrape the pods with a PodMonitor, or keep that label")
        pods[labels["pod"]].append((labels, value))
    return pods


def ages(scraped: Sequence[tuple[Sample, float]]) -> dict[str, float]:
    """Of each pod's newest sample, from (timestamp() sample, time of the query)."""
    found: dict[str, float] = {}
    for (labels, at), now in scraped:
        pod = labels.get("pod", "")
        age = max(0.0, now - at)
        found[pod] = min(age, found.get(pod, math.inf))
    return found


def router_report(found: Sequence[Sample], workers: tuple[ReportedWorker, ...]) -> RouterReport:
    """Of one router's samples. Misses are not told apart by objective: the law adds them up."""
    values: dict[str, float] = defaultdict(float)
    refused = finished = 0.0
    missed_in: dict[str, int] = {}
    for labels, value in found:
        field = ROUTER.get(labels.get("__name__", ""))
        if field is None:
            continue
        values[field] += value
        if field == "missed_in":
            missed_in[labels.get("part", "")] = round(value)
        elif field == "requests":
            code = labels.get("code", "")
            if re.fullmatch("[0-9]{1,3}", code) is None:
                raise BadReport(f"{names.ROUTER_REQUESTS} has code {code!r}: its labels are not a router's")
            finished += value if int(code) < 400 else 0
            refused += value if int(code) == 429 or int(code) >= 500 else 0
    missing = [name for name, field in ROUTER.items() if field not in values and field not in NEVER_YET]
    if missing:
        raise BadReport(f"{missing[0]} is not there")
    missed = max(0.0, finished + refused - values["in_objective"])
    totals = Totals(
        offered_requests=round(values["offered_requests"]),
        offered_tokens=round(values["offered_tokens"]),
        cached_tokens=round(values["cached_tokens"]),
        generated_tokens=round(values["generated_tokens"]),
        finished=round(finished),
        refused=round(refused),
        missed_ttft=round(missed),
        missed_in=MissedIn.of(missed_in) if missed_in else None,
    )
    return RouterReport(totals, workers)


def reported_workers(
    pods: Mapping[str, Sequence[Sample]], aged: Mapping[str, float], fleet: Fleet, block_size: int, prompt: float
) -> tuple[ReportedWorker, ...]:
    """Workers as a router would report them. Their roles are those of the fleet: Prometheus does not know them.

    `prompt`: mean tokens of a prompt, for vLLM, which counts the requests that wait and not their tokens.
    """
    return tuple(
        ReportedWorker(
            name=member.name,
            role=member.target,
            state="ready" if member.serving else "loading",
            age_seconds=aged.get(member.name),
            load=_load(pods[member.name], block_size, prompt) if member.name in pods else None,
        )
        for member in fleet.members
    )


def _load(found: Sequence[Sample], block_size: int, prompt: float) -> ReportedLoad:
    held = {labels.get("__name__", ""): value for labels, value in found}
    ours = names.ENGINE_RUNNING in held
    fields = {field: held[name] for name, field in (LOAD if ours else VLLM_LOAD).items() if name in held}
    usage = min(1.0, fields.pop("usage", 0.0))
    if not ours:
        blocks, size = _blocks(next((labels for labels, _ in found if labels.get("__name__") == CACHE), {}))
        block_size = size or block_size
        fields["total_blocks"] = float(blocks or 0)
        fields["queued_prefill_tokens"] = min(MOST, fields.get("waiting", 0.0) * prompt)
        fields["decoding"] = fields.get("running", 0.0)
        fields["resident_decode_tokens"] = min(MOST, usage * fields["total_blocks"] * block_size)
    total = fields.get("total_blocks", 0.0)
    fields["free_blocks"], fields["block_size"] = total * (1 - usage), block_size
    return msgspec.convert({field: round(value) for field, value in fields.items()}, ReportedLoad)


def _blocks(labels: Mapping[str, str]) -> tuple[int | None, int | None]:
    """How many there are and the tokens of each, as far as vLLM tells. Raises BadReport."""
    return _whole(labels, "num_gpu_blocks", 0, round(MOST)), _whole(labels, "block_size", 1, MAX_BLOCK_SIZE)


def _whole(labels: Mapping[str, str], label: str, least: int, most: int) -> int | None:
    """None: no number is told, such as vLLM's "None"."""
    text = labels.get(label, "")
    if not text.isdigit():
        return None
    # Only as many digits as the limit has: int() refuses some thousands, and superscripts.
    if not (text.isascii() and len(text) <= len(str(most)) and least <= int(text) <= most):
        pod = labels.get("pod", "?")
        raise BadReport(f"{CACHE} of pod {pod} has {label} {text[:32]!r}; it must be a whole number, {least} to {most}")
    return int(text)


def pages(pods: Mapping[str, Sequence[Sample]]) -> dict[str, Page]:
    """Counters of the workers whose samples have all of them."""
    made: dict[str, Page] = {}
    for pod, found in pods.items():
        ours = any(labels.get("__name__") == names.ENGINE_DECODE_STEPS for labels, _ in found)
        wanted = ENGINE if ours else VLLM
        sums: dict[str, float] = {}
        config: Mapping[str, str] = {}
        for labels, value in found:
            name = labels.get("__name__", "")
            if name in wanted:
                sums[wanted[name]] = sums.get(wanted[name], 0.0) + value
            elif name == CACHE:
                config = labels
        try:
            made[pod] = page_of(sums, wanted, config)
        except BadMetrics:
            continue
    return made
