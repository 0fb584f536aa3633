"""A Prometheus that has scraped given pages: instant queries by name, namespace and pod, and timestamp() of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

_QUERY = re.compile(
    r'(?P<stamp>timestamp\()?\{__name__=~"(?P<name>[^"]*)",namespace="(?P<space>[^"]*)",pod=~"(?P<pod>[^"]*)"\}\)?'
)


@dataclass
class FakePrometheus:
    clock: float = 5000.0
    """Its own: whatever others think the time is."""

    namespace: str = "llm"
    pages: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By pod: the page as scraped, and when by its own clock."""

    drop: frozenset[str] = frozenset()
    """Labels that its configuration drops."""

    spoil: Any = None
    """A response to give instead: a status, a body, a redirect's headers, or seconds to wait."""

    seen: list[dict[str, str]] = field(default_factory=list)
    """Headers of the queries."""

    def scrape(self, **pages: bytes) -> None:
        for pod, page in pages.items():
            self.pages[pod.replace("_", "-")] = (page.decode(), self.clock)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.headers))
        if isinstance(self.spoil, int):
            return web.Response(status=self.spoil, text="upstream failed")
        if isinstance(self.spoil, dict):
            return web.Response(status=302, headers=self.spoil)
        if isinstance(self.spoil, float):
            await asyncio.sleep(self.spoil)
        if isinstance(self.spoil, str):
            return web.Response(text=self.spoil, content_type="text/html")
        query = _QUERY.fullmatch(request.query["query"])
        assert query is not None, request.query["query"]
        names = re.compile(query["name"].replace("\\\\", "\\"))
        result = []
        for pod, (page, at) in self.pages.items():
            if query["space"] != self.namespace or not re.fullmatch(query["pod"], pod):
                continue
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if not names.fullmatch(sample.name):
                        continue
                    labels = {"__name__": sample.name, "pod": pod, "namespace": self.namespace, **sample.labels}
                    if query["stamp"]:
                        del labels["__name__"]
                    labels = {k: v for k, v in labels.items() if k not in self.drop}
                    value = at if query["stamp"] else sample.value
                    result.append({"metric": labels, "value": [self.clock, str(value)]})
        body = {"status": "success", "data": {"resultType": "vector", "result": result}}
        return web.Response(text=json.dumps(body), content_type="application/json")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/api/v1/query", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
