"""The whole product on one API server: operator, routers and simulated workers as the processes that they are.

Under steady traffic everything that moves workers is done, and no stream may be lost, truncated or wrong.
"""

from __future__ import annotations

import signal
from typing import Any

from e2e.on_processes.conftest import ProcessSite, simulated_model
from e2e.traffic import Traffic
from forebay_operator.api import labels
from support.client import complete
from support.fake_kube import Call, Refused

STREAMS = 8
SETTLE_SECONDS = 90.0


def engine(**more: Any) -> dict[str, Any]:
    return {"type": "Simulated", "kvCache": {"memory": "1Gi"}, "simulated": {"performanceModel": "slow"}, **more}


def model(prefill: int, decode: int, **more: Any) -> dict[str, Any]:
    """Roles are moved by the tests themselves."""
    return simulated_model(
        prefill, decode, **{"engine": engine(), "drain": {"timeoutSeconds": 60}, "scaling": {"mode": "Off"}, **more}
    )


async def test_no_stream_is_harmed(site: ProcessSite) -> None:
    await site.apply(model(1, 3))
    await site.until("four workers serve", lambda: site.at(1, 3), SETTLE_SECONDS)
    traffic = Traffic(await site.router(), "assistant", streams=STREAMS)
    await traffic.learn(site.session)
    await traffic.start(site.session)

    async def flowing(done: int) -> None:
        goal = traffic.count + done

        async def reached() -> bool:
            return traffic.count >= goal

        await site.until(f"{done} more answers", reached)

    await flowing(STREAMS)

    # Role switches, both ways.
    for _ in range(2):
        for prefill, decode in ((2, 2), (1, 3)):
            await site.set_targets(prefill, decode)
            await site.until(f"roles {prefill}:{decode}", lambda p=prefill, d=decode: site.at(p, d))  # type: ignore[misc]
            await flowing(2)

    # Scale in.
    await site.apply(model(1, 2))
    await site.until("one less", lambda: site.at(1, 2), SETTLE_SECONDS)
    await flowing(STREAMS)

    # The operator is killed while a worker leaves, and another one goes on.
    await site.apply(model(1, 1))

    async def leaving() -> bool:
        return any(labels.DRAINING in pod["metadata"]["labels"] for pod in await site.pods())

    await site.until("a worker fenced", leaving)
    site.end_operator(signal.SIGKILL)
    await flowing(2)
    site.start_operator()
    await site.until("one less", lambda: site.at(1, 1), SETTLE_SECONDS)

    # Roll out at 1P:1D without room for one more.
    before = {pod["metadata"]["uid"] for pod in await site.pods()}
    await site.apply(model(1, 1, engine=engine(image="engine:2")))

    async def rolled() -> bool:
        pods = {pod["metadata"]["uid"] for pod in await site.pods()}
        return not pods & before and await site.at(1, 1)

    await site.until("both rolled", rolled, 2 * SETTLE_SECONDS)
    await flowing(STREAMS)

    # Once more, with streams that move to the other worker at once.
    before = {pod["metadata"]["uid"] for pod in await site.pods()}
    move = {"policy": "Move", "timeoutSeconds": 60}
    await site.apply(model(1, 1, engine=engine(image="engine:2"), drain=move))
    await site.until("both rolled by moving", rolled, 2 * SETTLE_SECONDS)
    await flowing(STREAMS)
    await traffic.stop()
    assert (traffic.lost, traffic.wrong, traffic.cut, traffic.refused) == ([], [], 0, 0)
    assert traffic.count > 5 * STREAMS


async def test_serving_goes_on_without_an_api_server(site: ProcessSite) -> None:
    await site.apply(model(1, 1))
    await site.until("both serve", lambda: site.at(1, 1), SETTLE_SECONDS)
    url = await site.router()
    if site.api is None:
        assert site.plane is not None
        site.plane.signal("kube-apiserver", signal.SIGSTOP)
    else:

        def before(call: Call) -> None:
            raise Refused(503, "ServiceUnavailable")

        site.api.before = before
        site.api.close_watches()
    for turn in range(3):
        answer = await complete(site.session, url, {"model": "assistant", "prompt": f"{turn} hello", "max_tokens": 20,
                                                    "stream": True})  # fmt: skip
        assert (answer.status, answer.error, answer.done) == (200, None, True)
    if site.plane is not None:
        site.plane.signal("kube-apiserver", signal.SIGCONT)
