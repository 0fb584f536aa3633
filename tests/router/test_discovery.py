"""The workers file: roles, grace, and files that are broken or missing for a while."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay_router.discovery import BadWorkersFile, Roles, View, WorkersFileDiscovery, parse_workers
from forebay_wire.discovery import WorkerEntry


def entry(name: str, role: str | None = None, **values: Any) -> dict[str, Any]:
    return {"name": name, "host": "127.0.0.1", "port": 9000, "pool": "prefill", "role": role, **values}


def write(path: Path, *entries: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"workers": entries}))
    new.replace(path)


@pytest.mark.parametrize(
    ("workers", "part"),
    [
        ([entry("a"), entry("a")], "worker 'a' is listed twice"),
        ([entry("a", port=0)], "port 0 is not in 1..65535"),
        ([entry("a", pool="both")], "pool 'both'"),
        ([entry("a", role="idle")], "role 'idle'"),
        ([entry("a", colour="red")], "colour"),
        ([{"name": "a"}], "host"),
    ],
)
def test_bad_files(workers: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(BadWorkersFile, match=part):
        parse_workers(json.dumps({"workers": workers}).encode())


def roles(resolver: Roles, now: float, **given: str | None) -> dict[str, str | None]:
    entries = [WorkerEntry(name=n, host="h", port=1, pool="prefill", role=role) for n, role in given.items()]
    return {endpoint.name: endpoint.role for endpoint in resolver.resolve(entries, now)}


def test_without_an_operator_the_pool_is_the_role_at_once() -> None:
    assert roles(Roles(20.0), 0.0, a=None, b=None) == {"a": "prefill", "b": "prefill"}


def test_with_an_operator_a_new_worker_waits_for_its_role() -> None:
    resolver = Roles(20.0)
    assert roles(resolver, 0.0, a="decode", b=None) == {"a": "decode", "b": None}
    assert roles(resolver, 19.9, a="decode", b=None) == {"a": "decode", "b": None}
    assert roles(resolver, 20.0, a="decode", b=None) == {"a": "decode", "b": "prefill"}
    assert roles(resolver, 21.0, a="decode", b="decode") == {"a": "decode", "b": "decode"}
    # The grace period begins anew when a role is taken away.
    assert roles(resolver, 22.0, a=None, b="decode") == {"a": None, "b": "decode"}
    assert roles(resolver, 41.9, a=None, b="decode") == {"a": None, "b": "decode"}
    assert roles(resolver, 42.0, a=None, b="decode") == {"a": "prefill", "b": "decode"}


def test_a_broken_file_keeps_the_last_good_view(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers.json"
    discovery = WorkersFileDiscovery(path, 20.0)
    assert discovery.poll() == ()
    write(path, entry("a", "decode"))
    good = discovery.poll()
    assert [endpoint.role for endpoint in good] == ["decode"]
    path.write_text('{"workers": [')
    for _ in range(5):
        assert discovery.poll() == good
    path.unlink()
    assert discovery.poll() == good
    write(path, entry("a", "prefill"))
    assert [endpoint.role for endpoint in discovery.poll()] == ["prefill"]
    complaints = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(complaints) == 3  # missing, broken, missing again: once each
    assert "keeping the 1 workers known" in complaints[1]


def test_a_rewrite_of_the_same_size_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    discovery = WorkersFileDiscovery(path, 20.0)
    for port in (9001, 9002, 9003):
        path.write_text(json.dumps({"workers": [entry("a", port=port)]}))
        assert [endpoint.port for endpoint in discovery.poll()] == [port]


async def test_run_tells_changes_only(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write(path, entry("a", "decode"))
    views: asyncio.Queue[View] = asyncio.Queue()
    task = asyncio.create_task(WorkersFileDiscovery(path, 20.0).run(views.put_nowait))
    async with asyncio.timeout(5):
        assert [endpoint.name for endpoint in await views.get()] == ["a"]
        write(path, entry("a", "decode"), entry("b", "decode"))
        assert [endpoint.name for endpoint in await views.get()] == ["a", "b"]
    assert views.empty()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
