"""The `forebay-operator` command as a process: it leads, works, and on SIGTERM gives its Lease back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import FakeApi, eventually

NAMELESS = """
import pwd
def nobody(number): raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = nobody
from forebay_operator.main import main
main()
"""
"""The command as a user who has a number and no name, as in an image."""


IMPATIENT = """
import functools
from forebay_operator import main
main.Settings = functools.partial(main.Settings, kinds_every=0.2)
main.main()
"""
"""The command, which looks for optional kinds five times a second."""


@asynccontextmanager
async def process(
    folder: Path, url: str, *arguments: str, code: str = NAMELESS
) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context],
        "clusters": [{"name": "c", "cluster": {"server": url}}], "users": [{"name": "u", "user": {"token": "none"}}],
    }))  # fmt: skip
    words = ["-c", code, "--operator-namespace=forebay", "--host=127.0.0.1", "--port=0", *arguments]
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    environment = {**{k: v for k, v in os.environ.items() if k not in names}, "KUBECONFIG": str(config)}
    started = await asyncio.create_subprocess_exec(
        sys.executable, *words, env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


def holder(api: FakeApi) -> str | None:
    lease = api.find("leases", "forebay-operator", "forebay")
    return None if lease is None else str(lease["spec"]["holderIdentity"])


@pytest.mark.parametrize("standby", [False, True], ids=["leading", "standing by"])
async def test_sigterm_ends_it_in_order(api: FakeApi, tmp_path: Path, standby: bool) -> None:
    cluster = FakeCluster(api)
    api.on_write = cluster.control
    api.missing.add("podmonitors")
    if standby:
        api.put({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "forebay-operator", "namespace": "forebay"},
            "spec": {"holderIdentity": "another", "renewTime": "now", "leaseDurationSeconds": 3600},
        })  # fmt: skip
    api.put(simulated_model(1, 1))
    async with process(tmp_path, api.url) as running:
        if standby:
            await eventually(lambda: any(call.plural == "leases" for call in api.calls), "a look at the Lease", 30)
        else:
            await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 1}, "the model served", 30)
        running.send_signal(signal.SIGTERM)
        _, said = await asyncio.wait_for(running.communicate(), 20)
    assert running.returncode == 0, said.decode()
    assert b"Traceback" not in said
    assert holder(api) == ("another" if standby else "")
    assert bool(cluster.workers()) is not standby, "a standby writes nothing"


async def test_without_an_api_server_it_says_so(tmp_path: Path) -> None:
    async with process(tmp_path, "http://127.0.0.1:1") as running:
        _, said = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 1
    assert said.decode().splitlines()[-1].startswith("forebay-operator: list PodMonitor")


async def test_other_kinds_take_no_other_process(api: FakeApi, tmp_path: Path) -> None:
    """Prometheus' operator comes: each replica of ours begins anew, and no pod of it restarts."""
    cluster = FakeCluster(api)
    api.on_write = cluster.control
    api.missing.add("podmonitors")
    api.put(simulated_model(1, 1))

    async with process(tmp_path, api.url, code=IMPATIENT) as running:
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 1}, "the model served", 30)
        assert not api.all("podmonitors")
        first = holder(api)
        api.missing.discard("podmonitors")
        await eventually(lambda: bool(api.all("podmonitors")), "a PodMonitor", 30)
        assert running.returncode is None
        assert holder(api) == first, "the same process leads"
        running.send_signal(signal.SIGTERM)
        _, words = await asyncio.wait_for(running.communicate(), 20)
    assert running.returncode == 0, words.decode()
    assert b"Traceback" not in words
    assert words.count(b"beginning anew") == 1
    assert holder(api) == ""
