"""Discovery by pods: which pod is a worker, and the last view's life while the API server is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay_router.candidate import Health
from forebay_router.discovery import Endpoint, View
from forebay_router.main import parse_args
from forebay_router.pods import ApiFailed, ApiServer, PodDiscovery, PodTable, worker_of
from forebay_router.workers import Worker
from forebay_wire import labels
from forebay_wire.load import LoadReport
from support.fake_kube import Call, FakeApi, Object, Refused, eventually


def pod(
    name: str = "w1", pool: str = "decode", role: str | None = "decode", *, ready: bool = True, **more: Any
) -> Object:
    marks = {labels.MODEL: "assistant", labels.POOL: pool, **more.pop("marks", {})}
    if role is not None:
        marks[labels.ROLE] = role
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "llm", "uid": f"uid-{name}", "labels": marks, **more.pop("meta", {})},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 9000}]}]},
        "status": {
            "podIP": "10.0.0.1",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            **more.pop("status", {}),
        },
    }


@pytest.mark.parametrize(
    ("given", "known", "draining"),
    [
        (pod(), False, False),
        (pod(ready=False), True, False),
        (pod(marks={labels.DRAINING: "true"}), False, True),
        (pod(meta={"deletionTimestamp": "now"}), False, True),
        (pod(ready=False, marks={labels.DRAINING: "true"}), True, True),
    ],
    ids=["ready", "was ready", "fenced", "terminating", "fenced and silent"],
)
def test_who_is_a_worker(given: Object, known: bool, draining: bool) -> None:
    entry = worker_of(given, known=known)
    assert entry is not None
    assert (entry.port, entry.draining) == (9000, draining)


@pytest.mark.parametrize(
    "given",
    [
        pod(ready=False),
        pod(status={"podIP": ""}),
        pod(status={"phase": "Failed"}),
        pod(pool="neither"),
        {"metadata": {"name": "bare"}},
    ],
    ids=["not ready yet", "no address", "ended", "unknown pool", "bare"],
)
def test_who_is_none(given: Object) -> None:
    assert worker_of(given, known=False) is None


def test_an_unknown_role_counts_as_none() -> None:
    entry = worker_of(pod(role="cook"), known=False)
    assert entry is not None
    assert entry.role is None


def test_a_pod_stays_once_it_was_ready_and_its_namesake_does_not_inherit_that() -> None:
    table = PodTable()
    table.event("ADDED", pod())
    table.event("MODIFIED", pod(ready=False))
    assert len(table.entries()) == 1
    namesake = pod(ready=False, meta={"uid": "another"})
    table.event("MODIFIED", namesake)
    assert table.entries() == []
    table.event("ADDED", {**namesake, "status": pod()["status"]})
    table.event("DELETED", pod())
    assert len(table.entries()) == 1, "late news of the old one's end"
    table.replace([])
    assert table.entries() == []


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as serving:
        yield serving


@asynccontextmanager
async def following(
    api: FakeApi, tmp_path: Path, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[list[View]]:
    views: list[View] = []
    (tmp_path / "token").write_text("secret\n")
    discovery = PodDiscovery(
        ApiServer(api.url, tmp_path), "llm", "assistant", 20.0, clock=clock, rng=random.Random(1), backoff=(0.01, 0.05)
    )
    task = asyncio.create_task(discovery.run(views.append))
    try:
        yield views
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shown(views: list[View]) -> dict[str, str | None]:
    return {endpoint.name: endpoint.role for endpoint in views[-1]} if views else {}


async def test_labels_are_followed(api: FakeApi, tmp_path: Path) -> None:
    api.put(pod("w1"))
    api.put(pod("w2", "prefill", "prefill"))
    api.put({**pod("other"), "metadata": {**pod("other")["metadata"], "labels": {labels.MODEL: "another"}}})
    async with following(api, tmp_path) as views:
        await eventually(lambda: shown(views) == {"w1": "decode", "w2": "prefill"}, "the first view")
        api.put(pod("w1", role="prefill"))
        await eventually(lambda: shown(views) == {"w1": "prefill", "w2": "prefill"}, "a role switched")
        api.put(pod("w2", "prefill", "prefill", marks={labels.DRAINING: "true"}))
        await eventually(lambda: [e.name for e in views[-1] if e.draining] == ["w2"], "one fenced")
        api.remove("pods", "w2")
        await eventually(lambda: shown(views) == {"w1": "prefill"}, "one gone")
        count = len(views)
        api.put(pod("w1", role="prefill", meta={"annotations": {"a": "b"}}))
        api.put(pod("w3"))
        await eventually(lambda: "w3" in shown(views), "one more")
        assert len(views) == count + 1, "a change that says nothing new is no view"


async def test_the_last_view_stays_while_the_api_server_is_away(api: FakeApi, tmp_path: Path) -> None:
    api.put(pod("w1"))
    async with following(api, tmp_path) as views:
        await eventually(lambda: shown(views) == {"w1": "decode"}, "the first view")
        tries = 0

        def before(call: Call) -> None:
            nonlocal tries
            tries += 1
            raise Refused(503, "ServiceUnavailable")

        api.before = before
        api.close_watches()
        await eventually(lambda: tries > 5, "some tries")
        assert shown(views) == {"w1": "decode"}
        assert len(views) == 1
        api.put(pod("w2", "prefill", "prefill"))
        api.before = None
        await eventually(lambda: shown(views) == {"w1": "decode", "w2": "prefill"}, "what was missed")


async def test_an_expired_watch_lists_again(api: FakeApi, tmp_path: Path) -> None:
    api.put(pod("w1"))
    refusals = [Refused(410, "Expired")] * 3

    def before(call: Call) -> None:
        if call.verb == "watch" and refusals:
            raise refusals.pop()

    api.before = before
    async with following(api, tmp_path) as views:
        await eventually(lambda: sum(call.verb == "watch" for call in api.calls) == 4, "a watch that lasts")
        assert sum(call.verb == "list" for call in api.calls) == 4
        assert shown(views) == {"w1": "decode"}


async def test_without_a_list_there_is_no_view(api: FakeApi, tmp_path: Path) -> None:
    def before(call: Call) -> None:
        raise Refused(403, "Forbidden")

    api.before = before
    async with following(api, tmp_path) as views:
        await eventually(lambda: len(api.calls) > 5, "some tries")
        assert views == [], "not knowing is not the same as knowing of nobody"


async def test_the_home_pool_counts_after_the_grace_period(api: FakeApi, tmp_path: Path) -> None:
    now = 0.0
    api.put(pod("w1", role="prefill"))
    async with following(api, tmp_path, lambda: now) as views:
        await eventually(lambda: shown(views) == {"w1": "prefill"}, "the first view")
        api.put(pod("w2", "decode", None))
        await eventually(lambda: shown(views) == {"w1": "prefill", "w2": None}, "the operator's time")
        now = 20.0
        await eventually(lambda: shown(views) == {"w1": "prefill", "w2": "decode"}, "its home pool")


def test_a_draining_worker_is_given_nothing() -> None:
    endpoint = Endpoint("w1", "10.0.0.1", 8000, "decode", "decode", draining=True)
    worker = Worker(endpoint, suspect_after=2.0, wedged_after=45.0, now=0.0)
    worker.on_report(LoadReport("e", 1, ready=True), 0.0, from_stream=True)
    assert worker.health(0.1) is Health.DRAINING
    worker.draining = False
    assert worker.health(0.1) is Health.READY


def test_the_command_line_takes_one_source_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_args(["--kubernetes-model", "assistant", "--kubernetes-namespace", "llm"])
    assert (settings.kubernetes_model, settings.kubernetes_namespace) == ("assistant", "llm")
    for bad in ([], ["--kubernetes-model", "a", "--workers-file", "f"]):
        with pytest.raises(SystemExit):
            parse_args(bad)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ApiFailed, match="this is no pod"):
        ApiServer.in_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ApiServer.in_cluster().url == "https://[fd00::1]:443"
