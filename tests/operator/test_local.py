"""The pure parts of local mode, its state folder and its ports."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forebay_operator.api.load import load_manifest
from forebay_operator.api.ratio import Ratio, parse_ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.local import table
from forebay_operator.local.backoff import Backoff
from forebay_operator.local.chat import Answer, printable
from forebay_operator.local.containers import Container, Places, build_containers, pool_sizes
from forebay_operator.local.errors import InputError
from forebay_operator.local.gpus import visible_gpus
from forebay_operator.local.limits import check_supported, ignored_fields
from forebay_operator.local.load import RouterLoad, parse_report, parse_router_load
from forebay_operator.local.probes import Probe, Verdict, parse_probe
from forebay_operator.local.rescaling import softened
from forebay_operator.local.roles import RatioRefused, WorkerRole, fit_ratio, switch
from forebay_operator.local.status import ContainerStatus, DecisionStatus, UpStatus

EXAMPLES = Path(__file__).parents[2] / "examples"


def model(spec: dict[str, Any]) -> DisaggregatedModel:
    base: dict[str, Any] = {
        "model": {"servedName": "m"},
        "engine": {"type": "Simulated"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    }
    manifest = {
        "apiVersion": "serving.forebay.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": "m"},
        "spec": {key: value for key, value in (base | spec).items() if value is not None},
    }
    return load_manifest(yaml.safe_dump(manifest), "m.yaml").model


def places(workers: int, **changes: Any) -> Places:
    values: dict[str, Any] = {
        "router_host": "0.0.0.0",
        "router_port": 8000,
        "worker_ports": tuple(range(9000, 9000 + workers)),
        "token_file": "/state/token",
        "workers_file": "/state/workers.json",
    }
    return Places(**(values | changes))


def test_containers_of_the_example() -> None:
    smollm2 = load_manifest((EXAMPLES / "smollm2.yaml").read_text(), "x").model
    prefill, decode, router = build_containers(smollm2, places(2, model_dir="/models/s"))
    assert [c.name for c in (prefill, decode, router)] == ["prefill-0", "decode-0", "router-0"]
    assert [c.pool for c in (prefill, decode, router)] == ["prefill", "decode", None]
    assert prefill.argv == (
        "forebay-engine",
        "--type=native",
        "--name=prefill-0",
        "--served-name=smollm2",
        "--host=127.0.0.1",
        "--port=9000",
        "--advertise-host=127.0.0.1",
        "--token-file=/state/token",
        "--dtype=float32",
        "--kv-memory=512Mi",
        "--block-size=16",
        "--threads=1",
        "--transport=auto",
        "--lease-seconds=30",
        "--pull-timeout-seconds=20",
        "--drain-timeout-seconds=60",
        "--model-dir=/models/s",
        "--max-model-len=4096",
    )
    assert router.argv == (
        "forebay-router",
        "--name=router-0",
        "--host=0.0.0.0",
        "--port=8000",
        "--workers-file=/state/workers.json",
        "--token-file=/state/token",
        "--served-name=smollm2",
        "--ttft-ms=2000",
        "--tpot-ms=200",
        "--drain-timeout-seconds=60",
    )
    assert decode.env["OMP_NUM_THREADS"] == "1"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == ""
    assert decode.env["POD_NAME"] == "decode-0"
    assert (router.host, router.port) == ("127.0.0.1", 8000)
    assert decode.readiness is not None
    assert (decode.readiness.path, decode.readiness.port) == ("/ready", 9001)
    assert decode.grace_seconds == 90


def test_environment_is_expanded_in_order_and_gpus_are_dealt_out() -> None:
    source = model(
        {
            "engine": {
                "env": [
                    {"name": "URL", "value": "http://$(POD_IP):$(PORT)/$(LATER)"},
                    {"name": "LATER", "value": "x"},
                    {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                ]
            },
            "model": {"servedName": "m", "source": "hostpath:///m"},
            "prefill": {"replicas": 1, "gpus": {"count": 2}},
            "decode": {"replicas": 2, "gpus": {"count": 1}},
        }
    )
    prefill, *decode, router = build_containers(source, places(3, gpus=("0", "1", "2", "3"), model_dir="/m"))
    assert prefill.env["URL"] == "http://127.0.0.1:9000/$(LATER)"
    assert "SECRET" not in prefill.env
    assert [c.env["CUDA_VISIBLE_DEVICES"] for c in (prefill, *decode)] == ["0,1", "2", "3"]
    assert "CUDA_VISIBLE_DEVICES" not in router.env


def test_a_pod_template_changes_what_runs() -> None:
    patch = {
        "spec": {"containers": [{"name": "engine", "command": ["mine"], "args": ["$(PORT)"], "livenessProbe": None}]}
    }
    decode = build_containers(model({"decode": {"replicas": 1, "podTemplate": patch}}), places(2))[1]
    assert decode.argv == ("mine", "9001")
    assert decode.liveness is None
    for broken, why in (
        ({"command": None}, "without a command"),
        ({"readinessProbe": {"exec": {"command": ["x"]}, "httpGet": None}}, "only httpGet probes"),
        ({"readinessProbe": {"httpGet": {"port": 81}}}, "none of the container's"),
    ):
        patch = {"spec": {"containers": [{"name": "engine", **broken}]}}
        with pytest.raises(InputError, match=why):
            build_containers(model({"decode": {"replicas": 1, "podTemplate": patch}}), places(2))


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ({"prefill": {"replicas": 3}, "decode": {"replicas": 2}}, (3, 2)),
        ({"prefill": None, "scaling": {"prefill": {"minReplicas": 2, "maxReplicas": 5}}}, (2, 1)),
        (
            {
                "prefill": None,
                "decode": None,
                "replicas": 7,
                "scaling": {"prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 4}},
            },
            (3, 4),
        ),
    ],
)
def test_pool_sizes(spec: dict[str, Any], sizes: tuple[int, int]) -> None:
    assert tuple(pool_sizes(model(spec)).values()) == sizes


def test_what_is_not_honoured_is_said() -> None:
    lines = ignored_fields(
        model(
            {
                "engine": {
                    "type": "Simulated",
                    "image": "i",
                    "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                },
                "prefill": None,
                "scaling": {"prefill": {"maxReplicas": 2}, "maxGPUs": 8},
                "decode": {
                    "replicas": 1,
                    "nodeSelector": {"a": "b"},
                    "podTemplate": {"spec": {"containers": [{"name": "sidecar"}]}},
                },
                "router": {"replicas": 2},
                "drain": {"policy": "Move"},
            }
        )
    )
    said = [line.split(" ")[0] for line in lines]
    assert said == [
        "spec.engine.image",
        "spec.decode.nodeSelector",
        "spec.drain.policy",
        "spec.router.replicas",
        "spec.engine.env[0].valueFrom",
        "spec.decode.podTemplate:",
    ]
    assert ignored_fields(model({})) == []


def test_what_needs_a_cluster_is_refused() -> None:
    with pytest.raises(InputError, match="needs a cluster"):
        check_supported(model({"model": {"servedName": "m", "source": "image://x"}}), api_keys_given=False)
    keys = model({"router": {"apiKeysSecretRef": {"name": "k"}}})
    with pytest.raises(InputError, match="--api-keys-file"):
        check_supported(keys, api_keys_given=False)
    check_supported(keys, api_keys_given=True)
    router = build_containers(keys, places(2, api_keys_file="/k"))[-1]
    assert "--api-keys-file=/k" in router.argv


@pytest.mark.parametrize(
    ("environment", "devices", "found"),
    [
        ({}, ["null", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"], ["2", "10"]),
        ({"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}, ["nvidia0"], ["3", "GPU-abc"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], []),
        ({}, [], []),
    ],
)
def test_visible_gpus(environment: dict[str, str], devices: list[str], found: list[str]) -> None:
    assert visible_gpus(environment, devices) == found


def test_back_off_doubles_to_its_limit_and_starts_over_after_a_good_run() -> None:
    backoff = Backoff(first=1, limit=5, ran_well=60)
    assert [backoff.after(ran) for ran in (0, 0, 0, 0, 59)] == [1, 2, 4, 5, 5]
    assert [backoff.after(ran) for ran in (60, 0)] == [1, 2]


@pytest.mark.parametrize(
    ("results", "verdicts"),
    [
        ("+", [True]),
        ("---", [None, None, False]),
        ("+--+", [True, True, True, True]),
        ("+---+", [True, True, True, False, True]),
        ("--+---", [None, None, True, True, True, False]),
    ],
)
def test_a_verdict_needs_results_in_a_row(results: str, verdicts: list[bool | None]) -> None:
    verdict = Verdict(Probe("/", 1, failure_threshold=3))
    assert [verdict.add(result == "+") for result in results] == verdicts


def test_probe_defaults_are_those_of_kubernetes() -> None:
    probe = parse_probe({"httpGet": {"path": "/x", "port": "http"}, "periodSeconds": 0}, {"http": 5})
    assert probe == Probe("/x", 5, 0.0, 10.0, 1.0, 1, 3, None)


roles = st.sampled_from(["prefill", "decode"])
workers_strategy = st.lists(st.tuples(roles, roles, st.integers(0, 5)), min_size=2, max_size=12).map(
    lambda rows: [WorkerRole(f"w{i}", pool, role, load) for i, (pool, role, load) in enumerate(rows)]
)


@given(workers_strategy, st.data())
def test_a_switch_reaches_its_target_by_the_fewest_moves_homewards_and_of_the_least_loaded(
    workers: list[WorkerRole], data: st.DataObject
) -> None:
    prefill = data.draw(st.integers(1, len(workers) - 1))
    changed = switch(workers, Ratio(prefill, len(workers) - prefill))
    after = {worker.name: changed.get(worker.name, worker.role) for worker in workers}
    before = sum(worker.role == "prefill" for worker in workers)
    assert sum(role == "prefill" for role in after.values()) == prefill
    assert len(changed) == abs(prefill - before)
    moved = [worker for worker in workers if worker.name in changed]
    stayed = [worker for worker in workers if worker.name not in changed and moved and worker.role == moved[0].role]

    def cost(worker: WorkerRole) -> tuple[bool, int]:
        return worker.pool != after[moved[0].name], worker.load

    assert max(map(cost, moved), default=(False, 0)) <= min(map(cost, stayed), default=(True, 99))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.floats(0.0, 1.0), max_size=8),
)
def test_loans_never_cross(prefill: list[int], decode: list[int], shares: list[float]) -> None:
    """Whatever the targets and loads were meanwhile, no worker of each pool does the other's work at once."""
    workers = [WorkerRole(f"p{i}", "prefill", "prefill", load) for i, load in enumerate(prefill)]
    workers += [WorkerRole(f"d{i}", "decode", "decode", load) for i, load in enumerate(decode)]
    for share in shares:
        wanted = 1 + round(share * (len(workers) - 2))
        changed = switch(workers, Ratio(wanted, len(workers) - wanted))
        workers = [WorkerRole(w.name, w.pool, changed.get(w.name, w.role), (w.load * 7 + wanted) % 6) for w in workers]
        assert len({worker.pool for worker in workers if worker.role != worker.pool}) <= 1


def test_the_one_on_loan_goes_home_first_however_busy() -> None:
    workers = [WorkerRole("a", "prefill", "prefill", 0), WorkerRole("b", "decode", "prefill", 9)]
    workers += [WorkerRole("c", "decode", "decode", 0)]
    assert switch(workers, Ratio(1, 2)) == {"b": "decode"}


def test_a_dead_worker_is_not_switched_however_idle_it_is() -> None:
    workers = [WorkerRole("dead", "decode", "decode", 0, ready=False), WorkerRole("busy", "decode", "decode", 9)]
    workers += [WorkerRole("p", "prefill", "prefill", 0)]
    assert switch(workers, Ratio(2, 1)) == {"busy": "prefill"}
    workers[1] = WorkerRole("also", "decode", "decode", 0, ready=False)
    with pytest.raises(RatioRefused, match=r"2:1 needs 1 more in role prefill, and only 0 .*wait for also, dead"):
        switch(workers, Ratio(2, 1))


@pytest.mark.parametrize(
    ("asked", "workers", "scaling", "outcome"),
    [
        ("1:2", 3, {}, "1:2"),
        ("1:2", 6, {}, "2:4"),
        ("1:2", 4, {}, "1:2 does not fit 4 workers; these do: 1:3, 2:2, 3:1"),
        ("1:5", 6, {"ratio": {"min": "1:4", "max": "2:1"}}, "1:5 is outside spec.scaling.ratio, 1:4 to 2:1"),
        ("1:1", 2, {"roleSwitching": "Disabled"}, "spec.scaling.roleSwitching is Disabled"),
    ],
)
def test_ratios_by_hand(asked: str, workers: int, scaling: dict[str, Any], outcome: str) -> None:
    source = model({"scaling": scaling})
    if len(outcome) < 5:
        assert str(fit_ratio(parse_ratio(asked), workers, source)) == outcome
    else:
        with pytest.raises(RatioRefused, match=outcome.split(";")[0]):
            fit_ratio(parse_ratio(asked), workers, source)


REPORT = {"engine_id": "e", "epoch": 3, "running": 2}


@pytest.mark.parametrize(
    ("body", "names", "ttft"),
    [
        ({"workers": [{"name": "a", "load": REPORT}], "ttft_p95_ms": 5}, ["a"], 5.0),
        ({"workers": {"a": {"load": REPORT}, "b": REPORT}}, ["a", "b"], None),
        ({"workers": [{"name": "a", **REPORT}]}, ["a"], None),
        ({"workers": [{"name": "a", "load": None}, {"load": REPORT}, 3], "ttft_p95_ms": "x"}, [], None),
        ({"workers": 4, "ttft_p95_ms": True}, [], None),
        ([], [], None),
    ],
)
def test_router_load_is_read_defensively(body: Any, names: list[str], ttft: float | None) -> None:
    load = parse_router_load(json.dumps(body).encode())
    assert list(load.workers) == names
    assert load.ttft_p95_ms == ttft
    assert all(report.running == 2 for report in load.workers.values())


HUGE = "9" * 400
DEEP = "[" * 100_000


@pytest.mark.parametrize("spoilt", [HUGE, f"-{HUGE}"])
def test_a_figure_beyond_all_range_is_unknown(spoilt: str) -> None:
    load = parse_router_load(f'{{"ttft_p95_ms": {spoilt}, "in_flight": {spoilt}, "tpot_p95_ms": 5}}'.encode())
    assert (load.ttft_p95_ms, load.in_flight, load.tpot_p95_ms) == (None, None, 5.0)


@pytest.mark.parametrize("raw", [DEEP, f'{{"workers": {DEEP}', f'{{"in_flight": 1, "new": {DEEP}'])
def test_an_answer_without_an_end_is_unreadable(raw: str) -> None:
    """Nesting that no parser follows."""
    assert parse_router_load(raw.encode()) == RouterLoad()
    assert parse_report(raw) is None


@pytest.mark.parametrize("spoilt", [f"-{HUGE}", HUGE])
def test_a_workers_figure_that_cannot_be_is_as_if_not_told(spoilt: str) -> None:
    """The table divides by blocks."""
    text = f'{{"engine_id": "e", "epoch": 1, "running": 2, "free_blocks": {spoilt}, "total_blocks": 4}}'
    for report in (parse_report(text), parse_router_load(f'{{"workers": {{"a": {text}}}}}'.encode()).workers["a"]):
        assert report is not None
        assert (report.running, report.free_blocks, report.total_blocks) == (2, 0, 4)


@given(st.binary())
def test_router_load_is_never_an_error(raw: bytes) -> None:
    parse_router_load(raw)
    parse_report(raw.decode(errors="replace"))


def status(**changes: Any) -> UpStatus:
    worker = ContainerStatus(
        "decode-0", "decode", "prefill", "Running", True, 1, 2, 3, None, "log", 4, 5, 0.256, 3 * 2**20, "TCP"
    )
    router = ContainerStatus("router-0", None, None, "BackOff", False, 1, None, 0, None, "log")
    values = {"name": "m", "model": "m", "served_name": "s", "endpoint": "http://h/v1", "phase": "Ready", "ready": True}
    return UpStatus(
        **(values | {"ratio": "1:0", "pid": 1, "containers": [worker, router], "ttft_p95_ms": 12.4} | changes)
    )


def test_plain_lines_and_table_show_the_same() -> None:
    assert table.plain(status()) == (
        "m: Ready  s at http://h/v1  prefill:decode 1:0  in flight -  TTFT p95 12 ms  TPOT p95 -  "
        "scaling Off: no decision yet\n"
        "  decode-0 prefill Ready running 4 waiting 5 kv 26 % moved 3.0 MiB transport TCP restarts 3\n"
        "  router-0 router BackOff restarts 0"
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table.table(status()))
    shown = console.export_text()
    assert "prefill (loan)" in shown
    assert "26 %" in shown


def test_what_a_process_said_last_is_shown_while_it_is_not_ready() -> None:
    worker = ContainerStatus("decode-0", "decode", "decode", "BackOff", False, 1, None, 3, "x", "log", last_error="why")
    ready = ContainerStatus("decode-1", "decode", "decode", "Running", True, 1, 2, 3, "x", "log", last_error="old")
    shown = status(containers=[worker, ready])
    assert table.troubles(shown) == ["decode-0 ended (3 restarts), last: why"]
    assert table.plain(shown).endswith("\n  decode-0 ended (3 restarts), last: why")


@pytest.mark.parametrize(
    ("reason", "learnt", "ready_for", "shown"),
    [
        ("MetricsMissing", False, None, "WarmingUp"),
        ("MetricsMissing", False, 3.0, "WarmingUp"),
        ("MetricsMissing", False, 60.0, "MetricsMissing"),
        ("MetricsMissing", True, 3.0, "MetricsMissing"),
        ("Balanced", False, None, "Balanced"),
    ],
)
def test_figures_that_could_not_come_yet_are_not_called_missing(
    reason: str, learnt: bool, ready_for: float | None, shown: str
) -> None:
    told = DecisionStatus(time="t", reason=reason, message="m", to="1:1", from_="1:1")
    assert softened(told, learnt=learnt, ready_for=ready_for).reason == shown


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\x9b1mc\n\té\u200d👩") == "a[31mb1mc\n\té\u200d👩"


def test_the_summary_of_an_answer() -> None:
    answer = Answer("p0", "d0", "text", "length", 5, 0.1, 0.5)
    assert answer.summary() == "prefill p0, decode d0, 5 tokens, TTFT 100 ms, TPOT 100 ms, ended by length"


def test_container_is_plain_data() -> None:
    first, second = (build_containers(model({}), places(2)) for _ in range(2))
    assert first == second
    assert all(isinstance(container, Container) for container in first)
