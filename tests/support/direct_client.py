"""The operator's client on a fake API server without HTTP between: for tests of many steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from forebay_operator import kube
from support.kube_calls import Call, Refused
from support.objects import Object

if TYPE_CHECKING:
    from support.fake_kube import FakeApi


class DirectClient(kube.KubeClient):
    def __init__(self, api: FakeApi) -> None:
        super().__init__(None)
        self._api = api

    async def close(self) -> None:
        pass

    async def _request(
        self,
        verb: str,
        method: str,
        resource: kube.Resource,
        namespace: str | None,
        name: str = "",
        *,
        subresource: str = "",
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        api, call = self._api, Call(verb, resource.plural, namespace or "", name, subresource, body, dict(query or {}))
        api.calls.append(call)
        try:
            if api.before is not None:
                api.before(call)
            if call.plural in api.missing:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            _, answer = api.handle(call, resource, content_type)
            if call.changes and api.on_write is not None:
                api.on_write()
            if api.after is not None:
                api.after(call)
        except Refused as error:
            raw = json.dumps({"reason": error.reason, "message": str(error)}).encode()
            raise kube.error_of(str(call), error.status, raw, error.headers.get("Retry-After")) from error
        return answer
