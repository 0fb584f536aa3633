"""Leader election: one leader at a time, whatever the clocks say and however the API server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.kube import LEASES, AlreadyExists, Conflict, KubeClient, NotFound, Object, Unavailable
from forebay_operator.leader import LeaderElector, LeaseTimes, Watched
from support.fake_kube import Call, FakeApi, Refused, eventually

FAST = LeaseTimes(duration=0.5, renew_deadline=0.35, retry=0.03)


def elector(kube: KubeClient, identity: str, wall: datetime | None = None, **options: Any) -> LeaderElector:
    return LeaderElector(
        kube,
        namespace="forebay",
        name="forebay-operator",
        identity=identity,
        clock=asyncio.get_running_loop().time,
        wall=lambda: wall or datetime.now(UTC),
        times=options.get("times", FAST),
    )


def holder(api: FakeApi) -> str:
    lease = api.find("leases", "forebay-operator", "forebay")
    return "" if lease is None else str(lease["spec"]["holderIdentity"])


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_times_must_rise() -> None:
    with pytest.raises(ValueError, match="must rise"):
        LeaseTimes(duration=10, renew_deadline=10, retry=2)


def test_another_clock_does_not_matter() -> None:
    """A holder whose clock is a year behind or ahead is left alone while it renews, and replaced when it stops."""
    watched = Watched("b", 15.0)

    def lease(stamp: str) -> Object:
        return {"spec": {"holderIdentity": "a", "renewTime": stamp, "leaseDurationSeconds": 15}}

    for second in range(60):
        assert not watched.may_take(lease(f"1999-01-01T00:00:{second:02}Z"), float(second * 10))
    assert not watched.may_take(lease("1999-01-01T00:00:59Z"), 604.9)
    assert watched.may_take(lease("1999-01-01T00:00:59Z"), 605.0)


def test_a_longer_duration_of_the_holder_is_respected() -> None:
    watched = Watched("b", 15.0)
    lease: Object = {"spec": {"holderIdentity": "a", "renewTime": "x", "leaseDurationSeconds": 60}}
    assert not watched.may_take(lease, 0.0)
    assert not watched.may_take(lease, 59.0)
    assert watched.may_take(lease, 60.0)


async def test_the_second_waits_and_follows_at_once_after_a_release(api: FakeApi, kube: KubeClient) -> None:
    first, second = elector(kube, "one"), elector(kube, "two", datetime(1990, 1, 1, tzinfo=UTC))
    tasks = [asyncio.create_task(first.run())]
    await asyncio.wait_for(first.acquired(), 5)
    tasks.append(asyncio.create_task(second.run()))
    reads = len(api.calls)
    await eventually(lambda: len(api.calls) > reads + 10, "ten more tries")
    assert first.is_leader()
    assert not second.is_leader()
    tasks[0].cancel()
    await asyncio.wait_for(second.acquired(), 5)
    assert not first.is_leader()
    lease = api.find("leases", "forebay-operator", "forebay")
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 2
    await stop(*tasks)


async def test_a_leader_that_cannot_renew_ends_before_the_next_begins(api: FakeApi) -> None:
    clients = api.client(), api.client()
    first, second = elector(clients[0], "one"), elector(clients[1], "two")
    leading = asyncio.create_task(first.run())
    await asyncio.wait_for(first.acquired(), 5)

    def before(call: Call) -> None:
        if call.write and call.body["spec"]["holderIdentity"] == "one":
            raise Refused(500, "InternalError")

    api.before = before
    following = asyncio.create_task(second.run())
    overlapped = False
    while not second.is_leader():
        await asyncio.sleep(0.005)
        overlapped |= first.is_leader() and second.is_leader()
    assert not overlapped
    await asyncio.wait_for(leading, 5)
    await stop(following)
    for client in clients:
        await client.close()


async def test_two_start_at_once(api: FakeApi, kube: KubeClient) -> None:
    electors = [elector(kube, name) for name in ("one", "two", "three")]
    tasks = [asyncio.create_task(e.run()) for e in electors]
    await eventually(lambda: any(e.is_leader() for e in electors), "a leader")
    calls = len(api.calls)
    await eventually(lambda: len(api.calls) > calls + 20, "twenty more tries")
    assert [e.is_leader() for e in electors].count(True) == 1
    await stop(*tasks)


class Steps:
    """Leases of several electors on one virtual clock, with requests that are lost before or after they count."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lease: Object | None = None
        self.version = 0

    def kube(self, fault: Callable[[], str]) -> Any:
        steps = self

        class Api:
            async def get(self, resource: Any, namespace: str, name: str) -> Object:
                assert resource is LEASES
                if fault() == "before":
                    raise Unavailable("get", 0, "lost", "")
                if steps.lease is None:
                    raise NotFound("get", 404, "", "")
                return dict(steps.lease)

            async def _write(self, obj: Object) -> Object:
                what = fault()
                if what == "before":
                    raise Unavailable("update", 0, "lost", "")
                steps.version += 1
                steps.lease = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(steps.version)}}
                if what == "after":
                    raise Unavailable("update", 0, "lost", "")
                return steps.lease

            async def create(self, resource: Any, obj: Object) -> Object:
                if steps.lease is not None:
                    raise AlreadyExists("create", 409, "", "")
                return await self._write(obj)

            async def replace(self, resource: Any, obj: Object) -> Object:
                if steps.lease is None or obj["metadata"]["resourceVersion"] != str(steps.version):
                    raise Conflict("update", 409, "", "")
                return await self._write(obj)

        return Api()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.0, 20.0), st.sampled_from(["", "", "", "before", "after"])),
        min_size=5,
        max_size=80,
    )
)
def test_never_two_leaders(script: list[tuple[int, float, str]]) -> None:
    """Whoever acts when, whatever is lost: at no moment do two hold themselves for the leader."""
    steps = Steps()
    fault = ""
    electors = [
        LeaderElector(
            steps.kube(lambda: fault),
            namespace="n",
            name="l",
            identity=name,
            clock=lambda: steps.now,
            wall=lambda: datetime.fromtimestamp(steps.now, UTC),
        )
        for name in ("a", "b", "c")
    ]

    async def run() -> None:
        nonlocal fault
        for who, wait, fault in script:  # noqa: B007 (read by the closure)
            steps.now += wait
            await electors[who]._try()
            assert sum(e.is_leader() for e in electors) <= 1

    asyncio.run(run())
