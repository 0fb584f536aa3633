"""A worker's load stream, read as a router reads it."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay_wire import paths
from forebay_wire.load import LoadReport


async def read_reports(worker: Any, count: int, **sent: str) -> list[LoadReport]:
    """The next `count` reports. `sent`: further headers, with _ for -."""
    reports = []
    sent_headers = {**worker.bearer, **{name.replace("_", "-"): value for name, value in sent.items()}}
    async with worker.session.get(worker.url + paths.LOAD_STREAM, headers=sent_headers) as response:
        assert response.status == 200
        async for line in response.content:
            reports.append(msgspec.json.decode(line, type=LoadReport))
            if len(reports) == count:
                break
    return reports
